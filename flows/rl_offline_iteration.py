"""One RL iteration on stored rollouts. From `score` on it is the iteration that samples."""

from __future__ import annotations

import time

from prefect import flow

from flows.rl_iteration import Sampled, evaluation_due, finish_iteration
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict
from tasks.stages import checkpoint, evaluate, filter_groups, import_prompts, import_rollouts, score, train


@flow(name="rl-offline-iteration", flow_run_name="{config.run}-{iteration:05d}", persist_result=False)
async def rl_offline_iteration(config: PipelineConfig, iteration: int) -> JsonDict:
    """Weight version k is trained on what another policy sampled, and becomes version k + 1. Returns the record of the commit."""
    started = time.monotonic()
    async with open_session(config) as session:
        session.seconds.clear()
        policy, _ = session.run.policy(iteration)
        at = {"iteration": iteration, "round_index": 0}
        prompts = await import_prompts(session, iteration=iteration)
        rollouts = await import_rollouts(session, iteration=iteration, prompts=prompts.ref)
        scores = await score(session, prompts=prompts.ref, rollouts=[rollouts.ref], **at)
        batch = await filter_groups(session, prompts=[prompts.ref], scores=[scores.ref], last=True, **at)
        trained = await train(session, iteration=iteration, batch=batch.ref)
        after = await checkpoint(session, iteration=iteration, batch=batch.ref, previous=policy, metrics=trained.metrics)
        evaluation = None
        if evaluation_due(config, iteration):
            evaluation = await evaluate(session, policy=after.ref, version=iteration + 1)
        sampled = Sampled(prompts, [scores], batch)
        return await finish_iteration(session, iteration, started, sampled, trained, after, evaluation)
