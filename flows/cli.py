"""The `rlpipe` command: the outermost layer. Prefect is imported only by the commands that run a flow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from flows.cli_queries import sql
from flows.cli_services import STORE, Sets, StoreUrl, add_service_commands, checked_store, readable_store
from flows.cli_view import view
from flows.cli_why import why
from flows.server import Terminated, apply_automations, run_flow, running_server, set_defaults, terminable
from rlpipe.config.fields import field_lines
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.secrecy import without_passwords
from rlpipe.config.source import override_config, read_config
from rlpipe.report.plan import plan_lines
from rlpipe.report.show import compare_lines, iteration_lines, run_lines, show_lines
from rlpipe.store import audit
from rlpipe.store.backend import open_store
from rlpipe.store.forks import AT_SFT
from rlpipe.store.lease import acquire, check_free
from rlpipe.store.run import Run, check_committed, fork, open_existing, planned_fork
from rlpipe.store.run_record import ConfigRefused
from rlpipe.types import StoreError, UserError

PRESETS = Path(__file__).parent / "presets"
STOPPED = 3  # the exit code of a run that a budget or a stop rule ended


def echo(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def fail(error: Exception, code: int) -> NoReturn:
    """Says what is wrong and ends with `code`: 2 for the user's fault, 1 for what gave up."""
    typer.echo(f"rlpipe: {error}", err=True)
    raise typer.Exit(code)


class Commands(TyperGroup):
    """What goes wrong in a command is one line, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with terminable():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt as stop:
            goes_on = "; the same command goes on where it was" if ctx.invoked_subcommand in ("run", "fork") else ""
            fail(RuntimeError(f"stopped{goes_on}"), 143 if isinstance(stop, Terminated) else 130)
        except UserError as error:
            fail(error, 2)
        except (RuntimeError, OSError) as error:  # the store, an engine, the trainer or the Prefect server gave up
            fail(error, 1)


def iteration_of(at: str) -> int:
    """The iteration that `--at` names; AT_SFT for sft."""
    if at == "sft":
        return AT_SFT
    if not at.isdecimal():
        raise UserError(f"--at {at}: name an iteration from 0 on, or sft")
    return int(at)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="SFT and RL that lose nothing.",
)

Source = Annotated[str, typer.Argument(metavar="PRESET|FILE", help="a preset's name, or a TOML file")]
Name = Annotated[str | None, typer.Option("--run", help="name of the run")]
Delete = Annotated[bool, typer.Option("--delete", help="delete them; else only list")]
Kind = Annotated[str, typer.Argument(help="prompts, rollouts, scores, batch, policy, state, evaluation, ...")]
At = Annotated[
    str, typer.Option(metavar="K|sft", help="the newest iteration that is shared, or the one that is redone; sft: none is")
]
Redo = Annotated[
    Literal["score", "filter", "train"] | None, typer.Option(help="redo iteration K from this stage on; samples nothing")
]


def _config(source: str, sets: list[str] | None, run: str | None = None) -> PipelineConfig:
    overrides = list(sets or []) + ([f"run={json.dumps(run)}"] if run is not None else [])
    return read_config(source, overrides, PRESETS)


@app.command("run")
def run_command(source: Source, run: Name = None, sets: Sets = None) -> None:
    """Start a pipeline run, or continue the one of that name."""
    set_defaults()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    if run == "":  # of a script whose variable is not set, each night would be a new run
        raise UserError("--run '': the name is empty; leave --run away for a name made of the preset and the time")
    config = _config(source, sets, run)
    if not config.run:
        config = config.model_copy(update={"run": f"{Path(source).stem}-{datetime.now():%Y%m%d-%H%M%S}"})
    _preflight(config)
    _run(config)


def _preflight(config: PipelineConfig, planned: Run | None = None) -> None:
    from rlpipe.stages.preflight import preflight

    try:
        preflight(config, planned)
        check_free(open_store(config.store), f"runs/{config.run}")
    except (StoreError, OSError) as error:
        fail(error, 2)


def _run(config: PipelineConfig) -> None:
    from prefect.settings import PREFECT_API_URL

    from flows.terminal import log_to
    from rlpipe.stages.session import work_dir_of

    logs, configured = work_dir_of(config), PREFECT_API_URL.value()
    log_to(logs)
    with running_server(logs) as url:
        page = f"{url.removesuffix('/api')}{'' if PREFECT_API_URL.value() == configured else ' (until the run ends)'}"
        typer.echo(f"run {config.run}: store {config.store}, logs {logs}, Prefect UI {page}")
        from flows.post_train import post_train

        result = run_flow(post_train(config=config))
    reason = result.get("stopped", "")
    typer.echo(f"\nrun {config.run} " + (f"was stopped: {reason}" if reason else "is complete"))
    echo(result.get("before_after", []))
    if curves := result.get("curves"):
        typer.echo(f"  curves  {curves}\n  policy  {result.get('policy')}")
    echo(["  look at it with", *(f"    {command}" for command in _look_commands(config))])
    if reason:
        raise typer.Exit(STOPPED)


def _look_commands(config: PipelineConfig) -> list[str]:
    """What shows a run, as this user can call it: with the path that `rlpipe` was called by."""
    from rlpipe.report.tracking import tracking_uri

    program = sys.argv[0] if Path(sys.argv[0]).name == "rlpipe" else str(Path(sys.executable).with_name("rlpipe"))
    store = ["--store", config.store] if config.store != STORE else []
    commands = [shlex.join([program, "show", config.run, *store])]
    if uri := without_passwords(tracking_uri(config)):
        mlflow = os.path.join(os.path.dirname(program), "mlflow")
        commands.append(uri if uri.startswith("http") else shlex.join([mlflow, "ui", "--backend-store-uri", uri]))
    return commands


@app.command()
def plan(source: Source, sets: Sets = None) -> None:
    """What would start where: sizes, steps and memory; what was read, and all that is wrong (exit code 2). Starts no run."""
    from rlpipe.stages.preflight import look_at

    config = _config(source, sets)
    echo(plan_lines(config))
    findings = look_at(config)
    echo(findings.lines)
    echo(f"WARNING {warning}" for warning in findings.warnings)
    echo(f"FAULT {fault}" for fault in findings.faults)
    if findings.faults:
        raise typer.Exit(2)


@app.command()
def fields(prefix: Annotated[str, typer.Argument(help="only the fields whose names begin so: rl, rl.clip")] = "") -> None:
    """Every field of the config: what it is, its default and bounds, and whether it may change between two starts."""
    echo(field_lines(prefix))


@app.command()
def runs(store: StoreUrl = STORE) -> None:
    """What is in the store: each run's state, how far it is, its newest reward and when that was committed."""
    echo(run_lines(readable_store(store)))


