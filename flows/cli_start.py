"""The commands that start a run: `rlpipe run`, `rlpipe resume`, `rlpipe fork`.

Prefect is imported when one does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from flows import PRESETS
from flows.blocks import read_secrets
from flows.cli_services import STORE, Sets, StoreUrl, checked_store
from flows.database import own_database, template
from flows.early_server import EarlyServer, server_beside
from flows.printing import echo, echo_all, fail
from flows.server import run_flow, running_server, set_defaults
from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.secrecy import without_passwords
from rlpipe.config.source import override_config, read_config
from rlpipe.loop.scratch import work_dir_of
from rlpipe.processes.memory import lasting_objects
from rlpipe.store.backend import open_store
from rlpipe.store.commits import CommittedLate
from rlpipe.store.forks import check_committed, forked_from, way_to_resume
from rlpipe.store.lease import announce, check_free
from rlpipe.store.opening import find_run, fork, open_existing, planned_fork
from rlpipe.store.progress import Progress
from rlpipe.store.run import AT_SFT, Run
from rlpipe.store.run_record import last_started, record_key

if TYPE_CHECKING:
    from flows.ui import RunReport

Result = TypeVar("Result")
Started = Callable[[], Coroutine[Any, Any, Result]]
STOPPED = 3  # the exit code of a run that a budget or a stop rule ended
NOT_PROMOTED = 4  # and of one in which nothing was kept to train, or whose policy failed its gate
Source = Annotated[str, typer.Argument(metavar="PRESET|FILE", help="a preset's name, or a TOML file")]
Name = Annotated[str | None, typer.Option("--run", help="name of the run")]
At = Annotated[
    str,
    typer.Option(
        metavar="K|sft",
        help="the newest iteration to share, or with --redo the one to do again; sft: share the SFT only",
    ),
]
Redo = Annotated[
    Literal["score", "filter", "train"] | None,
    typer.Option(help="do iteration K again from this stage on, without sampling"),
]


def config_of(source: str, sets: list[str] | None, run: str | None = None) -> PipelineConfig:
    overrides = list(sets or []) + ([f"run={json.dumps(run)}"] if run is not None else [])
    return read_config(source, overrides, PRESETS)


def run_command(source: Source, run: Name = None, sets: Sets = None) -> None:
    """Start a pipeline run, or continue the one of that name."""
    set_defaults()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    if run == "":  # of a script whose variable is not set, each night would be a new run
        raise UserError(
            "--run '': the name is empty; leave out --run, and rlpipe makes a name of the preset and the time"
        )
    config = config_of(source, sets, run)
    if not config.run:
        config = config.model_copy(update={"run": f"{Path(source).stem}-{datetime.now():%Y%m%d-%H%M%S}"})
    with server_beside(config) as early:
        preflight_of(config)
        run_to_end(config, early)


def resume_command(run: str, sets: Sets = None, store: StoreUrl = STORE) -> None:
    """Go on with a run where it was, with the settings that it was started with last;
    --set changes what may change."""
    set_defaults()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    for entry in sets or []:
        if (name := entry.split("=")[0].strip()) in ("run", "store"):
            raise UserError(
                f"--set {entry}: a run goes on under its own name, in its own store; leave out {name} (--store names"
                " the store)"
            )
    opened = checked_store(store)
    stored = last_started(opened, open_existing(opened, run).name)
    config = override_config(stored, [*(sets or []), f"store={json.dumps(store)}"])
    standing = find_run(opened, config)
    assert standing is not None, f"run {run} was opened just now"
    progress = Progress(standing)
    if progress.has_base and progress.sft_complete and progress.num_iterations >= config.rl.num_iterations:
        done = f"all {config.rl.num_iterations} iterations" if config.rl.num_iterations else "all its SFT"
        echo(
            f"run {run} has already done {done}; for more iterations: {way_to_resume(config)} --set rl.num_iterations=N"
        )
    with server_beside(config) as early:
        preflight_of(config)
        run_to_end(config, early)


def fork_command(
    run: str,
    at: At,
    new: Annotated[str, typer.Option("--run", help="name of the new run")],
    redo: Redo = None,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Create a new run that shares iterations 0..K of another, or its SFT only, and
    continue it with other settings.

    With --redo it shares iterations 0..K-1 and what was sampled in K, computes K again,
    prints what changed, and ends.
    """
    set_defaults()
    from rlpipe.stored.redo import changes, check_redo

    overrides = [*(sets or []), f"run={json.dumps(new)}", f"store={json.dumps(store)}"]
    if redo and any(entry.replace(" ", "").startswith("rl.num_iterations=") for entry in overrides):
        raise UserError(
            f"--redo ends with iteration {at}: leave out rl.num_iterations, and run more iterations with rlpipe resume"
            " afterwards"
        )
    parent, newest = open_existing(checked_store(store), run), iteration_of(at)
    check_committed(parent, newest, redo or "")
    config = override_config(parent.config, overrides + ([f"rl.num_iterations={newest + 1}"] if redo else []))
    planned = planned_fork(parent, newest, config, redo or "")
    if redo:
        check_redo(parent, newest, config, redo)
    with server_beside(config) as early:
        preflight_of(config, planned)
        forked = fork(parent, newest, config, redo or "")
        echo(f"run {new} is forked from {forked_from(forked)}")
        run_to_end(config, early)
    if redo:
        echo_all(changes(forked))


