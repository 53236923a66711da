"""SFT, then RL: the parent flow."""

from __future__ import annotations

from prefect import flow

from flows.approval import ApprovalNeeded, require_approval, wait_for_approval
from flows.naming import named, run_name
from flows.publish import publish_report
from flows.rl import rl
from flows.rl_phase import stopped, why_not_on
from flows.session import open_session
from flows.sft import sft, why_sft_stops
from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict


@flow(name="post-train", flow_run_name=run_name("post-train"), persist_result=False)
async def post_train(changes: JsonDict | None = None, *, config: PipelineConfig) -> JsonDict:
    """Takes a model through SFT and RL. The same run name continues; a committed stage is never done twice.

    A run that a budget or a stop rule ended is published as far as it came, in a state `Stopped`.

    Args:
        changes: Only what differs from the config below, for example `{"run": "monday", "rl.num_iterations": 30, "data.words.rows_max": 500}`.
        config: The whole config. The same `run` continues; an empty one names the run after the flow run (whose Run Name above is replaced).
    """
    config = named(config, changes)
    while True:
        try:
            return await _phases(config)
        except ApprovalNeeded as needed:  # the run and its services were given back on the way here
            await wait_for_approval(config, needed.gate)


async def _phases(config: PipelineConfig) -> JsonDict:
    async with open_session(config) as session:
        run = session.run
        if run.num_segments and run.parent is None:
            await sft(config=config)
            if reason := await why_sft_stops(session):
                return stopped(reason, {"run": run.name, "stopped": reason})
        if config.rl.num_iterations:
            await require_approval(session, "rl")
            await rl(config=config)
        await require_approval(session, "register")
        done = run.num_committed("rl", config.rl.num_iterations)
        told = await publish_report(session, done)
        reason = await why_not_on(session, done)
        return stopped(reason, told | {"stopped": reason}) if reason else told
