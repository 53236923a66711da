"""One RL iteration as a flow run of its own.

Each stage answers from the store when it was committed before.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple

from prefect import flow

from flows.iteration_runs import begin_next
from flows.session import open_session
from flows.ui import publish_iteration
from flows.unawaited import unawaited
from rlpipe.base.manifests import ActionResult, IterationRecord, StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.loop.session import Session
from rlpipe.loop.stage import all_ended
from rlpipe.stages.branches import shards_with_branches
from rlpipe.stages.generation import num_shards
from rlpipe.stages.iteration import Before, commit_iteration, committed_before
from rlpipe.stages.scoring import over_rounds
from rlpipe.stages.training import other_reference
from rlpipe.store.facts import BatchFacts, PromptsFacts, facts_of
from rlpipe.stored.redo import rounds_to_redo
from tasks import stages


class Sampled(NamedTuple):
    """The data that an iteration trains on: its last round's prompts, the scores of every round,
    and the batch.
    """

    prompts: StageResult
    scores: list[StageResult]
    batch: StageResult

    @property
    def before_next(self) -> Before:
        return Before(self.prompts.ref, self.batch.ref)


class Trained(NamedTuple):
    """The results of an iteration: the training, and the policy that results from it."""

    training: ActionResult
    policy: StageResult


@flow(
    name="rl-iteration", flow_run_name="{config.run}-{iteration:05d}", validate_parameters=False, persist_result=False
)
async def rl_iteration(config: PipelineConfig, iteration: int) -> IterationRecord:
    """Weight version k samples, is rewarded, and becomes version k + 1.
    Returns the record of the commit.

    A run that is fed from `rl.rollouts_from`, and an iteration that is redone, take stored rollouts
    instead, and need no engine for them.
    """
    async with open_session(config) as session:
        session.clock.begin(iteration)
        sampled = await take_batch(session, iteration)
        trained = await train_batch(session, iteration, sampled)
        return await end_iteration(session, iteration, sampled, trained)


async def take_batch(session: Session, iteration: int) -> Sampled:
    """The batch of an iteration, after the previous one was committed."""
    if session.run.redoes(iteration):
        return await redo_batch(session, iteration)
    if session.config.rl.rollouts_from:
        return await import_batch(session, iteration)
    return await sample_batch(session, iteration, await asyncio.to_thread(committed_before, session, iteration))


async def sample_batch(session: Session, iteration: int, earlier: Before) -> Sampled:
    """Dynamic sampling: rounds of prompts, rollouts and scores until enough groups survive the
    filters.

    The first round continues the partial rollouts of the previous iteration.
    """
    policy, _ = await asyncio.to_thread(session.run.policy, session.config.rl.sampled_by(iteration))
    before, carried = earlier
    pass_rates = carried if session.config.rl.curriculum != "none" else None  # they are stored beside the batch
    rounds: list[ArtifactRef] = []
    shards: list[ArtifactRef] = []
    scores: list[StageResult] = []
    num_kept = 0
    while True:
        index = len(rounds)
        prompts = await stages.sample_prompts(
            session, iteration=iteration, round_index=index, before=before, carried=carried, pass_rates=pass_rates
        )
        rounds.append(prompts.ref)
        before, carried = prompts.ref, None
        rollouts = await sample_shards(session, iteration, index, prompts, policy, num_kept)
        shards += rollouts
        scored = await stages.score(
            session, iteration=iteration, round_index=index, prompts=prompts.ref, rollouts=rollouts
        )
        scores.append(scored)
        batch = await stages.filter_groups(
            session,
            iteration=iteration,
            round_index=index,
            branches=shards_with_branches(session.config, shards),
            prompts=rounds,
            scores=[scored.ref for scored in scores],
            pass_rates=pass_rates,
        )
        facts = facts_of(batch.metrics, BatchFacts, batch.ref.folder)
        num_kept = facts.num_kept
        if not facts.needs_more:
            return Sampled(prompts, scores, batch)


async def sample_shards(
    session: Session, iteration: int, round_index: int, prompts: StageResult, policy: ArtifactRef, num_kept: int
) -> list[ArtifactRef]:
    """The rollouts of one sampling round, a reference a shard.

    When a shard fails, the others still run to their end: what they commit is kept, and no sampling
    goes on in the background.
    """
    sampling = [
        stages.generate(
            session,
            iteration=iteration,
            round_index=round_index,
            shard=shard,
            prompts=prompts.ref,
            policy=policy,
            num_kept=num_kept,
        )
        for shard in range(num_shards(session, facts_of(prompts.metrics, PromptsFacts, prompts.ref.folder).num_prompts))
    ]
    return [shard.ref for shard in await all_ended([*sampling])]


async def import_batch(session: Session, iteration: int) -> Sampled:
    """One round of another policy's rollouts, from `rl.rollouts_from`."""
    prompts = await stages.import_prompts(session, iteration=iteration)
    rollouts = await stages.import_rollouts(session, iteration=iteration, prompts=prompts.ref)
    scores = await stages.score(
        session, iteration=iteration, round_index=0, prompts=prompts.ref, rollouts=[rollouts.ref]
    )
    batch = await stages.filter_groups(
        session, iteration=iteration, round_index=0, prompts=[prompts.ref], scores=[scores.ref]
    )
    return Sampled(prompts, [scores], batch)