@app.command()
def show(
    run: str,
    iteration: Annotated[int | None, typer.Option(help="one iteration: its metrics and rollouts")] = None,
    rows: Annotated[int, typer.Option(help="rollouts shown")] = 16,
    store: StoreUrl = STORE,
) -> None:
    """A run's iterations, or the metrics and rollouts of one."""
    shown = open_existing(readable_store(store), run)
    echo(show_lines(shown) if iteration is None else iteration_lines(shown, iteration, rows))


@app.command()
def compare(a: str, b: str, store: StoreUrl = STORE) -> None:
    """Two runs side by side: the settings that differ, their newest metrics, evaluations before and after RL."""
    opened = readable_store(store)
    echo(compare_lines(open_existing(opened, a), open_existing(opened, b)))


@app.command()
def files(run: str, kind: Kind, store: StoreUrl = STORE) -> None:
    """Where every committed file of one kind is, one path or s3:// address a line, in order; for scripts."""
    opened = readable_store(store)
    echo(opened.address(key) for key in audit.files(open_existing(opened, run), kind))


@app.command()
def verify(run: str, store: StoreUrl = STORE) -> None:
    """Re-hash every artifact of a run; exit code 1 on any fault."""
    try:
        count, faults = audit.verify(open_existing(readable_store(store), run))
    except (ConfigRefused, StoreError) as error:  # of its record, without which nothing of it can be found
        count, faults = 0, str(error).splitlines()
    echo(f"FAULT {fault}" for fault in faults)
    typer.echo(f"{run}: {count} artifacts, {len(faults)} faults")
    if faults:
        raise typer.Exit(1)


@app.command("fork")
def fork_command(
    run: str,
    at: At,
    new: Annotated[str, typer.Option("--run", help="name of the new run")],
    redo: Redo = None,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Create a new run that shares iterations 0..K of another, or its SFT only, and continue it with other settings.

    With --redo it shares iterations 0..K-1 and what was sampled in K, computes K again, prints what changed, and ends.
    """
    set_defaults()
    from rlpipe.stages.redo import changes, check_redo

    overrides = [*(sets or []), f"run={json.dumps(new)}", f"store={json.dumps(store)}"]
    if redo and any(entry.replace(" ", "").startswith("rl.num_iterations=") for entry in overrides):
        raise UserError(f"--redo ends with iteration {at}: leave rl.num_iterations away, and go on with rlpipe run after it")
    parent, newest = open_existing(checked_store(store), run), iteration_of(at)
    check_committed(parent, newest, redo or "")
    config = override_config(parent.config, overrides + ([f"rl.num_iterations={newest + 1}"] if redo else []))
    planned = planned_fork(parent, newest, config, redo or "")
    if redo:
        check_redo(parent, newest, config, redo)
    _preflight(config, planned)
    forked = fork(parent, newest, config, redo or "")
    typer.echo(f"run {new} is forked from {forked.forked_from}")
    _run(config)
    if redo:
        echo(changes(forked))


@app.command()
def gc(run: str, delete: Delete = False, store: StoreUrl = STORE) -> None:
    """List (or delete) what no manifest of a run names: files of attempts that died. Not while the run is worked on."""
    swept = open_existing(readable_store(store), run)
    with contextlib.ExitStack() as stack:
        if delete:
            stack.callback(acquire(swept.store, swept.root).release)
        keys = audit.sweep(swept) if delete else audit.unreferenced(swept)
    echo(f"{'deleted' if delete else 'unreferenced'} {key}" for key in keys)
    typer.echo(f"{run}: {len(keys)} files no manifest names" + ("" if delete or not keys else "; delete them with --delete"))


@app.command()
def automations(
    notify: Annotated[str, typer.Option(metavar="TYPE/NAME", help="the notification block that is used")] = "",
) -> None:
    """Create or update what the Prefect server does by itself: find dead flow runs, retry crashed ones, notify."""
    echo(asyncio.run(apply_automations(notify)))


for command in (sql, view, why):
    app.command()(command)
add_service_commands(app)

if __name__ == "__main__":
    app()
