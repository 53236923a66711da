"""The `rlpipe` command: the outermost layer. Prefect is imported only by the commands that run a flow."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli_options import STORE, Commands, Sets, StoreUrl, checked_store, fail
from flows.cli_services import host, trainer
from flows.server import prefect_server, set_defaults
from rlpipe import show as listing
from rlpipe.config import PipelineConfig
from rlpipe.config_source import read_config
from rlpipe.plan import plan_lines
from rlpipe.store.audit import unreferenced, verify
from rlpipe.store.run import Run, check_committed, fork, open_existing, planned_fork
from rlpipe.types import StoreError, UserError

PRESETS = Path(__file__).parent / "presets"
STOPPED = 3  # the exit code of a run that a budget or a stop rule ended
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="SFT and RL that lose nothing.",
)

Source = Annotated[str, typer.Argument(metavar="PRESET|FILE", help="a preset's name, or a TOML file")]


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _config(source: str, sets: list[str] | None, run: str | None = None) -> PipelineConfig:
    overrides = list(sets or []) + ([f"run={json.dumps(run)}"] if run is not None else [])
    return read_config(source, overrides, PRESETS)


@app.command("run")
def run_command(
    source: Source, run: Annotated[str | None, typer.Option(help="name of the run")] = None, sets: Sets = None
) -> None:
    """Start a pipeline run, or continue the one of that name."""
    set_defaults()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    config = _config(source, sets, run)
    if not config.run:
        config = config.model_copy(update={"run": f"{Path(source).stem}-{datetime.now():%Y%m%d-%H%M%S}"})
    _preflight(config)
    _run(config)


def _preflight(config: PipelineConfig, planned: Run | None = None) -> None:
    from rlpipe.stages.preflight import preflight

    try:
        preflight(config, planned)
    except (StoreError, OSError) as error:
        fail(error, 2)


def _run(config: PipelineConfig) -> None:
    from rlpipe.stages.session import work_dir_of

    logs = work_dir_of(config)
    try:
        with prefect_server(logs) as url:
            typer.echo(f"run {config.run}: store {config.store}, logs {logs}, Prefect UI {url.removesuffix('/api')}")
            from flows.post_train import post_train

            told = asyncio.run(post_train(config=config))
    except KeyboardInterrupt:
        fail(RuntimeError("stopped; the same command goes on where it was"), 130)
    reason = told.get("stopped", "")
    typer.echo(f"\nrun {config.run} is complete" if not reason else f"\nrun {config.run} was stopped: {reason}")
    _echo(told.get("before_after", []))
    if "policy" in told:
        typer.echo(f"  curves  {told['curves']}\n  policy  {told['policy']}")
    typer.echo(
        f"  look    rlpipe show {config.run} --store {config.store} | mlflow ui --backend-store-uri {config.tracking.uri}"
    )
    if reason:
        raise typer.Exit(STOPPED)


@app.command()
def plan(source: Source, sets: Sets = None) -> None:
    """What would start where: sizes, steps and memory. Starts nothing."""
    _echo(plan_lines(_config(source, sets)))


@app.command()
def runs(store: StoreUrl = STORE) -> None:
    """What is in the store."""
    _echo(listing.run_lines(checked_store(store)))


@app.command()
def show(
    run: str,
    iteration: Annotated[int | None, typer.Option(help="one iteration: its metrics and rollouts")] = None,
    rows: Annotated[int, typer.Option(help="rollouts shown")] = 16,
    store: StoreUrl = STORE,
) -> None:
    """A run's iterations, or the rollouts of one as a table."""
    found = open_existing(checked_store(store), run)
    _echo(listing.show_lines(found) if iteration is None else listing.iteration_lines(found, iteration, rows))


