"""Filters: every drop has a reason."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.filters import NAMED, apply_filters, check_thresholds, resolve_filters, trial_group
from rlpipe.base.errors import UserError
from rlpipe.records.columns import as_row
from rlpipe.records.rollout import Group
from tests.paths import ROOT
from tests.rows import BATCH, rollout, to_parquet


def group(rewards: list[float], completions: list[str] | None = None, lengths: list[int] | None = None) -> Group:
    texts = completions or [str(index) for index in range(len(rewards))]
    sizes = lengths or [3] * len(rewards)
    rollouts = zip(rewards, texts, sizes, strict=True)
    return [
        rollout({"reward": reward, "completion": text, "completion_tokens": list(range(size))})
        for reward, text, size in rollouts
    ]


@pytest.mark.parametrize(
    ("name", "threshold", "rollouts", "reason"),
    [
        ("nonzero_std", 0.0, group([1, 1, 1]), "zero_std_1.0"),
        ("nonzero_std", 0.0, group([0.1] * 3), "zero_std_0.1"),
        ("nonzero_std", 0.0, group([-0.01] * 2), "zero_std_0.0"),
        ("nonzero_std", 0.0, group([0.0, 1e-6]), None),
        ("nonzero_std", 0.5, group([0, 1]), "zero_std_0.5"),
        ("nonzero_std", 0.49, group([0, 1]), None),
        ("min_reward", 0.5, group([0, 1]), None),
        ("min_reward", 0.51, group([0, 1]), "low_reward"),
        ("any_success", 1.0, group([0, 1]), None),
        ("any_success", 1.0, group([0, 0.9]), "no_success"),
        ("diversity", 0.5, group([0, 1, 0, 1], ["a", "a", "b", "b"]), None),
        ("diversity", 0.5, group([0, 1, 0, 1], ["a", "a", "a", "a"]), "low_diversity"),
        ("reasonable_length", 4, group([0, 1], lengths=[2, 6]), None),
        ("reasonable_length", 4, group([0, 1], lengths=[2, 7]), "too_long"),
        ("minimum_length", 4, group([0, 1], lengths=[2, 6]), None),
        ("minimum_length", 0, group([0, 1], lengths=[0, 0]), None),
        ("minimum_length", 4.5, group([0, 1], lengths=[4, 5]), None),
        ("minimum_length", 4, group([0, 1], lengths=[2, 5]), "too_short"),
    ],
)
def test_named(name: str, threshold: float, rollouts: Group, reason: str | None) -> None:
    assert NAMED[name](rollouts, threshold) == reason


@given(st.floats(-10, 10), st.integers(2, 9))
def test_equal_rewards_are_always_dropped(reward: float, size: int) -> None:
    assert str(NAMED["nonzero_std"](group([reward] * size), 0.0)).startswith("zero_std_")


def test_the_first_filter_that_drops_gives_the_reason() -> None:
    groups = [group([0, 0]), group([0, 1]), group([1, 1]), group([0, 1], ["a", "a"])]
    kept, reasons = apply_filters(groups, resolve_filters({"any_success": 0.5, "nonzero_std": 0.0, "diversity": 1.0}))
    assert kept == [1]
    assert reasons == {0: "no_success", 2: "zero_std_1.0", 3: "low_diversity"}
    assert apply_filters(groups, []) == ([0, 1, 2, 3], {})
    assert apply_filters([], resolve_filters({"nonzero_std": 0.0})) == ([], {})


def test_groups_without_a_token_to_train_are_dropped_where_truncated_rollouts_are_masked() -> None:
    ends = [["length", "length"], ["length", "stop"]]
    groups = [[replace(row, finish_reason=end) for row, end in zip(group([0, 1]), of, strict=True)] for of in ends]
    assert apply_filters(groups, resolve_filters({}, mask_truncated=True)) == ([1], {0: "all_truncated"})
    assert apply_filters(groups, resolve_filters({})) == ([0, 1], {})


def test_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "def odd(group, threshold):",
        "    return 'odd' if len(group) % 2 else None",
        "def bad(group, threshold):",
        "    return True",
    ]
    (tmp_path / "my_filters_here.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    filters = resolve_filters({"my_filters_here:odd": 0.0})
    assert apply_filters([group([0, 1]), group([0, 1, 2])], filters) == ([0], {1: "odd"})
    with pytest.raises(UserError, match="answered True"):
        apply_filters([group([0, 1])], resolve_filters({"my_filters_here:bad": 0.0}))
    with pytest.raises(UserError, match=r"^rl\.filters: there is no filter 'no_filter'; use .*nonzero_std"):
        resolve_filters({"no_filter": 1.0})


def test_the_trial_group_has_every_column_of_the_scores() -> None:
    rows = trial_group(3, iter(["exact"]))
    assert [list(as_row(row)) for row in rows] == [BATCH.names] * 3
    assert [row.reward_parts for row in rows] == [{"exact": 0.0}, {"exact": 1.0}, {"exact": 0.0}]
    assert to_parquet([as_row(row) for row in rows], BATCH)
    for name in NAMED:
        apply_filters([rows], resolve_filters({name: 1.0}))


def test_the_filter_of_the_docs_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "filters.md").read_text()
    (tmp_path / "my_filters.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = trial_group(4, ["exact"])
    filters = {"my_filters:few_truncated": 0.5}
    assert apply_filters([rows, [replace(row, finish_reason="length") for row in rows]], resolve_filters(filters)) == (
        [0],
        {1: "truncated"},
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def f(group):\n    return None",
            r"raised TypeError: f\(\) takes 1 positional.*called as filter\(group, threshold\)",
        ),
        (
            "def f(group, threshold):\n    return group[0]['prize'] > threshold",
            "raised KeyError: 'prize'.*my_trial_filter",
        ),
        ("def f(group, threshold):\n    return False", "answered False; it must answer None to keep"),
        ("def f(group, threshold):\n    return ''", "answered ''"),
    ],
)
def test_a_custom_filter_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    (tmp_path / "my_trial_filter.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_trial_filter", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=said):
        apply_filters([trial_group(4, ["exact"])], resolve_filters({"my_trial_filter:f": 0.0}))


@pytest.mark.parametrize(
    ("name", "threshold", "said"),
    [
        ("nonzero_std", -0.1, "a standard deviation of rewards, at least 0$"),
        ("diversity", 1.5, "a share of the completions, at least 0 and at most 1$"),
        ("diversity", -0.5, "at least 0"),
        (
            "reasonable_length",
            -5,
            r"rl\.filters\.reasonable_length=-5: the threshold is a number of tokens, at least 1$",
        ),
        ("min_reward", float("nan"), "a number that is finite"),
        ("any_success", float("inf"), "a number that is finite"),
        ("nonzero_std", float("nan"), "at least 0"),
    ],
)
def test_a_threshold_without_sense_is_refused(name: str, threshold: float, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_thresholds({name: threshold})


def test_two_lengths_are_a_band_that_holds_its_ends_and_is_not_empty() -> None:
    check_thresholds(ends := {"minimum_length": 5.0, "reasonable_length": 5.0})
    groups = [group([0, 1], lengths=lengths) for lengths in ([4, 6], [4, 5], [5, 6])]
    assert apply_filters(groups, resolve_filters(ends)) == ([0], {1: "too_short", 2: "too_long"})
    with pytest.raises(
        UserError,
        match=r"rl\.filters\.minimum_length=5\.5: is above rl\.filters\.reasonable_length=5, so no group passes both",
    ):
        check_thresholds({"reasonable_length": 5.0, "minimum_length": 5.5})


@pytest.mark.parametrize(
    ("name", "said"), [("nonzero", "nonzero_std, min_reward"), ("nowhere_here:f", "rl.filters.*nowhere_here")]
)
def test_unknown_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve_filters({name: 0.0})
