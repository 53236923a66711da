"""RL: iteration after iteration, from the newest committed one."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.naming import named, run_name
from flows.rl_iteration import rl_iteration
from flows.rl_offline import rl_offline
from flows.rl_phase import begin_rl, iterate, why_not_on
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict
from tasks.stages import evaluate, reload_engines


@flow(name="rl", flow_run_name=run_name("rl"), persist_result=False)
async def rl(changes: JsonDict | None = None, *, config: PipelineConfig) -> Any:
    """The RL phase of a run; starts it, or goes on after its newest committed iteration. Returns the final policy's reference.

    Args:
        changes: Only what differs from the config below, for example `{"run": "monday", "rl.num_iterations": 30, "data.words.rows_max": 500}`.
        config: The whole config. The same `run` continues; an empty one names the run after the flow run (whose Run Name above is replaced).
    """
    config = named(config, changes)
    if config.rl.rollouts_from:  # nothing to sample: the other mode
        return await rl_offline(config, return_state=True)  # pyright: ignore[reportGeneralTypeIssues] # its state is this one's, Stopped or not
    async with open_session(config) as session:
        first = await begin_rl(session)
        if first < config.rl.num_iterations and not await why_not_on(session, first):
            if config.trainer.place == "deployment":
                await session.gang()  # before the engines: of two runs that each hold one of two full pools, both would wait
            start, _ = session.run.policy(first)
            await reload_engines(session, policy=start, version=first)
            if first == 0 and config.sets("evaluation"):
                await evaluate(session, policy=start, version=0)
        return await iterate(session, first, rl_iteration)
