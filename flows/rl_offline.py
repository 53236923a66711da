"""RL on stored rollouts (`rl.rollouts_from`): nothing is sampled, and no engine is started but to evaluate."""

from __future__ import annotations

from prefect import flow

from flows.naming import named, run_name
from flows.rl_offline_iteration import rl_offline_iteration
from flows.rl_phase import begin_rl, iterate
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict
from tasks.stages import evaluate


@flow(name="rl-offline", flow_run_name=run_name("rl-offline"), persist_result=False)
async def rl_offline(config: PipelineConfig) -> JsonDict:
    """The RL phase of a run that is fed from `rl.rollouts_from`. Returns the final policy's reference."""
    config = named(config)
    async with open_session(config) as session:
        first = await begin_rl(session)
        if first == 0 and config.sets("evaluation"):
            await evaluate(session, policy=session.run.policy(0)[0], version=0)
        return await iterate(session, first, rl_offline_iteration)
