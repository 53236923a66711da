"""The session of a run, with what Prefect does for it: services are runs of deployments, and a flow run waits for one that works on the same run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from prefect import get_client
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Running

from flows.advice import with_advice
from rlpipe.config import PipelineConfig
from rlpipe.stages import session as stages
from rlpipe.store.lease import RunHeld
from tasks.start_service import ServiceStarter

WAIT_MAX_S = 7 * 24 * 3600.0  # longer than a run may take: a schedule that is always late shows as waiting flow runs
POLL_S = 5.0


@contextlib.asynccontextmanager
async def open_session(config: PipelineConfig) -> AsyncIterator[stages.Session]:
    """The session of a run, opened by the outermost flow, shared by those inside it. What fails in it says what to do.

    A deployment's flow run waits, in a state `Waiting`, while another process holds the run; RunHeld after a week, and at once for
    a flow run without a deployment: its user is there to be told.
    """
    try:
        async with contextlib.AsyncExitStack() as stack:
            yield await _enter(stack, config)
    except Exception as error:
        advised = with_advice(error)
        if advised is error:
            raise
        raise advised from error


async def _enter(stack: contextlib.AsyncExitStack, config: PipelineConfig) -> stages.Session:
    deadline, told = time.monotonic() + WAIT_MAX_S, False
    while True:
        try:
            session = await stack.enter_async_context(stages.open_session(config, ServiceStarter(config)))
            break
        except RunHeld as held:
            if not deployment.id or time.monotonic() > deadline:
                raise
            if not told:
                await _show("Waiting", str(held))
            told = True
        await asyncio.sleep(POLL_S)
    if told:
        await _show("Running", "the run is free")
    return session


async def _show(name: str, message: str) -> None:
    """What the state of this flow run reads; only that: who cannot reach the server waits all the same."""
    get_run_logger().info("%s: %s", name, message)
    with contextlib.suppress(PrefectException, OSError):
        async with get_client() as client:
            await client.set_flow_run_state(flow_run.id, Running(name=name, message=message), force=True)  # pyright: ignore[reportArgumentType]
