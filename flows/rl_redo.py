"""One RL iteration once more, from what another run stored of it (`rlpipe fork --redo`). No engine is asked for anything."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.rl_iteration import Sampled, finish_iteration
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.stages.redo import rounds_to_redo
from rlpipe.stages.sampling import previous_artifact
from rlpipe.types import JsonDict
from tasks.stages import checkpoint, filter_groups, score, train


@flow(name="rl-redo", flow_run_name="{config.run}-{iteration:05d}", persist_result=False)
async def rl_redo(config: PipelineConfig, iteration: int) -> JsonDict:
    """All stored sampling rounds, filtered together: none more can be had. Stages before the redone one are the parent's.

    It is not evaluated, even when that is due: evaluating samples. Returns the record of the commit.
    """
    async with open_session(config) as session:
        session.begin_iteration()
        policy, _ = session.run.policy(iteration)
        rounds = await asyncio.to_thread(rounds_to_redo, session.run, iteration)
        scores = [
            await score(session, iteration=iteration, round_index=index, prompts=each.prompts.ref, rollouts=each.rollouts)
            for index, each in enumerate(rounds)
        ]
        batch = await filter_groups(
            session,
            iteration=iteration,
            round_index=len(rounds) - 1,
            prompts=[each.prompts.ref for each in rounds],
            scores=[each.ref for each in scores],
            pass_rates=previous_artifact(session, iteration, "batch") if config.rl.curriculum != "none" else None,
            last=True,
        )
        trained = await train(session, iteration=iteration, batch=batch.ref)
        after = await checkpoint(session, iteration=iteration, batch=batch.ref, previous=policy, metrics=trained.metrics)
        return await finish_iteration(session, iteration, Sampled(rounds[-1].prompts, scores, batch), trained, after)
