"""RL on stored rollouts (`rl.rollouts_from`): nothing is sampled, and no engine is started but to evaluate.

From `score` on it is the iteration that samples.
"""

from __future__ import annotations

from prefect import flow

from flows.naming import run_name
from flows.rl_iteration import Sampled, evaluate_if_due, finish_iteration
from flows.rl_phase import begin_rl, iterate
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict
from tasks.stages import checkpoint, evaluate, filter_groups, import_prompts, import_rollouts, score, train


@flow(name="rl-offline", flow_run_name=run_name("rl-offline"), persist_result=False)
async def rl_offline(config: PipelineConfig) -> JsonDict:
    """The RL phase of a run that is fed from `rl.rollouts_from`. Returns the final policy's reference."""
    async with open_session(config) as session:
        first = await begin_rl(session)
        if first == 0 and config.sets("evaluation"):
            await evaluate(session, policy=session.run.policy(0)[0], version=0)
        return await iterate(session, first, rl_offline_iteration)


@flow(name="rl-offline-iteration", flow_run_name="{config.run}-{iteration:05d}", persist_result=False)
async def rl_offline_iteration(config: PipelineConfig, iteration: int) -> JsonDict:
    """Weight version k is trained on what another policy sampled, and becomes version k + 1. Returns the record of the commit."""
    async with open_session(config) as session:
        session.begin_iteration()
        policy, _ = session.run.policy(iteration)
        at = {"iteration": iteration, "round_index": 0}
        prompts = await import_prompts(session, iteration=iteration)
        rollouts = await import_rollouts(session, iteration=iteration, prompts=prompts.ref)
        scores = await score(session, prompts=prompts.ref, rollouts=[rollouts.ref], **at)
        batch = await filter_groups(session, prompts=[prompts.ref], scores=[scores.ref], last=True, **at)
        trained = await train(session, iteration=iteration, batch=batch.ref)
        after = await checkpoint(session, iteration=iteration, batch=batch.ref, previous=policy, metrics=trained.metrics)
        evaluation = await evaluate_if_due(session, iteration, after)
        return await finish_iteration(session, iteration, Sampled(prompts, [scores], batch), trained, after, evaluation)
