"""The `rlpipe` command: the outermost layer.

Prefect is imported only by the commands that run a flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flows.blocks import read_secrets
from flows.cli_extras import chat, compare, gate, serve, sql, view, why
from flows.cli_search import search_command
from flows.cli_services import STORE, Sets, StoreUrl, add_service_commands, readable_store
from flows.cli_start import Source, config_of, fork_command, resume_command, run_command
from flows.printing import AsJson, echo, echo_all, echo_report, fail, first_text
from flows.server import apply_automations
from flows.stopping import Terminated, terminable
from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.extras import COMMANDS, opened
from rlpipe.config.fields import field_lines
from rlpipe.report.show import iteration_report, iterations_report, runs_report
from rlpipe.store import audit
from rlpipe.store.lease import acquire, write_off
from rlpipe.store.opening import open_existing
from rlpipe.store.patience import hurrying
from rlpipe.store.run_record import ConfigRefused


def help_of(command: Callable[..., Any]) -> str:
    """Its docstring, one line a paragraph: Typer shows the ends of lines in a list of commands."""
    return "\n\n".join(" ".join(lines.split()) for lines in (inspect.getdoc(command) or "").split("\n\n"))


class Commands(TyperGroup):
    """Prints an error of a command as one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with terminable():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt as stop:
            goes_on = (
                "; the same command goes on where it was"
                if ctx.invoked_subcommand in ("run", "resume", "fork", "search")
                else ""
            )
            fail(RuntimeError(f"stopped{goes_on}"), 143 if isinstance(stop, Terminated) else 130)
        except UserError as error:
            fail(error, 2)
        except ModuleNotFoundError as error:  # of an installation from parts (docs/gpu.md)
            name = (error.name or "").partition(".")[0]
            if not name or name in ("rlpipe", "flows", "tasks"):
                raise
            fail(UserError(f"this needs the package {name.replace('_', '-')}, which is not installed here"), 2)
        except (RuntimeError, OSError) as error:
            # the store, an engine, the trainer or the Prefect server gave up
            fail(error, 1)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="SFT and RL that lose nothing.",
)
for name, command in (
    ("run", run_command),
    ("resume", resume_command),
    ("fork", fork_command),
    ("search", search_command),
):
    app.command(name)(command)

Delete = Annotated[bool, typer.Option("--delete", help="delete these files; by default they are only listed")]
Lost = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="with --delete: say that the process that held lease N has ended, and none of its child processes runs",
    ),
]
Kind = Annotated[str, typer.Argument(help="prompts, rollouts, scores, batch, policy, state, evaluation, ...")]


@app.command()
def plan(source: Source, sets: Sets = None, as_json: AsJson = False) -> None:
    """Show what would start where, and all that is wrong (exit code 2). Starts no run.

    It prints sizes, steps and memory, and what was read.
    """
    config, planned = config_of(source, sets), opened(COMMANDS["plan"], "plan")
    echo("reading its data, trying its rewards and its model (large data sets take minutes)", err=True)
    read_secrets(config)
    report = planned(config)
    echo_report(report, as_json=as_json)
    if report.faults:
        raise typer.Exit(2)


@app.command()
def fields(
    prefix: Annotated[str, typer.Argument(help="only the fields whose names begin so: rl, rl.clip")] = "",
) -> None:
    """Every field of the config: what it is, its default and bounds, and whether it
    may change between two starts."""
    echo_all(field_lines(prefix))


@app.command()
def runs(as_json: AsJson = False, store: StoreUrl = STORE) -> None:
    """List the runs of a store: state, progress, newest reward and when that was committed."""
    echo_report(runs_report(readable_store(store)), as_json=as_json)


@app.command()
def show(
    run: str,
    iteration: Annotated[int | None, typer.Option(help="one iteration: its metrics and rollouts")] = None,
    rows: Annotated[int, typer.Option(help="rollouts shown")] = 16,
    as_json: AsJson = False,
    store: StoreUrl = STORE,
) -> None:
    """A run's iterations, or the metrics and rollouts of one."""
    shown = open_existing(readable_store(store), run)
    report = iterations_report(shown) if iteration is None else iteration_report(shown, iteration, rows)
    echo_report(report, as_json=as_json)


@app.command()
def files(run: str, kind: Kind, store: StoreUrl = STORE) -> None:
    """Print the path or s3:// address of every committed file of one kind, for scripts.

    One a line, in order.
    """
    opened = readable_store(store)
    echo_all(opened.address(key) for key in audit.files(open_existing(opened, run), kind))


@dataclass(frozen=True)
class VerifyReport:
    """The number of a run's artifacts, and what is wrong with them."""

    run: str
    artifacts: int
    faults: list[str]

    def lines(self) -> list[str]:
        """A line for each fault, then the counts."""
        counts = f"{self.run}: {self.artifacts} artifacts, {len(self.faults)} faults"
        return [*(f"FAULT {fault}" for fault in self.faults), counts]


@app.command()
def verify(run: str, as_json: AsJson = False, store: StoreUrl = STORE) -> None:
    """Re-hash every artifact of a run; exit code 1 on any fault."""
    try:
        count, faults = audit.verify(open_existing(readable_store(store), run))
    except (ConfigRefused, StoreError) as error:
        # of its record, without which nothing of it can be found
        count, faults = 0, str(error).splitlines()
    echo_report(VerifyReport(run, count, faults), as_json=as_json)
    if faults:
        raise typer.Exit(1)


@app.command()
def gc(run: str, delete: Delete = False, lost: Lost = None, store: StoreUrl = STORE) -> None:
    """List (or delete) the files of a run that no manifest names and none can name later: those of
    attempts that died. With --delete no process may work on the run."""
    swept = open_existing(readable_store(store), run)
    with contextlib.ExitStack() as stack:
        if delete:
            held = acquire(swept.store, swept.root)
            stack.callback(held.release)
            swept = replace(swept, lease=held)
            if lost is not None:
                write_off(swept.store, swept.root, lost)
        keys = audit.sweep(swept) if delete else audit.unreferenced(swept)
        stay = audit.spared_lines(swept)
    echo_all(f"{'deleted' if delete else 'unreferenced'} {key}" for key in keys)
    echo(f"{run}: {len(keys)} files no manifest names" + ("" if delete or not keys else "; delete them with --delete"))
    echo_all(stay)


@app.command()
def automations(
    notify: Annotated[str, typer.Option(metavar="TYPE/NAME", help="the notification block that is used")] = "",
) -> None:
    """Create or update what the Prefect server does by itself: find dead flow
    runs, retry crashed ones, notify."""
    import httpx

    from flows.outage import PrefectAway

    try:
        with hurrying():
            lines = asyncio.run(apply_automations(notify))
    except (httpx.HTTPError, httpx.InvalidURL, PrefectAway, OSError, OverflowError, ExceptionGroup) as error:
        raise UserError(
            f"PREFECT_API_URL: no Prefect server answers there ({first_text(error)}); start it, or name another"
        ) from error
    echo_all(lines)


for command in (compare, sql, view, why, gate, serve, chat):
    app.command()(command)
add_service_commands(app)
for registered in app.registered_commands:
    if registered.callback and not registered.help:
        registered.help = help_of(registered.callback)

if __name__ == "__main__":
    app()
