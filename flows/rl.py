"""RL: iteration after iteration, from the newest committed one."""

from __future__ import annotations

from prefect import flow

from flows.naming import named, run_name
from flows.rl_iteration import rl_iteration
from flows.rl_phase import begin_rl, iterate, why_not_on
from rlpipe.config import PipelineConfig
from rlpipe.stages.session import open_session
from rlpipe.types import JsonDict, UserError
from tasks.evaluate import evaluate
from tasks.reload_engines import reload_engines


@flow(name="rl", flow_run_name=run_name("rl"), persist_result=False)
async def rl(config: PipelineConfig) -> JsonDict:
    """The RL phase of a run; starts it, or goes on after its newest committed iteration. Returns the final policy's reference."""
    config = named(config)
    if config.rl.rollouts_from:
        raise UserError(f"rl.rollouts_from={config.rl.rollouts_from!r}: start post-train or rl-offline")
    async with open_session(config) as session:
        first = await begin_rl(session)
        if first < config.rl.num_iterations and not await why_not_on(session, first):
            start, _ = session.run.policy(first)
            await reload_engines(session, policy=start, version=first)
            if first == 0 and config.sets("evaluation"):
                await evaluate(session, policy=start, version=0)
        return await iterate(session, first, rl_iteration)
