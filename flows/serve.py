"""The services of a run as flow runs: the engines of a node, and the trainer processes of a node,
for as long as the run needs them.
"""

from __future__ import annotations

import asyncio

from prefect import flow

from rlpipe.config.operational import EnginesConfig, TrainerConfig
from rlpipe.engines.remote import HostService
from rlpipe.services.registration import config_of, node_name, own_address, past, serve
from rlpipe.services.run_watch import RunWatch
from rlpipe.store.backend import open_store
from rlpipe.trainer.process import TrainerService


@flow(name="serve-engines", flow_run_name="serve-engines {run} node {node}", persist_result=False)
async def serve_engines(
    store: str, run: str, node: int = 0, engines: EnginesConfig | None = None, idle_timeout_s: float = 900
) -> str:
    """Samples for the run, until the run dismisses it or has asked for nothing for
    `idle_timeout_s`. Says why it ended."""
    opened = open_store(store)
    config = await config_of(RunWatch(opened, run, idle_timeout_s), engines=engines)
    return await serve(
        HostService(opened, config, node_name(node), own_address()), past(idle_timeout_s), asyncio.Event()
    )


@flow(name="serve-trainer", flow_run_name="serve-trainer {run} node {node}", persist_result=False)
async def serve_trainer(
    store: str, run: str, node: int = 0, trainer: TrainerConfig | None = None, idle_timeout_s: float = 900
) -> str:
    """Trains what the run asks for, until the run dismisses it or has asked for nothing for
    `idle_timeout_s`. Says why it ended."""
    opened = open_store(store)
    config = await config_of(RunWatch(opened, run, idle_timeout_s), trainer=trainer)
    return await serve(TrainerService(opened, config, node, own_address()), past(idle_timeout_s), asyncio.Event())