@app.command("verify")
def verify_command(run: str, store: StoreUrl = STORE) -> None:
    """Re-hash every artifact of a run; exit code 1 on any fault."""
    count, faults = verify(open_existing(checked_store(store), run))
    _echo(f"FAULT {fault}" for fault in faults)
    typer.echo(f"{run}: {count} artifacts, {len(faults)} faults")
    if faults:
        raise typer.Exit(1)


@app.command("fork")
def fork_command(
    run: str,
    at: Annotated[int, typer.Option(metavar="K", help="the newest iteration that is shared, or the one that is redone")],
    new: Annotated[str, typer.Option("--run", help="name of the new run")],
    redo: Annotated[
        Literal["score", "filter", "train"] | None, typer.Option(help="redo iteration K from this stage on; samples nothing")
    ] = None,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Create a new run that shares iterations 0..K of another, and continue it with other settings.

    With --redo it shares iterations 0..K-1 and what was sampled in K, computes K again, prints what changed, and ends.
    """
    set_defaults()
    from rlpipe.config_source import override_config
    from rlpipe.stages.redo import changes, check_redo

    overrides = [*(sets or []), f"run={json.dumps(new)}", f"store={json.dumps(store)}"]
    if redo and any(each.replace(" ", "").startswith("rl.num_iterations=") for each in overrides):
        raise UserError(f"--redo ends with iteration {at}: leave rl.num_iterations away, and go on with rlpipe run after it")
    parent = open_existing(checked_store(store), run)
    check_committed(parent, at)
    config = override_config(parent.config, overrides + ([f"rl.num_iterations={at + 1}"] if redo else []))
    planned = planned_fork(parent, at, config, redo or "")
    if redo:
        check_redo(parent, at, config, redo)
    _preflight(config, planned)
    forked = fork(parent, at, config, redo or "")
    typer.echo(f"run {new} shares {run} up to iteration {forked.fork_at}" + (f", and redoes {redo} of {at}" if redo else ""))
    _run(config)
    if redo:
        _echo(changes(forked))


@app.command()
def gc(
    run: str,
    delete: Annotated[bool, typer.Option("--delete", help="delete them; else only list")] = False,
    store: StoreUrl = STORE,
) -> None:
    """List (or delete) what no manifest of a run names: files of attempts that died. Not while the run is worked on."""
    from rlpipe.store import lease

    found = open_existing(checked_store(store), run)
    held = lease.acquire(found.store, found.root) if delete else None
    try:
        keys = unreferenced(found)
        for key in keys if delete else []:
            found.store.delete(key)
    finally:
        if held is not None:
            held.release()
    _echo(f"{'deleted' if delete else 'unreferenced'} {key}" for key in keys)
    typer.echo(f"{run}: {len(keys)} files no manifest names" + ("" if delete or not keys else "; delete them with --delete"))


@app.command()
def automations(
    notify: Annotated[str, typer.Option(metavar="TYPE/NAME", help="the notification block that is told")] = "",
) -> None:
    """Create or update what the Prefect server does by itself: find dead flow runs, retry crashed ones, notify."""
    from prefect.settings import PREFECT_API_URL

    from flows.automations import apply_automations

    if not PREFECT_API_URL.value():
        raise UserError("PREFECT_API_URL is not set: name the team's server (`prefect config set PREFECT_API_URL=...`)")
    _echo(asyncio.run(apply_automations(notify)))


@app.command("import-gguf", context_settings=PASSED_ON, add_help_option=False)
def import_gguf(context: typer.Context) -> None:
    """Make a model folder in HF format of a GGUF file (`rlpipe import-gguf --help`)."""
    os.execv(sys.executable, [sys.executable, "-m", "rlpipe.gguf", *context.args])


@app.command(context_settings=PASSED_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Serve a model over SGLang's protocol (`rlpipe engine --help`)."""
    os.execv(sys.executable, [sys.executable, "-m", "rlpipe.engines.local.server", *context.args])


app.command()(host)
app.command()(trainer)

if __name__ == "__main__":
    app()
