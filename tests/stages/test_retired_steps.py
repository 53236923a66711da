"""An iteration that an older version left in the middle with `rl.overlap = "steps"`: it is ended as
one of "none", to the same bits."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from random import Random

import pytest

from rlpipe.base.manifests import StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig, stored_tree
from rlpipe.config.training import RlConfig
from rlpipe.loop.stage import Attempt, Produced, StageKey, run_stage
from rlpipe.stages import generation
from rlpipe.stages.filtering import filter_groups
from rlpipe.stages.generation import generate, num_shards
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.scoring import score
from rlpipe.store import run_record
from rlpipe.store.opening import create_or_continue
from rlpipe.stored.retired import withdraw_steps
from rlpipe.trainer.batches import step_ranges
from tests.rows import BATCH, SCORES
from tests.stages.test_oversampling import POLICY, PlayedPool, PlayedRewards, World

SETS = ["rl.filters={}", "rl.num_prompts=11", "rl.num_steps=4", "rl.shard_prompts=2"]
ALL = [(group, index) for group in range(11) for index in range(3)]


def places_by_step(rl: RlConfig, num_groups: int) -> list[range]:
    """The shards of the retired mode: each has groups of one step only."""
    steps = step_ranges(num_groups, rl.num_steps)
    return [step[first : first + rl.shard_prompts] for step in steps for first in range(0, len(step), rl.shard_prompts)]


def begun_with_steps(config: PipelineConfig) -> JsonDict:
    tree = stored_tree(config)
    return tree | {"rl": tree["rl"] | {"overlap": "steps"}}


def made_world(folder: Path) -> World:
    return World(folder, PlayedPool(Random(5)), SETS, rewards=PlayedRewards(faults=0.0))


async def sampled(world: World, shards: list[int] | None = None) -> tuple[StageResult, list[ArtifactRef]]:
    """Prompts and shards of iteration 0; `shards`: only these."""
    session = world.session
    prompts = await sample_prompts(session, iteration=0, round_index=0, before=None)
    part = {"iteration": 0, "round_index": 0, "prompts": prompts.ref, "policy": POLICY}
    wanted = range(num_shards(session, prompts.metrics["num_prompts"])) if shards is None else shards
    return prompts, [(await generate(session, shard=shard, **part)).ref for shard in wanted]


async def batched(world: World) -> list[tuple[int, int]]:
    """Goes on to the batch: the places of its rollouts, which are those of the scores."""
    prompts, shards = await sampled(world)
    at = {"iteration": 0, "round_index": 0}
    scores = await score(world.session, prompts=prompts.ref, rollouts=shards, **at)
    await filter_groups(world.session, prompts=[prompts.ref], scores=[scores.ref], **at)
    places = {
        name: [
            (row["group_index"], row["rollout_index"])
            for row in world.rows(0, f"{name}/round-0", f"{name}.parquet", columns)
        ]
        for name, columns in (("scores", SCORES), ("batch", BATCH))
    }
    assert places["scores"] == places["batch"]
    return places["batch"]


async def commit_plain(world: World, stage: str, **inputs: ArtifactRef) -> ArtifactRef:
    """Something of iteration 0 that only an older version would make of these inputs."""

    def produce(attempt: Attempt) -> Produced:
        return Produced([], {})

    return (await run_stage(world.session, StageKey("rl", 0, stage), inputs, {}, produce)).ref


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that began with the retired mode."""
    with monkeypatch.context() as older:
        older.setattr(run_record, "stored_tree", begun_with_steps)
        return made_world(tmp_path / "left")


async def test_its_config_reads_as_none_and_is_known_as_what_it_was(left: World) -> None:
    run = left.session.run
    assert run_record.had_steps(run.store, run.name) and run.config.rl.overlap == "none"
    assert create_or_continue(run.config).config == run.config
    assert withdraw_steps(run) == []


async def test_a_run_of_today_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = made_world(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(generation, "shard_places", places_by_step)
        await sampled(world)
    assert withdraw_steps(world.session.run) == []


@pytest.mark.parametrize("shards", [[0], [2], [1, 4], [0, 1, 2, 3, 4, 5, 6], []])
async def test_shards_that_were_committed_are_kept_where_they_lie_as_today(
    left: World, monkeypatch: pytest.MonkeyPatch, shards: list[int]
) -> None:
    with monkeypatch.context() as older:
        older.setattr(generation, "shard_places", places_by_step)
        await sampled(left, shards)
    run = left.session.run
    before, today = places_by_step(run.config.rl, 11), generation.shard_places(run.config.rl, 11)
    moved = [shard for shard in shards if shard >= len(today) or before[shard] != today[shard]]
    assert withdraw_steps(run) == [f"runs/a/rl/00000/rollouts/round-0/shard-{shard:03d}" for shard in moved]
    assert withdraw_steps(run) == []
    assert await batched(left) == ALL


@pytest.mark.parametrize("dies_after", [None, 0, 1, 3])
async def test_what_was_made_of_steps_is_made_again_wherever_it_is_cut_short(
    left: World, monkeypatch: pytest.MonkeyPatch, dies_after: int | None
) -> None:
    with monkeypatch.context() as older:
        older.setattr(generation, "shard_places", places_by_step)
        prompts, shards = await sampled(left)
    steps = [
        await commit_plain(left, f"steps/step-{step:03d}", prompts=prompts.ref, rollouts=shards[step])
        for step in range(4)
    ]
    scores = await commit_plain(left, "scores/round-0", prompts=prompts.ref, steps=steps[0])
    batch = await commit_plain(left, "batch/round-0", scores=scores)
    await commit_plain(left, "policy", batch=batch)
    run, deleted = left.session.run, itertools.count()
    with monkeypatch.context() as dying:
        if dies_after is not None:
            delete = type(run.store).delete

            def dies(store: object, key: str) -> None:
                if next(deleted) == dies_after:
                    raise OSError("it died")
                delete(store, key)  # type: ignore[arg-type]

            dying.setattr(type(run.store), "delete", dies)
            with pytest.raises(OSError, match="it died"):
                await asyncio.to_thread(withdraw_steps, run)
    withdraw_steps(run)
    assert not [stage for stage in ("steps/step-000", "scores/round-0", "policy") if run.artifact("rl", 0, stage)]
    assert withdraw_steps(run) == []
    assert await batched(left) == ALL
