"""Which groups a step of an iteration has, and what its proximal logprobs are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.records.rollout import UNRECORDED
from rlpipe.trainer.batches import rows_of_steps, step_ranges
from rlpipe.trainer.gap import of_whole_batch
from rlpipe.trainer.step import frozen_logprobs, plan_batch
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.batches import read_rl_batch

NUM_GROUPS = 9


@given(st.integers(0, 200), st.integers(1, 50))
def test_steps_are_contiguous_whole_and_as_equal_as_possible(num_groups: int, num_steps: int) -> None:
    steps = step_ranges(num_groups, num_steps)
    assert [place for step in steps for place in step] == list(range(num_groups))
    assert len(steps) == min(num_groups, num_steps)
    sizes = [len(step) for step in steps]
    assert sizes == sorted(sizes, reverse=True) and (not sizes or sizes[0] - sizes[-1] <= 1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 8))
def test_a_group_is_in_the_same_step_whatever_became_of_the_others(sizes: list[int], num_steps: int) -> None:
    """`sizes`: rollouts of each group that can be trained."""
    group_index_B = np.repeat(np.arange(len(sizes)), sizes)
    empty = [index for index, size in enumerate(sizes) if not size]
    rows = rows_of_steps(group_index_B, empty, num_steps)
    for step, places in zip(rows, step_ranges(len(sizes), num_steps), strict=True):
        assert step.tolist() == [row for row, index in enumerate(group_index_B) if index in places]


def test_a_batch_of_older_code_is_cut_as_it_was() -> None:
    steps = rows_of_steps(np.array([7, 7, 3, 5, 5, 9]), None, 2)
    assert [step.tolist() for step in steps] == [[0, 1, 3, 4], [2, 5]]
    assert (
        rows_of_steps(np.array([], dtype=np.int64), None, 2) == rows_of_steps(np.array([], dtype=np.int64), [], 2) == []
    )


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(world.one_rank(tmp_path, tokens_max=512))
    world.run(trainer, "load", world.load_new())
    return trainer


def digests(trainer: Trainer, folder: str = "final") -> dict[str, str]:
    """The sha256 of the weights and of the gaps of the iteration."""
    saved = world.run(trainer, "save", world.save("any", folder, None, f"{folder}-gap"))
    files = world.digests(saved["policy"]) | world.digests(saved["gap"])
    return {name: files[name] for name in ("model.safetensors", "gap.parquet")}


def test_an_engine_with_the_trainers_own_logprobs_saves_the_pass_and_changes_no_bit(trainer: Trainer) -> None:
    """What the pass of the proximal logprobs would give, recorded by the engine to the bit."""
    rows, resident = world.rollout_rows(NUM_GROUPS, 4), trainer.resident
    assert resident is not None
    read = read_rl_batch(trainer.ranks.store, world.batch(trainer.ranks.store, "other", rows), 3)
    batches = [plan_batch(trainer.ranks, resident.policy, resident.rows, step) for step in read.steps]
    passes = [(batch.microbatches, frozen_logprobs(resident.policy, batch.microbatches, 1.0)) for batch in batches]
    parts = [part for microbatches, logprobs in passes for part in zip(microbatches, logprobs, strict=True)]
    own = iter(of_whole_batch(trainer.ranks, read.lengths_B, parts).tolist())
    for row in rows:
        row["rollout_logprobs"] = [next(own) if scored else -1.0 for scored in row["loss_mask"]]
    batch = world.batch(trainer.ranks.store, "exact", rows)
    common, told, weights = (
        {"num_steps": 3, "importance": "none", "clip_low": 0.01, "clip_high": 0.01, "learning_rate": 1e-3},
        {},
        {},
    )
    for proximal in ("trainer", "engine"):
        world.run(trainer, "load", world.load_new())
        job = world.train("a", "b", "rl", batch, common | {"proximal": proximal})
        told[proximal] = world.run(trainer, "train", job)["metrics"]
        weights[proximal] = digests(trainer, proximal)["model.safetensors"]
    assert weights["engine"] == weights["trainer"]
    assert told["engine"]["train/clip_fraction_low"] > 0, "no clip was at work"
    assert told["trainer"]["train/mismatch_abs_mean"] == told["engine"]["train/mismatch_abs_mean"] == 0
    for name in ("loss", "policy_loss", "proximal_kl", "clip_fraction_low", "clip_fraction_high", "onpolicy_abs"):
        assert told["engine"][f"train/{name}"] == told["trainer"][f"train/{name}"], name


def test_tokens_without_a_recorded_logprob_are_refused_by_the_engines_logprobs(trainer: Trainer) -> None:
    rows = world.rollout_rows(2, 2)
    rows[1]["loss_mask"][:2], rows[1]["rollout_logprobs"][:2] = [1, 0], [UNRECORDED, UNRECORDED]
    batch = world.batch(trainer.ranks.store, "batch", rows)
    with pytest.raises(
        UserError,
        match=(
            r"^rl\.proximal='engine': 1 tokens of batch .*; start another run, or a fork, with "
            r"rl\.proximal = 'trainer'"
        ),
    ):
        world.run(trainer, "train", world.train("a", "b", "rl", batch, {"proximal": "engine", "importance": "none"}))


def test_what_a_batch_says_of_empty_groups_is_read_with_it(trainer: Trainer) -> None:
    rows = [row for row in world.rollout_rows(4, 2) if row["group_index"] in (1, 2)]
    batch = world.batch(trainer.ranks.store, "batch", rows, [0, 3])
    assert [len(step) for step in read_rl_batch(trainer.ranks.store, batch, 4).steps] == [0, 2, 2, 0]
    assert [len(step) for step in read_rl_batch(trainer.ranks.store, batch, 2).steps] == [2, 2]
