"""Evaluates one committed policy of a run, whenever somebody asks."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.naming import run_name
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.config_source import change_config
from rlpipe.store.backend import open_store
from rlpipe.store.run import find_run
from rlpipe.types import JsonDict, UserError
from tasks.stages import evaluate as evaluate_task


@flow(name="evaluate", flow_run_name=run_name("evaluate"), persist_result=False)
async def evaluate(changes: JsonDict | None = None, version: int = 0, *, config: PipelineConfig) -> JsonDict:
    """The evaluation metrics of a weight version of the run, computed now or read from the store.

    Args:
        changes: Only what differs from the config below, for example `{"run": "monday"}`.
        version: The weight version: 0 is what RL starts from, k what iteration k - 1 made.
        config: The config of the run; its name says which one.
    """
    config = change_config(config, changes) if changes else config
    if not config.run or await asyncio.to_thread(lambda: find_run(open_store(config.store), config)) is None:
        raise UserError(f"run={config.run!r}: name a run that exists in {config.store}")
    async with open_session(config) as session:
        policy, _ = session.run.policy(version)
        return (await evaluate_task(session, policy=policy, version=version)).metrics
