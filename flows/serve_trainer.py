"""A node of a run's trainer gang, for as long as the run needs it."""

from __future__ import annotations

import asyncio

from prefect import flow

from rlpipe.config import TrainerConfig
from rlpipe.services import config_of, own_address
from rlpipe.store.backend import open_store
from rlpipe.trainer.serve import GangService


@flow(name="serve-trainer", flow_run_name="serve-trainer {run} node {node}", persist_result=False)
async def serve_trainer(
    store: str, run: str, node: int = 0, trainer: TrainerConfig | None = None, idle_timeout_s: float = 900
) -> str:
    """Trains what the run asks for, until the run dismisses it or has asked for nothing for `idle_timeout_s`. Says why it ended."""
    opened = open_store(store)
    config = await config_of(opened, run, trainer=trainer)
    return await GangService(opened, config, node, own_address()).run(idle_timeout_s, asyncio.Event())