async def redo_batch(session: Session, iteration: int) -> Sampled:
    """All sampling rounds that the parent stored, filtered together: there are no more.

    Stages before the redone one are the parent's.
    """
    rounds = await asyncio.to_thread(rounds_to_redo, session.run, iteration)
    scores = [
        await stages.score(
            session, iteration=iteration, round_index=index, prompts=stored.prompts.ref, rollouts=stored.rollouts
        )
        for index, stored in enumerate(rounds)
    ]
    curriculum = session.config.rl.curriculum != "none"
    batch = await stages.filter_groups(
        session,
        iteration=iteration,
        round_index=len(rounds) - 1,
        prompts=[stored.prompts.ref for stored in rounds],
        scores=[scored.ref for scored in scores],
        branches=shards_with_branches(session.config, [ref for stored in rounds for ref in stored.rollouts]),
        pass_rates=(await asyncio.to_thread(committed_before, session, iteration)).batch if curriculum else None,
    )
    return Sampled(rounds[-1].prompts, scores, batch)


async def train_batch(session: Session, iteration: int, sampled: Sampled) -> Trained:
    """Trains weight version `iteration` on a batch, and publishes version `iteration + 1`."""
    batch, (previous, _) = sampled.batch.ref, await asyncio.to_thread(session.run.policy, iteration)
    begin_next()
    teacher = await teacher_logprobs(session, iteration, batch)
    training = await stages.train(session, iteration=iteration, batch=batch)
    reference = await asyncio.to_thread(other_reference, session.run, iteration)
    policy = await stages.checkpoint(
        session,
        iteration=iteration,
        batch=batch,
        previous=previous,
        reference=reference,
        teacher=teacher.ref if teacher else None,
        metrics=training.metrics | ({} if teacher is None else by_set(teacher)),
    )
    return Trained(training, policy)


async def teacher_logprobs(session: Session, iteration: int, batch: ArtifactRef) -> StageResult | None:
    """The logprobs of the teachers of the batch; None without a teacher."""
    config, run = session.config, session.run
    if not config.teachers:
        return None
    held = [(await asyncio.to_thread(run.committed, "base", 0, stage))[0] for stage in config.teachers]
    first = held.pop(0) if config.rl.teacher else None
    return await stages.ask_teacher(session, iteration=iteration, batch=batch, teacher=first, set_teachers=held)


def by_set(teacher: StageResult) -> Metrics:
    """The metrics of the teachers by data set; none where all sets have one teacher."""
    return {name: value for name, value in teacher.metrics.items() if "/" in name}


async def end_iteration(session: Session, iteration: int, sampled: Sampled, trained: Trained) -> IterationRecord:
    """Serves the new policy, evaluates it when that is due, and commits the iteration.

    A redone one is not evaluated: an evaluation samples.
    """
    config, policy, redone = session.config, trained.policy.ref, session.run.redoes(iteration)
    if not redone and not config.rl.rollouts_from:
        await stages.reload_engines(session, policy=policy, version=iteration + 1)
    artifacts = {"prompts": sampled.prompts.ref, "batch": sampled.batch.ref, "policy": policy}
    metrics = over_rounds([scored.metrics for scored in sampled.scores])
    metrics |= {**sampled.prompts.metrics, **sampled.batch.metrics, **trained.policy.metrics}
    if not redone and evaluation_due(config, iteration + 1):
        evaluation = await stages.evaluate(session, policy=policy, version=iteration + 1)
        artifacts["evaluation"] = evaluation.ref
        metrics |= {f"evaluation/{name}": value for name, value in evaluation.metrics.items()}
    record = await commit_iteration(session, iteration, artifacts, metrics)
    await unawaited(partial(publish_iteration, session, record))
    return record


def evaluation_due(config: PipelineConfig, version: int) -> bool:
    """True when a weight version is evaluated: every `evaluation.every` iterations, and at the end.
    Always false without evaluation sets."""
    every = config.evaluation.every
    due = version == config.rl.num_iterations or (every > 0 and version % every == 0)
    return due and bool(config.sets("evaluation"))
