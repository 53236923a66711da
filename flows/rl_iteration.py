"""One RL iteration as a flow run of its own. Every step answers from the store when it was done before."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from prefect import flow

from flows.publish import publish_iteration
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.stages.iteration import commit_iteration
from rlpipe.stages.sampling import num_shards, previous_artifact
from rlpipe.stages.scoring import over_rounds
from rlpipe.stages.session import Session
from rlpipe.types import ArtifactRef, JsonDict, StageResult
from tasks.stages import checkpoint, evaluate, filter_groups, generate, reload_engines, sample_prompts, score, train


class Sampled(NamedTuple):
    """What an iteration trains on: its last round's prompts, the scores of every round, and the batch."""

    prompts: StageResult
    scores: list[StageResult]
    batch: StageResult


@flow(name="rl-iteration", flow_run_name="{config.run}-{iteration:05d}", persist_result=False)
async def rl_iteration(config: PipelineConfig, iteration: int) -> JsonDict:
    """Weight version k samples, is rewarded, and becomes version k + 1. Returns the record of the commit."""
    async with open_session(config) as session:
        session.begin_iteration()
        policy, _ = session.run.policy(iteration)
        sampled = await sample_batch(session, iteration, policy)
        batch = sampled.batch.ref
        trained = await train(session, iteration=iteration, batch=batch)
        after = await checkpoint(session, iteration=iteration, batch=batch, previous=policy, metrics=trained.metrics)
        await reload_engines(session, policy=after.ref, version=iteration + 1)
        evaluation = await evaluate_if_due(session, iteration, after)
        return await finish_iteration(session, iteration, sampled, trained, after, evaluation)


async def finish_iteration(
    session: Session,
    iteration: int,
    sampled: Sampled,
    trained: StageResult,
    after: StageResult,
    evaluation: StageResult | None = None,
) -> JsonDict:
    """Commits an iteration of any mode and shows it; the record."""
    artifacts = {"prompts": sampled.prompts.ref, "batch": sampled.batch.ref, "policy": after.ref}
    metrics = over_rounds([told.metrics for told in sampled.scores])
    metrics |= {**sampled.prompts.metrics, **sampled.batch.metrics, **trained.metrics}
    if evaluation is not None:
        artifacts["evaluation"] = evaluation.ref
        metrics |= {f"evaluation/{name}": value for name, value in evaluation.metrics.items()}
    record = await commit_iteration(session, iteration, artifacts, metrics)
    await publish_iteration(session, record, sampled.batch.ref)
    return record


async def sample_batch(session: Session, iteration: int, policy: ArtifactRef) -> Sampled:
    """Dynamic sampling: rounds of prompts, rollouts and scores until enough groups survive the filters.

    The first round takes up what the iteration before had to cut short.
    """
    before, carried = (previous_artifact(session, iteration, name) for name in ("prompts", "batch"))
    pass_rates = carried if session.config.rl.curriculum != "none" else None  # they lie beside the batch
    rounds: list[ArtifactRef] = []
    scores: list[StageResult] = []
    kept = 0
    while True:
        at = {"iteration": iteration, "round_index": len(rounds)}
        prompts = await sample_prompts(session, before=before, carried=carried, pass_rates=pass_rates, **at)
        rounds.append(prompts.ref)
        before, carried = prompts.ref, None
        part = {"prompts": prompts.ref, "policy": policy, "kept": kept, **at}
        shards = range(num_shards(session, prompts.metrics["num_prompts"]))
        rollouts = await asyncio.gather(*(generate(session, shard=shard, **part) for shard in shards))
        scores.append(await score(session, prompts=prompts.ref, rollouts=[shard.ref for shard in rollouts], **at))
        scored = [done.ref for done in scores]
        batch = await filter_groups(session, prompts=rounds, scores=scored, pass_rates=pass_rates, **at)
        kept = batch.metrics["rollout/groups_kept"]
        if not batch.metrics["needs_more"]:
            return Sampled(prompts, scores, batch)


async def evaluate_if_due(session: Session, iteration: int, after: StageResult) -> StageResult | None:
    """Evaluates the policy after an iteration: every `evaluation.every` iterations, and at the end."""
    config, version = session.config, iteration + 1
    last = version == config.rl.num_iterations
    if not config.sets("evaluation") or not (last or (config.evaluation.every and version % config.evaluation.every == 0)):
        return None
    return await evaluate(session, policy=after.ref, version=version)
