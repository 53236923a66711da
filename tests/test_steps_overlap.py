"""The stages of `rl.overlap = "steps"`: what a step trains on is what the whole batch has for it, and nothing is scored twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from rlpipe.config.source import read_config
from rlpipe.stages.filtering import filter_groups
from rlpipe.stages.generation import generate, num_shards, step_shards
from rlpipe.stages.policy import train_step
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.scoring import score
from rlpipe.stages.steps import score_step
from rlpipe.stages.training import position, rl_job, step_jobs
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.run import Run
from rlpipe.trainer.packing import TrainSequence
from rlpipe.types import ArtifactRef, StageResult, UserError
from tests.batches import read_rl_batch
from tests.rows import BATCH, PROMPTS, SCORES, grouped
from tests.test_oversampling import POLICY, PRESETS, PlayedPool, PlayedRewards, World

SETS = ["rl.overlap=steps", "rl.filters={}", "rl.num_prompts=11", "rl.num_steps=4", "rl.shard_prompts=2"]


def played_world(folder: Path, faults: float, *sets: str) -> World:
    return World(folder, PlayedPool(Random(5)), [*SETS, *sets], rewards=PlayedRewards(faults=faults))


async def sample_steps(world: World) -> tuple[StageResult, list[StageResult], list[ArtifactRef]]:
    """Prompts, what each step is, and all shards of iteration 0, as flows/rl_overlap.py makes them."""
    prompts = await sample_prompts(world.session, iteration=0, round_index=0, before=None)
    steps, refs, shard = [], [], 0
    for step, shards in enumerate(step_shards(world.session.config.rl, prompts.metrics["num_prompts"])):
        part = {"iteration": 0, "round_index": 0, "prompts": prompts.ref, "policy": POLICY}
        rollouts = [await generate(world.session, shard=shard + index, **part) for index in range(len(shards))]
        shard, refs = shard + len(shards), refs + [result.ref for result in rollouts]
        at = {"iteration": 0, "step": step, "prompts": prompts.ref}
        steps.append(await score_step(world.session, rollouts=[result.ref for result in rollouts], **at))
    assert shard == num_shards(world.session, prompts.metrics["num_prompts"])
    return prompts, steps, refs


def as_lists(step: list[TrainSequence]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(sequence.tokens.tolist(), sequence.scored.tolist(), sequence.rollout_logprobs.tolist()) for sequence in step]


@pytest.mark.parametrize("sets", [(), ("rl.mask_truncated=true",), ("rl.group_size=2", "rl.estimator=rloo")])
async def test_the_steps_are_those_of_the_whole_batch_whatever_vanished(tmp_path: Path, sets: tuple[str, ...]) -> None:
    world = played_world(tmp_path, 0.4, *sets)
    prompts, steps, shards = await sample_steps(world)
    scored = dict(world.rewards.scored)
    at = {"iteration": 0, "round_index": 0}
    scores = await score(world.session, prompts=prompts.ref, rollouts=shards, steps=[step.ref for step in steps], **at)
    batch = await filter_groups(world.session, prompts=[prompts.ref], scores=[scores.ref], **at)
    assert world.rewards.scored == scored and set(scored.values()) == {1}, "a rollout is scored once"
    assert batch.metrics["empty_groups"], "some group vanished"
    store = world.session.run.store
    parts = [read_rl_batch(store, step.ref, 1) for step in steps]
    whole = read_rl_batch(store, batch.ref, 4)
    assert [as_lists(step) for step in whole.steps] == [as_lists(step) for part in parts for step in part.steps]
    rows = [world.rows(0, f"steps/step-{step:03d}", "batch.parquet", BATCH) for step in range(4)]
    assert [row for part in rows for row in part] == world.rows(0, "batch/round-0", "batch.parquet", BATCH)
    groups = [row["group_index"] for row in world.rows(0, "scores/round-0", "scores.parquet", SCORES)]
    assert groups == sorted(groups) and len(grouped(world.rows(0, "scores/round-0", "scores.parquet", SCORES))) == 11


async def test_the_scores_are_those_of_the_stage_that_scores_all_at_once(tmp_path: Path) -> None:
    world = played_world(tmp_path, 0.4)
    prompts, steps, shards = await sample_steps(world)
    at = {"iteration": 0, "prompts": prompts.ref, "rollouts": shards}
    together = await score(world.session, round_index=0, steps=[step.ref for step in steps], **at)
    at_once = await score(world.session, round_index=1, **at)
    assert together.metrics == at_once.metrics
    files = [read_manifest(world.session.run.store, part.ref.folder, part.ref.sha256).files for part in (together, at_once)]
    assert [file.sha256 for file in files[0]] == [file.sha256 for file in files[1]]


async def test_a_step_of_which_nothing_could_be_scored_is_not_committed(tmp_path: Path) -> None:
    world = played_world(tmp_path, 1.1)
    with pytest.raises(UserError, match=r"9 of 9 rollouts could not be scored"):
        await sample_steps(world)
    assert world.session.run.artifact("rl", 0, "rollouts/round-0/shard-001") is not None
    assert world.session.run.artifact("rl", 0, "steps/step-000") is None
    world.rewards.faults = 0.0
    _, steps, _ = await sample_steps(world)
    assert [step.metrics["num_scored"] for step in steps] == [9, 9, 9, 6]


async def test_shards_ask_the_pool_in_the_order_of_the_steps(tmp_path: Path) -> None:
    world = played_world(tmp_path, 0.0)
    asked: list[str] = []
    prompts = await sample_prompts(world.session, iteration=0, round_index=0, before=None)
    sample = world.pool.generate

    async def generated(groups: list[object], *more: object) -> object:
        asked.append(groups[0].prompt_id)  # type: ignore[attr-defined]
        return await sample(groups, *more)  # type: ignore[arg-type]

    world.pool.generate = generated  # type: ignore[method-assign]
    part = {"iteration": 0, "round_index": 0, "prompts": prompts.ref, "policy": POLICY}
    await generate(world.session, shard=2, **part)  # as if it had been committed before a crash; nobody began those before it
    world.session.begun.clear()
    await asyncio.gather(*(generate(world.session, shard=shard, **part) for shard in reversed(range(7))))
    shards = [places for step in step_shards(world.session.config.rl, 11) for places in step]
    drawn = [row["prompt_id"] for row in world.rows(0, "prompts/round-0", "prompts.parquet", PROMPTS)]
    assert asked[1:] == [drawn[places.start] for shard, places in enumerate(shards) if shard != 2]


def test_a_shard_has_groups_of_one_step_only() -> None:
    rl = read_config("tiny", SETS, PRESETS).rl
    assert step_shards(rl, 11) == [
        [range(2), range(2, 3)], [range(3, 5), range(5, 6)], [range(6, 8), range(8, 9)], [range(9, 11)]
    ]  # fmt: skip
    other = rl.model_copy(update={"overlap": "none"})
    assert step_shards(other, 11) == [[range(first, min(first + 2, 11)) for first in range(0, 11, 2)]]


def test_the_jobs_of_the_steps_lead_where_the_one_job_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = played_world(tmp_path, 0.0).session.run
    data = [ArtifactRef(f"runs/a/rl/00002/steps/step-{step:03d}", f"{step}" * 64) for step in range(3)]
    monkeypatch.setattr(Run, "policy", lambda run, version: (data[0], None))
    whole, jobs = rl_job(run, 2, data[0]), step_jobs(run, 2, data, 3)
    assert [job.start for job in jobs] == [whole.start, *(job.result for job in jobs[:-1])]
    assert (jobs[0].start, jobs[-1].result) == (position(run, "rl", 1), position(run, "rl", 2))
    assert len({job.result for job in jobs}) == 3 and whole.step is None
    assert [(job.first_step, job.step, job.data) for job in jobs] == [(8 + step, step, data[step]) for step in range(3)]
    assert {job.settings.num_steps for job in jobs} == {3} and whole.settings.num_steps == 4
    assert step_jobs(run, 2, data[:2], 3) == jobs[:2]


async def test_a_step_of_an_iteration_whose_policy_is_committed_needs_no_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = played_world(tmp_path, 0.0).session
    data = ArtifactRef("runs/a/rl/00000/steps/step-000", "0" * 64)
    monkeypatch.setattr(Run, "artifact", lambda run, *key: (data, None) if key == ("rl", 0, "policy") else None)
    assert (await train_step(session, iteration=0, step=0, steps=[data], num_steps=2)).cached
