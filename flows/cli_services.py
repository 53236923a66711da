"""`rlpipe host` and `rlpipe trainer`: services of a run that goes on elsewhere. Prefect is not needed for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from flows.cli_options import STORE, Sets, StoreUrl, checked_store
from rlpipe.config import PipelineConfig
from rlpipe.services import ADDRESS_VARIABLE, KEY_VARIABLE, config_of, own_address
from rlpipe.store.backend import Store
from rlpipe.types import UserError

Address = Annotated[
    str, typer.Option(envvar=ADDRESS_VARIABLE, help=f"address of this node; beyond loopback {KEY_VARIABLE} must be set")
]
IdleTimeout = Annotated[float, typer.Option(help="seconds without work after which it ends; 0: never")]


def host(
    run: Annotated[str, typer.Option(help="the run to join")],
    store: StoreUrl = STORE,
    address: Address = "",
    port: Annotated[int, typer.Option(help="port of the host; 0: a free one")] = 0,
    idle_timeout_s: IdleTimeout = 0,
    sets: Sets = None,
) -> None:
    """Join a run with the engines of this node, until stopped. The run uses them from its next iteration on."""
    from rlpipe.engines.agent import serve_engines

    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    _serve(
        "engines",
        store,
        run,
        sets,
        lambda opened, config: serve_engines(opened, config, name, own_address(address), port, idle_timeout_s, _ended()),
    )


def trainer(
    run: Annotated[str, typer.Option(help="the run to join")],
    store: StoreUrl = STORE,
    node: Annotated[int, typer.Option(help="which of trainer.nodes this is; node 0 is the one that answers")] = 0,
    address: Address = "",
    idle_timeout_s: IdleTimeout = 0,
    sets: Sets = None,
) -> None:
    """Join a run with this node's part of its trainer gang, until stopped (`trainer.place = "elsewhere"`)."""
    from rlpipe.trainer.serve import GangService

    _serve(
        "trainer",
        store,
        run,
        sets,
        lambda opened, config: GangService(opened, config, node, own_address(address)).run(idle_timeout_s, _ended()),
    )


def _serve(
    section: str, store: str, run: str, sets: list[str] | None, serve: Callable[[Store, PipelineConfig], Awaitable[str]]
) -> None:
    """Serves a run with the settings of one section changed, until it is over."""
    from rlpipe.config_source import override_config

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

    async def until_over() -> str:
        if others := [entry for entry in sets or [] if not entry.startswith(f"{section}.")]:
            raise UserError(f"--set {others[0]}: what a service may set is {section}.*; the rest is the run's")
        opened = checked_store(store)
        return await serve(opened, override_config(await config_of(opened, run), sets or []))

    typer.echo(f"ended: {asyncio.run(until_over())}")


def _ended() -> asyncio.Event:
    """Set by SIGTERM and SIGINT: a service leaves the run before it ends."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    return ended
