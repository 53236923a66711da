"""The decisions of a search: who is tried, who goes on, and that a decision stands."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.cli_search import varied
from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.extras.search import halving
from rlpipe.extras.search.halving import Decision, Search, check_together
from rlpipe.extras.search.report import table
from rlpipe.store.backend import open_store
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import AT_SFT, Run
from tests.paths import PRESETS
from tests.store.test_run import commit_iterations

RATES = ["1e-4", "2e-4", "4e-4", "8e-4"]
TINY = read_config("tiny", ["run=a"], PRESETS)
SEARCH = Search("s", "a", AT_SFT, {"rl.learning_rate": RATES}, [5, 10], 0.5, "evaluation/words_pass_at_1")


def config_of(search: Search, parent: Run, name: str) -> PipelineConfig:
    return search.config(parent, name, search.candidates[name], 10)


@pytest.fixture
def parent(tmp_path: Path) -> Run:
    return create_or_continue(read_config("tiny", ["run=a", f"store=file://{tmp_path}/store"], PRESETS))


def test_each_combination_is_a_candidate_in_a_fixed_order() -> None:
    two = replace(SEARCH, vary={"rl.learning_rate": ["1e-4", "2e-4"], "rl.clip_high": ["0.2", "0.3"]})
    assert {name: one.settings for name, one in two.candidates.items()} == {
        "s-0": ["rl.learning_rate=1e-4", "rl.clip_high=0.2"],
        "s-1": ["rl.learning_rate=1e-4", "rl.clip_high=0.3"],
        "s-2": ["rl.learning_rate=2e-4", "rl.clip_high=0.2"],
        "s-3": ["rl.learning_rate=2e-4", "rl.clip_high=0.3"],
    }
    many = replace(SEARCH, vary={"seed": [str(number) for number in range(12)]})
    assert list(many.candidates)[0::11] == ["s-00", "s-11"]


def test_a_candidate_has_its_own_settings_and_the_rest_of_the_run(parent: Run) -> None:
    config = config_of(SEARCH, parent, "s-2")
    assert (config.run, config.rl.learning_rate, config.rl.num_iterations) == ("s-2", 4e-4, 10)
    assert config.store == parent.store.url
    assert (config.seed, config.rl.num_prompts) == (parent.config.seed, parent.config.rl.num_prompts)
    assert config_of(replace(SEARCH, at=3), parent, "s-0").rl.num_iterations == 14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vary": {"rl.learning_rate": ["1e-4"]}}, "--vary: 1 candidates"),
        ({"vary": {"seed": [str(number) for number in range(257)]}}, "--vary: 257 candidates"),
        ({"rungs": []}, r"--rungs \[\]"),
        ({"rungs": [5, 5]}, "rising order"),
        ({"rungs": [0, 5]}, "from 1 on"),
        ({"keep": 1.0}, "--keep 1"),
        ({"by": "rollout/reward_mean"}, "--by rollout/reward_mean: use a metric of evaluations"),
        ({"at": 7}, "iteration"),
        ({"vary": {"sft.learning_rate": ["1e-3", "2e-3"]}, "at": 0}, "--vary: forks share what came before RL"),
        ({"vary": {"rl.num_iterations": ["5", "9"]}}, "--vary rl.num_iterations: the search sets it itself"),
        ({"vary": {"rl.learning_rate": ["1e-4", "0.0001"]}}, "two values, or combinations, compute the same"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    change: dict[str, Any], message: str, parent: Run
) -> None:
    commit_iterations(parent, 1)
    with pytest.raises(UserError, match=message):
        replace(SEARCH, **({"at": 0} | change)).check(parent)


@given(
    st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 0.5, -1.0, 1.0])), min_size=4, max_size=4),
    st.sampled_from([0.1, 0.25, 0.5, 0.74, 0.99]),
)
def test_the_best_go_on_and_of_equals_the_first(scores: list[float | None], keep: float) -> None:
    search = replace(SEARCH, keep=keep)
    given_scores = dict(zip(search.candidates, scores, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(open_store(f"file://{folder}/store"), TINY)
        if all(score is None for score in scores):
            with pytest.raises(UserError, match="no candidate came through 5 iterations"):
                search.decide(run, [], given_scores, {})
            return
        kept = search.decide(run, [], given_scores, {}).kept
    order = [(-score, number, name) for number, (name, score) in enumerate(given_scores.items()) if score is not None]
    assert kept == [name for *_, name in sorted(order)][: len(kept)]
    assert 1 <= len(kept) == min(len(order), -(-4 * int(keep * 100) // 100))


def test_a_decision_stands_whoever_decides_again(parent: Run) -> None:
    first = SEARCH.decide(parent, [], {"s-0": 0.1, "s-1": 0.3, "s-2": 0.2, "s-3": None}, {"s-3": "not finite"})
    assert first == Decision(
        5, {"s-0": 0.1, "s-1": 0.3, "s-2": 0.2, "s-3": None}, ["s-1", "s-2"], {"s-3": "not finite"}
    )
    assert SEARCH.decide(parent, [], {"s-0": 0.9, "s-1": 0.0, "s-2": 0.0, "s-3": 0.0}, {}) == first
    assert list(SEARCH.decided(parent.store)) == [first]
    last = SEARCH.decide(parent, [first], {"s-1": 0.3, "s-2": 0.4}, {})
    assert last.kept == ["s-2"] and list(SEARCH.decided(parent.store)) == [first, last]
    lines = table(SEARCH, [first, last])
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| s-2", "| s-1", "| s-0", "| s-3"]
    assert lines[2].endswith("| 0.200 | 0.400 | the winner |") and lines[5].endswith("| not finite |")
    assert lines[-1] == "The winner: s-2 (rl.learning_rate=4e-4), a fork of a at sft"
    report = SEARCH.outcome(parent.store, "s-2", "s-2 (rl.learning_rate=4e-4)", "", "rlpipe resume s-2")
    assert (report.winner, report.decisions) == ("s-2", [first, last]) and [*report.candidates] == [*SEARCH.candidates]
    assert report.lines()[-1].endswith("is run s-2 (rl.learning_rate=4e-4). For more iterations: rlpipe resume s-2")


def test_a_search_of_the_same_name_is_the_same_search(parent: Run) -> None:
    SEARCH.begin(parent.store)
    SEARCH.begin(parent.store)
    with pytest.raises(UserError, match=r"was begun otherwise \(keep 0\.5 -> 0\.25\): choose another --name"):
        replace(SEARCH, keep=0.25).begin(parent.store)


def test_values_are_read_as_they_are_written() -> None:
    entries = ["rl.clip_high = 0.2, 0.28", "rl.filters={a = 1.0, b = 2.0},{a = 1.0}"]
    assert varied(entries) == {
        "rl.clip_high": ["0.2", "0.28"],
        "rl.filters": ["{a = 1.0, b = 2.0}", "{a = 1.0}"],
    }
    for wrong in ("rl.clip_high", "=1", "rl.clip_high="):
        with pytest.raises(UserError, match="write it as"):
            varied([wrong])
    with pytest.raises(UserError, match=r"rl\.clip_high stands there twice; name all its values in one --vary"):
        varied([entries[0], "rl.clip_high=0.3"])


def test_a_candidate_that_a_rule_ended_is_no_damage(parent: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halving, "reason_to_stop", lambda run, phase, done: f"stop.kl_max after {phase} {done}")
    assert SEARCH.stopped(parent.store, "a", 5) == "stop.kl_max after rl 0"
    assert SEARCH.stopped(parent.store, "a", 0) == "", "it has come as far as was asked for"


@pytest.mark.parametrize(
    ("together", "sets", "message"),
    [
        (0, [], "--together 0: use a number of candidates from 1 on"),
        (
            2,
            ["engines.gpu_ids=[0]", "engines.count=1"],
            r"--together 2: engines\.gpu_ids=\[0\] would be the GPUs of all of them",
        ),
        (2, ["trainer.gpu_ids=[0, 1]", "trainer.ranks=2"], r"trainer\.gpu_ids=\[0, 1\]"),
    ],
)
def test_candidates_that_would_share_a_gpu_are_not_trained_at_once(
    together: int, sets: list[str], message: str
) -> None:
    config = read_config("tiny", ["run=a", "model.dtype=bfloat16", *sets], PRESETS)
    with pytest.raises(UserError, match=message):
        check_together(config, together)
    check_together(config, 1)
    check_together(TINY, 8)
