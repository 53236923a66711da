"""SFT, then RL: the parent flow."""

from __future__ import annotations

from prefect import flow

from flows.naming import named, run_name
from flows.publish import publish_report
from flows.rl import rl
from flows.session import open_session
from flows.sft import sft
from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict


@flow(name="post-train", flow_run_name=run_name("post-train"), persist_result=False)
async def post_train(config: PipelineConfig) -> JsonDict:
    """Takes a model through SFT and RL. The same run name continues; a committed stage is never done twice."""
    config = named(config)
    async with open_session(config) as session:
        if session.run.num_segments and session.run.parent is None:
            await sft(config)
        if config.rl.num_iterations:
            await rl(config)
        return await publish_report(session)
