"""Commands for a run that there is: its services elsewhere (`rlpipe host`, `rlpipe trainer`),
`rlpipe export` (Prefect is not needed for these), and `rlpipe evaluate`. And servers by themselves:
`rlpipe engine`, `rlpipe server`.

Here is also what they share with the other commands: the options `--set` and
`--store`, and the store itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.database import environment_of, existing_database, own_database
from flows.printing import echo
from flows.server import SERVER, run_flow, running_server, set_defaults
from flows.stopping import bound_end, run_unless_stopped
from rlpipe.base.errors import UserError
from rlpipe.config.extras import COMMANDS, SERVERS, opened
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config
from rlpipe.services.registration import ADDRESS_VARIABLE, KEY_VARIABLE, RunService, config_of, own_address, serve
from rlpipe.services.run_watch import RunWatch
from rlpipe.store.audit import by_number
from rlpipe.store.backend import Store, check_access, check_readable, open_store
from rlpipe.store.lease import check_free
from rlpipe.store.opening import open_existing

STORE = "./rlpipe-store"
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="override a field of the config (rlpipe fields lists them)"),
]
StoreUrl = Annotated[str, typer.Option("--store", help="where runs are kept")]
Address = Annotated[
    str, typer.Option(envvar=ADDRESS_VARIABLE, help=f"address of this node; beyond loopback {KEY_VARIABLE} must be set")
]
CreateService = Callable[[Store, PipelineConfig], RunService]
IdleTimeout = Annotated[
    float,
    typer.Option(
        min=0, help="end after this many seconds in which no process works on the run or prepares it; 0: never"
    ),
]
RunToJoin = Annotated[str, typer.Option("--run", help="the run to join")]


def checked_store(url: str) -> Store:
    """The store at `url`, to read and write; UserError when it cannot be used."""
    store = open_store(url)
    check_access(store)
    return store


def readable_store(url: str) -> Store:
    """The store at `url`, to read; UserError when it cannot be."""
    store = open_store(url)
    check_readable(store)
    return store


def evaluate(
    run: str,
    version: Annotated[
        int | None, typer.Option(metavar="K", help="weight version, by default the newest; -1 is the model before SFT")
    ] = None,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Evaluate a committed policy of a run and print the metrics; when it was
    evaluated before, print the stored metrics."""
    set_defaults()
    overrides = [*(sets or []), f"store={json.dumps(store)}"]
    config = override_config(open_existing(checked_store(store), run).config, overrides)
    check_free(open_store(store), f"runs/{run}")
    from flows.terminal import log_to
    from rlpipe.loop.scratch import work_dir_of

    logs = work_dir_of(config)
    log_to(logs)
    with running_server(logs, own_database(config)) as url:
        from flows.evaluate import evaluate as evaluate_flow

        echo(f"run {run}: store {store}, logs {logs}, Prefect {url}", err=True)
        metrics = run_flow(evaluate_flow(version=version, config=config))
    for name in sorted(metrics, key=by_number):
        echo(f"{name:40s} {metrics[name]:.6g}")


def export(
    run: str,
    to: Annotated[Path, typer.Option(metavar="DIR", help="the folder, which is not there yet, or empty")],
    version: Annotated[int | None, typer.Option(metavar="K", help="weight version, by default the newest")] = None,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Copy a policy, verified, into a folder in HF format, with a model card. A pruned policy is
    first made again by a trainer: --set trainer.* says where it runs."""
    if others := [entry for entry in sets or [] if not entry.startswith("trainer.")]:
        raise UserError(
            f"--set {others[0]}: the settings of a stored policy cannot change; only trainer.* may be set here"
        )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    overrides = [*(sets or []), f"store={json.dumps(store)}"]
    config = override_config(open_existing(readable_store(store), run).config, overrides)
    from rlpipe.stored.remaking import export_policy

    try:
        card = opened(COMMANDS["export"], "the model card")
    except UserError as error:
        card = None
        echo(f"without a model card: {error}", err=True)
    number = run_unless_stopped(export_policy(config, version, to, card))
    echo(f"version {number} of run {run} is in {to}")


def host(
    run: RunToJoin,
    store: StoreUrl = STORE,
    address: Address = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the host; 0: a free one")] = 0,
    idle_timeout_s: IdleTimeout = 0,
    sets: Sets = None,
) -> None:
    """Join a run with the engines of this node, until stopped. The run uses them within seconds,
    also while it samples."""
    from rlpipe.engines.remote import HostService

    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    create = partial(HostService, name=name, address=own_address(address), port=port)
    _serve("engines", store, run, sets, idle_timeout_s, create)


def trainer(
    run: RunToJoin,
    store: StoreUrl = STORE,
    node: Annotated[
        int, typer.Option(min=0, help="which of trainer.nodes this is; node 0 is the one that answers")
    ] = 0,
    address: Address = "",
    idle_timeout_s: IdleTimeout = 0,
    sets: Sets = None,
) -> None:
    """Join a run with this node's trainer processes, until stopped
    (`trainer.place = "elsewhere"`)."""
    from rlpipe.trainer.process import TrainerService

    _serve(
        "trainer", store, run, sets, idle_timeout_s, partial(TrainerService, node=node, address=own_address(address))
    )


def engine(context: typer.Context) -> None:
    """Serve a model over SGLang's protocol (`rlpipe engine --help`)."""
    os.execv(sys.executable, [sys.executable, "-m", opened(SERVERS["engine"], "engine"), *context.args])


def server(
    context: typer.Context,
    database: Annotated[
        Path | None, typer.Option(metavar="FILE", help="show the flow runs that `rlpipe run` kept in this file")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, envvar="PREFECT_SERVER_API_PORT", help="port of the server")
    ] = None,
) -> None:
    """Start Prefect's server and UI on this machine, with the settings that runs need; --database
    FILE shows the flow runs that `rlpipe run` kept in this file (`rlpipe server --help`: the
    options of `prefect server start`)."""
    if background := {"--background", "-b"} & {*context.args}:  # Prefect would start another server there, its own
        raise UserError(
            f"{background.pop()}: rlpipe server stays in front; start it with nohup and &, as the README does"
        )
    set_defaults()
    os.environ.update(environment_of(existing_database(database)) if database else {})
    os.execv(sys.executable, [*SERVER, *(["--port", str(port)] if port else []), *context.args])


def add_service_commands(app: typer.Typer) -> None:
    for command in (evaluate, export, host, trainer):
        app.command()(command)
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    for command in (engine, server):
        app.command(context_settings=passed_on, add_help_option=False)(command)


def _serve(
    section: str, store: str, run: str, sets: list[str] | None, idle_timeout_s: float, create: CreateService
) -> None:
    """Serves a run with the settings of one section changed, until it is over, or SIGTERM or
    SIGINT: it leaves the run before it ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

    async def until_over() -> str:
        if others := [entry for entry in sets or [] if not entry.startswith(f"{section}.")]:
            raise UserError(f"--set {others[0]}: only {section}.* may be set here; the run has the other settings")
        opened = checked_store(store)
        watch = RunWatch(opened, run, idle_timeout_s)
        service = create(opened, override_config(await config_of(watch), sets or []))
        ended = asyncio.Event()

        def end(number: int) -> None:
            bound_end(number)
            ended.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await serve(service, watch.is_over, ended)

    echo(f"ended: {asyncio.run(until_over())}")
