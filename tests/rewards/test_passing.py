"""When a rollout passes, who says that none can; and what a config is not refused for, or keeps."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.checks.content import Content
from rlpipe.checks.preflight import look_at
from rlpipe.config.passing import passing_reward, why_none_passes
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import check, read_config
from rlpipe.report.show import parameter_text
from rlpipe.rewards.pool import check_rewards, score
from rlpipe.rewards.score import combined, score_of
from rlpipe.store.opening import create_or_continue, open_existing
from tests.paths import PRESETS


def config(*sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", *sets], PRESETS)


@pytest.mark.parametrize(
    ("sets", "use", "threshold"),
    [
        (["rl.rewards={exact = 0.5}"], "rl", 0.5),
        (["rl.rewards={exact = 5.0, format = 1.0}"], "rl", 6.0),
        (["rl.rewards={exact = 0.7, format = 0.2, overlong = 0.1}",
          "rl.reward_args={overlong = {tokens_max = 9, buffer = 2}}"], "rl", 0.9),
        (["rl.rewards={exact = 1.0, format = -0.5}"], "rl", 1.0),
        (["rl.rewards={exact = 0.5}", "evaluation.rewards={exact = 2.0}"], "rl", 0.5),
        (["rl.rewards={exact = 0.5}", "evaluation.rewards={exact = 2.0}"], "evaluation", 2.0),
        (["rl.rewards={exact = 0.5}"], "evaluation", 0.5),
        (["rl.rewards={exact = 0.5}", "evaluation.pass_threshold=1.0"], "rl", 1.0),
        (["rl.rewards={exact = 0.5}", "evaluation.pass_threshold=0"], "rl", 0.0),
    ],
)  # fmt: skip
def test_a_rollout_passes_with_the_best_that_the_weights_allow_or_with_what_is_given(
    sets: list[str], use: str, threshold: float
) -> None:
    assert passing_reward(config(*sets), use) == pytest.approx(threshold)


@pytest.mark.parametrize("weights", [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [1e-3, 1 / 3, 7.0], [0.5]])
def test_a_rollout_with_all_that_there_is_passes_however_floats_add_up(weights: list[float]) -> None:
    rewards = dict(zip(("exact", "format", "length"), weights, strict=False))
    args = {"length": {"max": 99}} if "length" in rewards else {}
    names = ", ".join(f"{name} = {weight!r}" for name, weight in rewards.items())
    wanted = passing_reward(
        config(f"rl.rewards={{{names}}}", *(["rl.reward_args={length = {max = 99}}"] if args else [])), "rl"
    )
    rows = [
        {"prompt": "2 + 2?", "answer": "4", "completion": text} for text in ("<answer>4</answer>", "<answer>5</answer>")
    ]
    right, wrong = score(rewards, rows, args)
    assert right.reward is not None and wrong.reward is not None and wrong.reward < wanted <= right.reward


def test_a_threshold_above_what_the_weights_allow_is_told() -> None:
    impossible = config("rl.rewards={exact = 0.5}", "evaluation.pass_threshold=1.0")
    assert "is above 0.5, the best reward that the weights of the rewards allow" in why_none_passes(
        impossible, "rl", None
    )
    assert "above 0.5" in why_none_passes(impossible, "rl", 0.5)
    assert not why_none_passes(config("rl.rewards={exact = 0.5}"), "rl", None)
    assert not why_none_passes(impossible, "rl", 1.0)  # a reward that gives more than 1


def test_trial_rollouts_of_which_none_passes_are_told() -> None:
    plain = config("rl.rewards={exact = 0.5}")
    assert not why_none_passes(plain, "rl", 0.5)
    assert "no trial rollout passes, the best one has the reward 0.25" in why_none_passes(plain, "rl", 0.25)


def test_what_trial_rollouts_get_is_known_where_it_can_be() -> None:
    rows = {"a": [{"prompt_id": "a/0", "messages": [], "answer": "4", "metadata": {}}]}
    assert check_rewards({"exact": 0.5}, {}, 10.0, rows, passing=0.5) == 0.5  # type: ignore[arg-type]
    assert check_rewards({"exact": 0.5, "format": 0.5}, {}, 10.0, rows, passing=9.0) == 1.0  # type: ignore[arg-type]
    assert check_rewards({"exact": 0.5}, {}, 10.0) is None
    assert check_rewards({"exact": 0.5, "remote": 0.5}, {"remote": {"url": "http://127.0.0.1:9"}}, 10.0, rows) is None  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_plan_says_at_what_a_rollout_passes_and_that_none_can() -> None:
    small = ["data.words.rows_max=8", "rl.rewards={exact = 0.5}"]
    found = look_at(Content(config(*small)))
    assert any(line.endswith("a rollout passes at 0.5") for line in found.lines) and not any(
        "passes" in line for line in found.warnings
    )
    found = look_at(Content(config(*small, "evaluation.pass_threshold=1.0")))
    assert any(line.startswith("evaluation.pass_threshold=1: is above 0.5") for line in found.warnings)


def test_a_field_that_is_gone_hides_no_other_fault() -> None:
    with pytest.raises(UserError) as refused:
        config("rl.top_k=50", "rl.clip_highh=0.3", "model.hidden_size=130", "sft.patience=3")
    lines = str(refused.value).splitlines()
    assert lines[:2] == [
        "rl.top_k=50: this field no longer exists, its value is always -1; remove it",
        "rl.clip_highh=0.3: no such field; did you mean rl.clip_high?",
    ]
    assert [line.split("=")[0].split(":")[0] for line in lines[2:]] == ["model.hidden_size", "sft.patience"]
    assert config("rl.top_k=-1") == config()


@pytest.mark.parametrize("weights", [*itertools.permutations([0.7, 0.2, 0.1])])
def test_a_sum_of_rewards_is_exact_in_whatever_order_they_stand(weights: tuple[float, ...]) -> None:
    parts = [score_of(name, 1.0, weight) for name, weight in zip(("exact", "format", "length"), weights, strict=True)]
    assert combined(parts).reward == 1.0  # that of pass_threshold = 1.0
    largest = score_of("exact", 1.7e308, 1.0)
    assert combined([largest, largest]).reason == "reward_invalid"


def test_sft_alone_needs_no_room_for_completions() -> None:
    config("rl.num_iterations=0", "rl.completion_tokens_max=512", "evaluation.completion_tokens_max=8")
    with pytest.raises(UserError, match="leaves no room for a prompt"):
        config(
            "rl.num_iterations=0", "rl.completion_tokens_max=512"
        )  # its evaluation samples completions of that length
    tree = config(
        "rl.num_iterations=0", "evaluation.completion_tokens_max=127", "model.path=x", "model.context_tokens_max=128"
    ).model_dump()
    trained_alone = tree | {"data": [data for data in tree["data"] if data["use"] == "sft"]}
    check(trained_alone | {"evaluation": tree["evaluation"] | {"completion_tokens_max": 512}})
    with pytest.raises(UserError, match=r"beside evaluation\.completion_tokens_max=512"):
        check(tree | {"evaluation": tree["evaluation"] | {"completion_tokens_max": 512}})


@pytest.mark.parametrize(
    "names", [("nonzero_std", "diversity", "any_success"), ("diversity", "any_success", "nonzero_std")]
)
def test_a_fork_asks_filters_and_rewards_in_the_order_of_the_config(tmp_path: Path, names: tuple[str, ...]) -> None:
    filters = f"rl.filters={{{', '.join(f'{name} = 0.5' for name in names)}}}"
    own = config(f"store=file://{tmp_path}", filters, "rl.rewards={format = 0.5, exact = 0.5}", "sft.num_steps=0")
    stored = open_existing(create_or_continue(own).store, "a").config
    texts = {parameter_text(each.model_dump()["rl"]["filters"]) for each in (own, stored)}
    assert texts == {"{'any_success': 0.5, 'diversity': 0.5, 'nonzero_std': 0.5}"}
    assert (*stored.rl.filters,) == names and [*stored.rl.rewards] == ["format", "exact"]
