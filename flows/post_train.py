"""SFT, then RL: the parent flow."""

from __future__ import annotations

from prefect import flow

from flows.naming import named, run_name
from flows.publish import publish_report
from flows.rl import rl
from flows.rl_offline import rl_offline
from flows.rl_phase import stopped, why_not_on
from flows.sft import sft, why_sft_stops
from rlpipe.config import PipelineConfig
from rlpipe.stages.session import open_session
from rlpipe.types import JsonDict


@flow(name="post-train", flow_run_name=run_name("post-train"), persist_result=False)
async def post_train(config: PipelineConfig) -> JsonDict:
    """Takes a model through SFT and RL. The same run name continues; a committed stage is never done twice.

    A run that a budget or a stop rule ended is published as far as it came, in a state `Stopped`.
    """
    config = named(config)
    async with open_session(config) as session:
        run = session.run
        if run.num_segments and run.parent is None:
            await sft(config)
            if reason := await why_sft_stops(session):
                return stopped(reason, {"run": run.name, "stopped": reason})
        if config.rl.num_iterations:
            await (rl_offline if config.rl.rollouts_from else rl)(config)
        done = run.num_committed("rl", config.rl.num_iterations)
        told = await publish_report(session, done)
        reason = await why_not_on(session, done)
        return stopped(reason, told | {"stopped": reason}) if reason else told
