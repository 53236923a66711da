"""The estimator gdpo: the parts of the rewards are told apart by the stage filter, and the trainer
trains on its advantages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rlpipe.base.errors import UserError
from rlpipe.records.rollout import Rollout
from rlpipe.rewards.score import parts_matrix
from rlpipe.stages.filtering import with_gdpo
from rlpipe.trainer.batches import read_advantages, read_rl_batch
from tests import trainer_world as world
from tests.rows import rollout
from tests.stages.test_reference import config

REWARDS = {"math": 1.0, "my.rewards:math_style": 0.5, "http://127.0.0.1/x:y": 2.0}


def of(reward: float, **parts: float) -> Rollout:
    row = rollout({"prompt_id": "a", "group_index": 0, "rollout_index": 0, "prompt": "", "completion": ""})
    return dataclasses.replace(row, reward=reward, reward_parts=parts)


def test_each_part_has_the_weight_of_the_reward_that_gave_it() -> None:
    rollouts = [of(1.0, math=1.0), of(1.5, math=1.0, math_style_tone=1.0), of(0.7)]
    parts_RK, weights_K = parts_matrix(rollouts, REWARDS)
    assert weights_K.tolist() == [1.0, 0.5], "the part of math_style is not one of math"
    # the third has the number of a fault: as if each part gave the same, and the sum is that number
    np.testing.assert_allclose(parts_RK, [[1.0, 0.0], [1.0, 1.0], [0.7 / 1.5] * 2])
    assert parts_RK[2] @ weights_K == pytest.approx(0.7)
    empty_RK, none_K = parts_matrix([of(0.0)], REWARDS)
    assert empty_RK.shape == (1, 0) and none_K.shape == (0,)
    assert [one.advantage for one in with_gdpo([of(0.0)], REWARDS)] == [0.0]


def test_the_trainer_trains_on_the_advantages_of_the_stage_filter(tmp_path: Path) -> None:
    ranks = world.one_rank(tmp_path)
    rows = [row | {"advantage": index / 10 - 1} for index, row in enumerate(world.rollout_rows(6, 4))]
    data = world.batch(ranks.store, "batch", rows)
    rollouts = ranks.in_turn(lambda folder: read_rl_batch(ranks.store, data, 1, folder))
    stored = ranks.in_turn(lambda folder: read_advantages(ranks.store, data, rollouts, folder))
    assert [len(values) for values in stored] == rollouts.lengths_B.tolist()
    assert [{*values.tolist()} for values in stored] == [{row["advantage"]} for row in rows]


def test_a_kl_in_the_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl\.kl='reward': estimator gdpo"):
        config(tmp_path, "rl.estimator=gdpo", "rl.kl=reward", "rl.kl_coef=0.1")