def iteration_of(at: str) -> int:
    """The iteration that `--at` names; AT_SFT for sft."""
    if at == "sft":
        return AT_SFT
    if not at.isdecimal():
        raise UserError(f"--at {at}: name an iteration from 0 on, or sft")
    return int(at)


def preflight_of(config: PipelineConfig, planned: Run | None = None) -> None:
    """Ends the command where the run cannot work, or another process holds it."""
    echo(f"run {config.run}: reading its data, trying its rewards and its model (large data sets take minutes)")
    from rlpipe.checks.preflight import preflight

    read_secrets(config)
    store, root = checked_store(config.store), f"runs/{config.run}"  # before an announcement that nobody could read
    announce(store, root)  # until the flow holds the run, or this process ends
    try:
        preflight(config, planned)
        check_free(store, root)
    except (StoreError, OSError) as error:
        fail(error, 2)


def run_to_end(config: PipelineConfig, early: EarlyServer) -> None:
    """Runs the pipeline; says where its logs and pages are, and at its end what came of it.

    `early`: a server that was started for it.
    """
    from rlpipe.trainer.process import trainer_beside

    # a new run needs its trainer at once, for the base model: it imports while the flow starts
    is_new = not open_store(config.store).exists(record_key(config.run))
    with trainer_beside(config, work_dir_of(config)) if is_new else contextlib.nullcontext():
        result, database = _run(config, early)
    reason = result.get("stopped", "")
    state = (
        f"was stopped: {reason}" if reason else "trained nothing" if result.get("trained_nothing") else "is complete"
    )
    echo("\n" + ": ".join([f"run {config.run} {state}", *([result["untrained"]] if "untrained" in result else [])]))
    echo_all(result.get("before_after", []))
    if gate_failed := result.get("gate_failed"):
        echo(f"  {gate_failed}: it is not promoted")
    if curves := result.get("curves"):
        echo(f"  curves  {curves}\n  policy  {result.get('policy')}")
    echo_all(["  look at it with", *(f"    {command}" for command in look_commands(config, database))])
    if reason or gate_failed or result.get("trained_nothing"):
        raise typer.Exit(STOPPED if reason and not gate_failed else NOT_PROMOTED)


def _run(config: PipelineConfig, early: EarlyServer) -> tuple[RunReport, Path | None]:
    """The result of the pipeline, and the database of Prefect's UI, where it is ours."""

    def pipeline() -> Started[RunReport]:
        from flows.post_train import post_train

        return lambda: post_train(config=config)

    return on_server(config, early, pipeline)


def on_server(
    config: PipelineConfig, early: EarlyServer, load: Callable[[], Started[Result]]
) -> tuple[Result, Path | None]:
    """The result of a flow, and the database of Prefect's UI, where it is ours. `load`: imports the
    flow, and returns what starts it.
    """
    with lasting_objects():
        from prefect.settings import PREFECT_API_URL

        from flows.terminal import log_to

        started = load()

    logs, configured, database = work_dir_of(config), PREFECT_API_URL.value(), own_database(config)
    log_to(logs)
    if not configured:
        first = early.makes_tables or (database is not None and not database.exists() and not template().exists())
        echo(
            "starting Prefect's server"
            f" ({'up to a minute the first time, to make its database' if first else 'some seconds'})"
        )
    with running_server(logs, database, early.take(database)) as url:
        page = f"{url.removesuffix('/api')}{'' if PREFECT_API_URL.value() == configured else ' (until the run ends)'}"
        echo(f"run {config.run}: store {config.store}, logs {logs}, Prefect UI {page}")
        try:
            return run_flow(started()), database
        except CommittedLate as late:
            echo(f"rlpipe: {late}", err=True)
            return run_flow(started()), database


def look_commands(config: PipelineConfig, database: Path | None) -> list[str]:
    """The commands that show a run, as this user can call them: with the path that `rlpipe` was
    called by. `database`: of Prefect's UI, where it is ours."""
    from rlpipe.report.tracking import tracking_uri

    program = sys.argv[0] if Path(sys.argv[0]).name == "rlpipe" else str(Path(sys.executable).with_name("rlpipe"))
    store = ["--store", config.store] if config.store != STORE else []
    commands = [shlex.join([program, "show", config.run, *store])]
    if uri := without_passwords(tracking_uri(config)):
        mlflow = os.path.join(os.path.dirname(program), "mlflow")
        commands.append(uri if uri.startswith("http") else shlex.join([mlflow, "ui", "--backend-store-uri", uri]))
    if database:
        commands.append(
            shlex.join(
                [
                    program,
                    "server",
                    "--database",
                    os.path.relpath(database) if database.is_relative_to(Path.cwd()) else str(database),
                ]
            )
        )
    return commands
