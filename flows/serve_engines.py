"""The engines of a node, for as long as a run needs them."""

from __future__ import annotations

import asyncio

from prefect import flow

from rlpipe.config import EnginesConfig
from rlpipe.engines.agent import serve_engines as serve
from rlpipe.services import config_of, node_name, own_address
from rlpipe.store.backend import open_store


@flow(name="serve-engines", flow_run_name="serve-engines {run} node {node}", persist_result=False)
async def serve_engines(
    store: str, run: str, node: int = 0, engines: EnginesConfig | None = None, idle_timeout_s: float = 900
) -> str:
    """Samples for the run, until the run dismisses it or has asked for nothing for `idle_timeout_s`. Says why it ended."""
    opened = open_store(store)
    config = await config_of(opened, run, engines=engines)
    return await serve(opened, config, node_name(node), own_address(), 0, idle_timeout_s, asyncio.Event())
