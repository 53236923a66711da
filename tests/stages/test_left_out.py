"""A rollout with a fault says nothing of its group: the others are trained
as if it had never been sampled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.advantages import ESTIMATORS, rollout_means
from rlpipe.base.values import JsonDict
from rlpipe.config.training import RlConfig
from rlpipe.records.rollout import Rollout
from rlpipe.stages.filtering import trainable, with_advantages
from rlpipe.stages.generation import round_at_work
from rlpipe.stages.sampling import sample_prompts
from tests.batches import read_rl_batch, token_advantages
from tests.rows import BATCH, SCORES, grouped, prompt_record, rollout
from tests.rows import PROMPTS as PROMPT_ROWS
from tests.stages.test_oversampling import PlayedPool, PlayedRewards, World, check_iteration

MADE = st.tuples(
    st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.integers(0, 6), st.integers(0, 99)
)  # reward, tokens, of 100
FAULTS = 15  # of 100
ENDED = {"finish_reason": "stop", "environment": ""}


def made(index: int, reward: float, length: int, fault: bool) -> Rollout:
    ones = [1] * length
    row = {"group_index": index, "completion_tokens": ones, "loss_mask": ones, "reward": reward, **ENDED}
    return rollout(row | {"reward_fault": "reward_unavailable" if fault else ""})


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    groups=st.lists(st.lists(MADE, min_size=1, max_size=8), min_size=1, max_size=5),
    fallback=st.sampled_from([0.0, 9.0]),
)
def test_the_others_have_the_advantages_of_the_group_without_it(
    estimator: str, groups: list[list[tuple[float, int, int]]], fallback: float
) -> None:
    rl = RlConfig()
    with_faults = [
        [made(index, fallback if of < FAULTS else reward, length, of < FAULTS) for reward, length, of in group]
        for index, group in enumerate(groups)
    ]
    without = [
        made(index, reward, length, False)
        for index, group in enumerate(groups)
        for reward, length, of in group
        if of >= FAULTS
    ]
    told = with_advantages([one for group in with_faults for one in trainable(group, rl)], estimator, 0.9)
    assert [one.advantage for one in told] == [one.advantage for one in with_advantages(without, estimator, 0.9)]
    assert all(
        trainable(group, RlConfig(faults={"policy": fallback, "outside": fallback})) == group for group in with_faults
    )


def faulty_world(folder: Path, *sets: str) -> World:
    rewards = PlayedRewards(faults=FAULTS / 100)
    return World(folder, PlayedPool(Random(7)), ["rl.num_prompts=12", "rl.group_size=4", *sets], rewards=rewards)


def scores_of(world: World, iteration: int) -> list[JsonDict]:
    return world.rows(iteration, "scores/round-0", "scores.parquet", SCORES)


@pytest.mark.parametrize("estimator", ESTIMATORS)
async def test_a_batch_and_its_trainer_have_none_of_them(tmp_path: Path, estimator: str) -> None:
    world = faulty_world(tmp_path, f"rl.estimator={estimator}", "rl.filters={}")
    told = await world.iterate(0)
    check_iteration(world, 0, told, [])
    scored, batch = scores_of(world, 0), world.rows(0, "batch/round-0", "batch.parquet", BATCH)
    faulty = [row for row in scored if row["reward_fault"]]
    assert faulty and {row["reward"] for row in faulty} == {0.0}  # as evaluations and metrics count it
    assert told["rollout/num_left_out"] == len(faulty) and not any(row["reward_fault"] for row in batch)
    expected = [row for row in scored if not row["reward_fault"] and str(row["group_index"]) not in told["dropped"]]
    arrays = [np.array(values)
              for values
              in zip(*((row["reward"], row["group_index"], len(row["completion_tokens"])) for row in expected),
                     strict=True)]  # fmt: skip
    rewards_B, group_index_B, lengths_B = arrays
    advantages_N = token_advantages(rewards_B, group_index_B, lengths_B, estimator=estimator)
    assert [row["advantage"] for row in batch] == rollout_means(advantages_N, lengths_B).tolist()
    ref, _ = world.session.run.committed("rl", 0, "batch/round-0")
    # with a KL in the reward the trainer groups these again
    read = read_rl_batch(world.session.run.store, ref, 4)
    assert (read.rewards_B.tolist(), read.group_index_B.tolist()) == (rewards_B.tolist(), group_index_B.tolist())
    assert sum(map(len, read.steps)) == len(batch)


@pytest.mark.parametrize(("estimator", "size_min"), [("grpo", 2), ("reinforce_plus_plus", 1)])
async def test_a_group_of_which_too_little_is_left_is_dropped_with_that_reason(
    tmp_path: Path, estimator: str, size_min: int
) -> None:
    world = faulty_world(tmp_path, f"rl.estimator={estimator}", "rl.filters={}", "rl.group_size=2", "rl.num_prompts=48")
    world.rewards.faults = 0.5
    told = await world.iterate(0)
    check_iteration(world, 0, told, [])
    left = [sum(not row["reward_fault"] for row in group) for group in grouped(scores_of(world, 0))]
    assert told["rollout/groups_dropped_too_few_rollouts"] == sum(count < size_min for count in left) > 0
    assert told["rollout/groups_kept"] == sum(count >= size_min for count in left) > 0


async def test_a_number_is_a_reward_like_any_other(tmp_path: Path) -> None:
    world = faulty_world(tmp_path, "rl.filters={}", "rl.faults={policy = 0.0, outside = 0.0}", "rl.estimator=dr_grpo")
    told = await world.iterate(0)
    batch = world.rows(0, "batch/round-0", "batch.parquet", BATCH)
    assert told["rollout/num_left_out"] == 0 and len(batch) == len(scores_of(world, 0)) == 48
    for group in grouped(batch):
        mean = np.mean([row["reward"] for row in group])
        assert [row["advantage"] for row in group] == [pytest.approx(row["reward"] - mean) for row in group]


async def test_a_round_that_is_over_sampled_counts_what_the_filter_keeps(tmp_path: Path) -> None:
    world = World(tmp_path, PlayedPool(Random(2)), ["rl.oversampling=3", "rl.filters={}"])
    await sample_prompts(world.session, iteration=0, round_index=0, before=None)
    (row, *_) = world.rows(0, "prompts/round-0", "prompts.parquet", PROMPT_ROWS)
    world.rewards.faults = 0.5
    survivors, scores = round_at_work(world.session, (0, 0)), Counter[int]()
    for index in range(12):
        group = [
            rollout(row | ENDED | {"group_index": index, "completion": f"{index}.{place}", "completion_tokens": [1]})
            for place in range(3)
        ]
        scores[index] = sum(
            not score.reason for score in world.rewards.score([{"completion": one.completion} for one in group])
        )
        await survivors.judge(prompt_record(row), group)
    assert survivors._surviving == {index for index, count in scores.items() if count >= 2}
    assert 0 < len(survivors._surviving) < 12
