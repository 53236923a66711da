"""An RL iteration whose optimizer steps are taken while later groups are still sampled. Nothing is stale: the engines keep the weights
that the iteration started from until its last rollout, and every step trains on what rl_iteration.py would give it, to the same bits.

Step j begins when its groups are sampled and scored. The stages, and what they commit, are those of flows/rl_iteration.py, and for each
step its rewards and its batch.
"""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.rl_iteration import Sampled, end_iteration, take_batch, train_batch
from flows.session import open_session
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.stages.branches import shards_with_branches
from rlpipe.stages.generation import step_shards
from rlpipe.stages.iteration import committed_before
from rlpipe.stages.session import Session
from rlpipe.stages.stage import all_ended
from rlpipe.types import ArtifactRef, IterationRecord, StageResult
from tasks import stages

Step = tuple[list[ArtifactRef], StageResult]  # the shards of its rollouts; its rewards and batch


@flow(name="rl-iteration-overlap", flow_run_name="{config.run}-{iteration:05d}", persist_result=False)
async def rl_overlap_iteration(config: PipelineConfig, iteration: int) -> IterationRecord:
    """Weight version k samples, is rewarded, and becomes version k + 1 meanwhile. Returns the record of the commit.

    When training or sampling fails, the other comes to its end first. What is redone needs no engine, and nothing overlaps.
    """
    async with open_session(config) as session:
        session.begin_iteration(iteration)
        if session.run.redoes(iteration):
            sampled, steps = await take_batch(session, iteration), None
        else:
            sampled, steps = await sample_and_train(session, iteration)
        trained = await train_batch(session, iteration, sampled, steps)
        return await end_iteration(session, iteration, sampled, trained)


async def sample_and_train(session: Session, iteration: int) -> tuple[Sampled, list[ArtifactRef]]:
    """The whole batch of an iteration, and that of each step, all of which are taken."""
    earlier, at = await asyncio.to_thread(committed_before, session, iteration), {"iteration": iteration, "round_index": 0}
    policy, _ = await asyncio.to_thread(session.run.policy, iteration)
    pass_rates = earlier.batch if session.config.rl.curriculum != "none" else None
    prompts = await stages.sample_prompts(session, before=earlier.prompts, carried=earlier.batch, pass_rates=pass_rates, **at)
    steps = start_steps(session, iteration, prompts, policy)
    whole = asyncio.create_task(whole_batch(session, iteration, prompts, steps, pass_rates))
    await all_ended([*steps, whole, take_steps(session, iteration, steps)])
    return whole.result(), [step.result()[1].ref for step in steps]


def start_steps(session: Session, iteration: int, prompts: StageResult, policy: ArtifactRef) -> list[asyncio.Task[Step]]:
    """Begins to sample all groups, those of the first step first; a step is done when they are sampled and scored."""
    scoring = asyncio.Lock()  # the scorers are shared
    part = {"iteration": iteration, "round_index": 0, "prompts": prompts.ref, "policy": policy}

    async def batch_of(step: int, shards: list[asyncio.Task[StageResult]]) -> Step:
        rollouts = [shard.ref for shard in await all_ended([*shards])]
        async with scoring:
            batch = await stages.score_step(session, iteration=iteration, step=step, prompts=prompts.ref, rollouts=rollouts)
        return rollouts, batch

    steps, shard = [], 0
    for step, shards in enumerate(step_shards(session.config.rl, prompts.metrics["num_prompts"])):
        sampling = [
            asyncio.ensure_future(stages.generate(session, shard=shard + index, **part)) for index in range(len(shards))
        ]
        steps.append(asyncio.create_task(batch_of(step, sampling)))
        shard += len(shards)
    return steps


async def take_steps(session: Session, iteration: int, steps: list[asyncio.Task[Step]]) -> None:
    """Trains, step by step, as their batches come."""
    batches: list[ArtifactRef] = []
    for index, step in enumerate(steps):
        batches.append((await step)[1].ref)
        await stages.train_step(session, iteration=iteration, step=index, steps=[*batches], num_steps=len(steps))


async def whole_batch(
    session: Session, iteration: int, prompts: StageResult, steps: list[asyncio.Task[Step]], pass_rates: ArtifactRef | None
) -> Sampled:
    """The scores and the batch of all steps together: what a replay, a fork and whoever reads the run look for."""
    parts, at = await all_ended([*steps]), {"iteration": iteration, "round_index": 0}
    rollouts, scored = [shard for shards, _ in parts for shard in shards], [step.ref for _, step in parts]
    scores = await stages.score(session, prompts=prompts.ref, rollouts=rollouts, steps=scored, **at)
    made_of = {"prompts": [prompts.ref], "scores": [scores.ref], "pass_rates": pass_rates}
    batch = await stages.filter_groups(session, branches=shards_with_branches(session.config, rollouts), **made_of, **at)
    return Sampled(prompts, [scores], batch)
