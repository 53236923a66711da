"""A batch has as many groups as were asked for: what is kept beyond them waits for the next
iteration, or is dropped and counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from rlpipe.base.values import JsonDict
from rlpipe.engines.client import Completion
from rlpipe.engines.pool import GroupRequest, OnGroup
from rlpipe.extras.imports import importing
from rlpipe.extras.imports.importing import import_prompts, import_rollouts
from rlpipe.stages.filtering import filter_groups
from rlpipe.stages.scoring import score
from rlpipe.store.opening import create_or_continue
from tests.extras.imports.test_importing import commit_base
from tests.rows import BATCH, CARRIED
from tests.stages.test_oversampling import PlayedPool, World, check_iteration

OVERSAMPLED = ["rl.oversampling=2", "rl.filters={}"]  # 8 groups are started, 4 are asked for


class QuickPool(PlayedPool):
    """All that was started has finished before anybody says that there is enough."""

    async def generate(
        self, groups: list[GroupRequest], on_group: OnGroup | None = None, enough: asyncio.Event | None = None
    ) -> list[list[Completion]]:
        return await super().generate(groups, on_group)


async def run_of(folder: Path, iterations: int, pool: PlayedPool, *sets: str) -> tuple[World, list[JsonDict]]:
    """A run, and the metrics of its iterations: every rollout is in one place, no
    batch is larger than was asked for."""
    world, carried, told = World(folder, pool, [*sets]), [], []
    for iteration in range(iterations):
        told.append(await world.iterate(iteration))
        carried = check_iteration(world, iteration, told[-1], carried)
    return world, told


def batches(world: World, iterations: int) -> list[list[JsonDict]]:
    return [world.rows(k, "batch/round-0", "batch.parquet", BATCH) for k in range(iterations)]


async def test_surplus_of_an_over_sampled_round_is_trained_next_and_never_twice(tmp_path: Path) -> None:
    world, told = await run_of(tmp_path, 4, QuickPool(Random(1)), *OVERSAMPLED)
    assert [metrics["rollout/groups_kept"] for metrics in told] == [4, 4, 4, 4]
    assert [metrics["rollout/groups_carried"] for metrics in told] == [4, 4, 4, 4]
    assert "surplus" not in {reason for metrics in told for reason in metrics["dropped"].values()}
    trained = Counter((row["prompt_id"], *row["completion_tokens"]) for rows in batches(world, 4) for row in rows)
    assert max(trained.values()) == 1 and len(trained) == 4 * 4 * 3
    for iteration in range(3):  # it is the first of the next batch, as it is
        waiting = world.rows(iteration, "batch/round-0", "carried.parquet", CARRIED)
        batch = batches(world, 4)[iteration + 1]
        assert [row["completion_tokens"] for row in waiting] == [row["completion_tokens"] for row in batch][
            : len(waiting)
        ]


@pytest.mark.parametrize(
    ("sets", "is_dropped"),
    [
        ([*OVERSAMPLED, "rl.staleness_max=0"], True),
        ([*OVERSAMPLED, "rl.train_stale_tokens=false"], True),  # nothing of it would be trained
        ([*OVERSAMPLED, "rl.staleness_max=2"], False),
    ],
)
async def test_surplus_that_could_not_be_trained_next_is_dropped_and_counted(
    tmp_path: Path, sets: list[str], is_dropped: bool
) -> None:
    _, told = await run_of(tmp_path, 2, QuickPool(Random(1)), *sets)
    assert told[0].get("rollout/groups_dropped_surplus", 0) == (4 if is_dropped else 0)
    assert told[0]["rollout/groups_carried"] == (0 if is_dropped else 4)
    assert told[0]["rollout/num_filtered"] == (12 if is_dropped else 0)


async def test_what_waits_does_not_pile_up(tmp_path: Path) -> None:
    world, told = await run_of(
        tmp_path,
        6,
        QuickPool(Random(1)),
        "rl.oversampling=4",
        "rl.filters={}",
        "rl.staleness_max=1",
        "rl.num_prompts=2",
    )
    assert max(metrics["rollout/groups_carried"] for metrics in told) <= world.session.config.rl.round_groups
    assert sum(metrics.get("rollout/groups_dropped_surplus", 0) for metrics in told) > 0  # too old for the next one
    for iteration, rows in enumerate(batches(world, 6)):
        assert all(iteration - span["version"] <= 1 for row in rows for span in row["weight_versions"])


async def test_surplus_of_a_last_round_is_dropped_where_nothing_is_over_sampled(tmp_path: Path) -> None:
    sets = ["rl.rounds_max=3", "rl.groups_min=5", "rl.filters={nonzero_std = 0.0}"]
    first, told = await run_of(tmp_path / "one", 8, PlayedPool(Random(1)), *sets)
    assert max(metrics["rollout/rounds"] for metrics in told) > 1
    assert {metrics["rollout/groups_kept"] for metrics in told} == {5}
    assert sum(metrics.get("rollout/groups_dropped_surplus", 0) for metrics in told) > 0
    assert all(metrics["rollout/groups_carried"] == 0 for metrics in told)
    assert first.session.config.rl.off_policy is False


async def test_a_run_that_is_fed_from_it_takes_what_waited_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = await run_of(tmp_path, 3, QuickPool(Random(1)), *OVERSAMPLED)
    monkeypatch.setattr(importing, "check_tokenizer", lambda source, sha256: None)
    fed = ["run=b", "rl.rollouts_from=run:a", "rl.oversampling=1", "rl.num_iterations=3", "rl.num_prompts=9"]
    run = create_or_continue(world.config(*fed))
    commit_base(run, ["say 4 5"])
    world.start(run)
    seen: list[tuple[int, ...]] = []
    for iteration in range(3):
        prompts = await import_prompts(world.session, iteration=iteration)
        rollouts = await import_rollouts(world.session, iteration=iteration, prompts=prompts.ref)
        scores = await score(
            world.session, iteration=iteration, round_index=0, prompts=prompts.ref, rollouts=[rollouts.ref]
        )
        at = {"iteration": iteration, "round_index": 0, "prompts": [prompts.ref], "scores": [scores.ref]}
        batch = await filter_groups(world.session, **at)
        assert batch.metrics["rollout/num_carried"] == 0
        seen += [
            tuple(row["completion_tokens"]) for row in world.rows(iteration, "batch/round-0", "batch.parquet", BATCH)
        ]
    assert len(set(seen)) == len(seen) == 3 * 4 * 3
