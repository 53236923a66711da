"""Budgets and stop rules: the arithmetic over any history, and the reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.base.manifests import BestReward, IterationRecord
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig, identity
from rlpipe.config.source import read_config
from rlpipe.loop.session import Session
from rlpipe.stages.iteration import commit_iteration
from rlpipe.store.limits import (
    COST,
    GPU_SECONDS,
    SECONDS,
    TOKENS,
    UNTRAINED,
    Untrained,
    add_iteration,
    best_so_far,
    broken_rule,
    cost,
    gpus_held,
    over_budget,
    reason_to_stop,
    untrained,
)
from rlpipe.store.opening import create_or_continue, fork
from tests.declared import stage_settings
from tests.paths import PRESETS

NOTHING = {SECONDS: 0.0, TOKENS: 0, GPU_SECONDS: 0.0}
ON_GPU = ["trainer.gpu_ids=[0]", "model.dtype=bfloat16"]
HISTORY = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**7), st.integers(0, 16)), max_size=30)
REWARDS = st.lists(st.floats(-1, 1), min_size=1, max_size=40)


def config(*sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", *sets], PRESETS)


def record_of(iteration: int, metrics: dict[str, float], best: BestReward) -> IterationRecord:
    return IterationRecord("a", iteration, iteration + 1, {}, -1, metrics, [], best, "")


def spent_on(history: list[tuple[int, int, int]]) -> JsonDict:
    """(milliseconds, tokens, GPUs) per iteration."""
    spent: JsonDict = NOTHING
    for milliseconds, tokens, gpus in history:
        spent = add_iteration(spent, {"time/iteration_s": milliseconds / 1000, "rollout/num_tokens": tokens}, gpus)
    return spent


@given(HISTORY)
def test_what_is_spent_is_the_sum_over_the_committed_iterations(history: list[tuple[int, int, int]]) -> None:
    spent = spent_on(history)
    assert spent[TOKENS] == sum(tokens for _, tokens, _ in history)
    assert spent[SECONDS] == pytest.approx(sum(each for each, _, _ in history) / 1000, abs=0.001)
    assert spent[GPU_SECONDS] == pytest.approx(sum(each * gpus for each, _, gpus in history) / 1000, abs=0.001)


@given(HISTORY, st.integers(1, 10**8))
def test_a_budget_ends_a_run_at_the_first_boundary_that_reaches_it_and_raised_no_more(
    history: list[tuple[int, int, int]], budget: int
) -> None:
    limited = config(f"budget.rollout_tokens={budget}")
    told = [bool(over_budget(limited, spent_on(history[:done]))) for done in range(len(history) + 1)]
    assert told == [sum(tokens for _, tokens, _ in history[:done]) >= budget for done in range(len(history) + 1)]
    assert told == sorted(told), "once it is spent it stays spent"
    assert not over_budget(config(f"budget.rollout_tokens={spent_on(history)[TOKENS] + 1}"), spent_on(history))


@given(HISTORY)
def test_what_the_gpu_hours_cost_is_a_metric_and_ends_a_run(history: list[tuple[int, int, int]]) -> None:
    spent = spent_on(history)
    free, priced = config(*ON_GPU), config(*ON_GPU, "budget.price_per_gpu_h=2.5", "budget.cost=10")
    assert cost(free, spent) == {} and not over_budget(free, spent)
    (paid,) = cost(priced, spent).values()
    assert paid == pytest.approx(spent[GPU_SECONDS] / 3600 * 2.5, abs=1e-5)
    said = over_budget(priced, spent)
    assert bool(said) == (paid >= 10)
    assert not said or re.match(r"budget\.cost=10 is spent \(\d\S* at 2\.5 a GPU hour\); raise it", said)


@given(REWARDS, st.integers(1, 10))
def test_a_plateau_is_so_many_iterations_without_a_better_reward(rewards: list[float], patience: int) -> None:
    limited = config(f"stop.reward_plateau={patience}")
    record: IterationRecord | None = None
    for iteration, reward in enumerate(rewards):
        record = record_of(iteration, {"rollout/reward_mean": reward}, best_so_far(record, iteration, reward))
        first_best = rewards.index(max(rewards[: iteration + 1]))
        assert record.best == BestReward(first_best, rewards[first_best])
        assert bool(broken_rule(limited, record)) == (iteration - first_best >= patience)


@pytest.mark.parametrize(
    ("sets", "metrics", "reason"),
    [
        (["stop.kl_max=0.1", "rl.kl=loss", "rl.kl_coef=0.1"], {"train/kl": 0.2},
         r"stop\.kl_max=0\.1: train/kl is 0\.2 in iteration 4"),
        (["stop.proximal_kl_max=0.1"], {"train/proximal_kl": 0.2}, r"stop\.proximal_kl_max=0\.1: .* raise the bound"),
        (["rl.on_mismatch=stop", "rl.mismatch_max=0.01"], {"train/mismatch_abs_mean": 0.02},
         r"rl\.mismatch_max=0\.01: train/mis"),
        (["rl.mismatch_max=0.01"], {"train/mismatch_abs_mean": 0.02}, ""),
        # a fork's, carried by its parent: the policy's own change
        (["rl.on_mismatch=stop", "rl.mismatch_max=0.01"],
         {"train/mismatch_abs_mean": 0.02, "rollout/num_tokens_stale": 7}, ""),
        (["stop.proximal_kl_max=0.3"], {"train/proximal_kl": 0.2}, ""),
    ],
)  # fmt: skip
def test_a_bound_that_is_exceeded_is_named_with_what_to_do(sets: list[str], metrics: JsonDict, reason: str) -> None:
    message = broken_rule(config(*sets), record_of(4, {"rollout/reward_mean": 1.0, **metrics}, BestReward(4, 1.0)))
    assert bool(message) == bool(reason)
    assert re.search(reason, message)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["stop.kl_max=0.1"], "no KL to a reference is computed"),
        (["budget.gpu_h=1"], "so no GPU hour is ever spent; use budget.wall_clock_h"),
        (["budget.cost=9", "budget.price_per_gpu_h=2"], r"budget\.cost=9\.0: no GPU is in .*; use budget.wall_clock_h"),
        (["budget.cost=9", *ON_GPU], r"budget\.cost=9\.0: a GPU hour has no price, .*; set budget\.price_per_gpu_h"),
        (["budget.rollout_tokens=-1"], r"budget\.rollout_tokens=-1"),
        (["rl.on_mismatch=stop", "rl.oversampling=2"], "use on_mismatch = 'warn'"),
    ],
)
def test_what_makes_no_sense_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(*sets)


def test_limits_are_no_part_of_what_is_computed() -> None:
    one, other = (
        config(),
        config("budget.wall_clock_h=3", "budget.rollout_tokens=5", "budget.price_per_gpu_h=2",
               "stop.reward_plateau=2", "rl.on_mismatch=stop"),
    )  # fmt: skip
    assert identity(one) == identity(other)
    for phase, stage in (
        ("rl", "prompts"),
        ("rl", "batch"),
        ("rl", "policy"),
        ("sft", "policy"),
        ("data", "data"),
        ("base", "policy"),
    ):
        assert stage_settings(one, phase, stage) == stage_settings(other, phase, stage)


def test_gpus_are_those_a_phase_holds() -> None:
    sets = [
        "trainer.gpu_ids=[0,1]",
        "trainer.ranks=2",
        "trainer.nodes=2",
        "trainer.place=deployment",
        "engines.gpu_ids=[2,3,4]",
        "engines.count=3",
        "model.dtype=bfloat16",
    ]
    assert gpus_held(config(*sets), "sft") == 4
    assert gpus_held(config(*sets), "rl") == 7


async def test_a_resume_counts_what_was_spent_before_and_a_fork_what_is_its_own(tmp_path: Path) -> None:
    sets = [f"store=file://{tmp_path}", "sft.num_steps=0", "rl.num_iterations=5", "tracking.uri="]

    async def commit(each: PipelineConfig, run: object, iteration: int, trained: int = 50) -> IterationRecord:
        session = Session(run, tmp_path / "work")  # type: ignore[arg-type]
        metrics = {"rollout/reward_mean": 1.0 - iteration, "rollout/num_tokens": 100, "train/num_tokens": trained}
        record = await commit_iteration(session, iteration, {}, metrics)
        await session.commits.all_committed()
        return record

    first = config(*sets)
    run = create_or_continue(first)
    assert reason_to_stop(run, "rl", 0) == ""
    await commit(first, run, 0, trained=0)
    await commit(first, run, 1)
    assert untrained(run, run.iteration(0)) == Untrained(1, 1) and untrained(run, run.iteration(0)).is_all
    assert str(untrained(run, run.iteration(1))) == "nothing was trained in 1 of 2 iterations"
    assert untrained(run, None) == Untrained(0, 0) and not untrained(run, None).is_all
    limited = config(*sets, "budget.rollout_tokens=200")
    again = create_or_continue(limited)  # another process, another budget: it knows from the store
    assert reason_to_stop(again, "rl", 1) == ""
    assert reason_to_stop(again, "rl", 2) == (
        "budget.rollout_tokens=200 is spent (200 tokens); raise it and start the run again. "
        "2 of 5 iterations are committed"
    )
    assert (
        reason_to_stop(create_or_continue(config(*sets, "budget.rollout_tokens=200", "rl.num_iterations=2")), "rl", 2)
        == ""
    )
    assert "stop.reward_plateau=1" in reason_to_stop(
        create_or_continue(config(*sets, "stop.reward_plateau=1")), "rl", 2
    )
    priced = ["trainer.gpu_ids=[0]", "model.dtype=float32", "budget.price_per_gpu_h=3600"]
    forked = fork(again, 1, config(*sets, *priced, "run=b", "budget.rollout_tokens=150", "stop.reward_plateau=2"))
    assert reason_to_stop(forked, "rl", 2) == ""
    assert untrained(forked, forked.iteration(1)) == Untrained(0, 0)
    record = await commit(forked.config, forked, 2, trained=0)
    assert untrained(forked, record) == Untrained(1, 1) and record.metrics[UNTRAINED] == 1
    assert record.metrics[TOKENS] == 100
    assert record.metrics[COST] == record.metrics[GPU_SECONDS] and COST not in run.record(1).metrics
    assert record.best == BestReward(2, -1.0)
    assert reason_to_stop(forked, "rl", 3) == ""
