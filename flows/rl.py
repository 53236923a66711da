"""RL: iteration after iteration, from the newest committed one."""

from __future__ import annotations

from prefect import flow

from flows.naming import named, run_name
from flows.rl_iteration import rl_iteration
from flows.rl_offline import rl_offline
from flows.rl_phase import begin_rl, iterate
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict
from tasks.evaluate import evaluate
from tasks.reload_engines import reload_engines


@flow(name="rl", flow_run_name=run_name("rl"), persist_result=False)
async def rl(config: PipelineConfig) -> JsonDict:
    """The RL phase of a run; starts it, or goes on after its newest committed iteration. Returns the final policy's reference."""
    config = named(config)
    if config.rl.rollouts_from:  # nothing to sample: the other mode
        return await rl_offline(config)
    async with open_session(config) as session:
        first = await begin_rl(session)
        if first < config.rl.num_iterations:
            if config.trainer.place == "deployment":
                await (
                    session.gang()
                )  # before the engines: two runs that each hold one of two full pools would wait for each other
            start, _ = session.run.policy(first)
            await reload_engines(session, policy=start, version=first)
            if first == 0 and config.sets("evaluation"):
                await evaluate(session, policy=start, version=0)
        return await iterate(session, first, rl_iteration)
