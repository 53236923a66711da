"""Commands of extras: `rlpipe view`, `sql`, `compare`, `why`, `gate`, `serve` and `chat`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import typer

from flows.blocks import read_secrets
from flows.cli_services import STORE, Sets, StoreUrl, readable_store
from flows.printing import AsJson, Report, echo, echo_all, echo_part, echo_report
from flows.stopping import run_unless_stopped
from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.extras import COMMANDS, ENGINES, opened
from rlpipe.config.source import override_config
from rlpipe.store.backend import Store
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run

NO = 4  # the exit code of `why` where no cause was found, and of `gate` where a rule does not hold
Host = Annotated[str, typer.Option(help="address it listens at; beyond loopback RLPIPE_VIEW_KEY must be set")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="its port; 0: a free one")]
Query = Annotated[
    str, typer.Argument(metavar="QUERY", help="one SELECT, in DuckDB's SQL; `describe rollouts` lists the columns")
]
Runs = Annotated[
    list[str] | None, typer.Option("--run", metavar="NAME", help="only this run; may be given several times")
]
Format = Literal["table", "csv", "json"]
AtIteration = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="the iteration from which something is different; by default the one at which most changed"
    ),
]
Prove = Annotated[bool, typer.Option("--prove", help="run the fork that shows the reward without the first suspect")]
Second = Annotated[
    str | None,
    typer.Option(
        metavar="REWARD",
        help="score the stored rollouts with this reward too, and show from where the two rewards differ",
    ),
]
Version = Annotated[
    int | None, typer.Option(metavar="K", help="weight version, by default the newest; -1 is the model before SFT")
]
Engine = Annotated[
    str | None, typer.Option(metavar="KIND", help=f"kind of engine: {', '.join(ENGINES)}; by default that of the run")
]
ServeHost = Annotated[str, typer.Option(help="address it listens at; beyond loopback RLPIPE_SERVE_KEY must be set")]
Serve = Callable[[Run, int | None, str, int, Callable[..., None]], Coroutine[Any, Any, None]]
Talk = Callable[[list[tuple[Run, int | None]], float, int | None, Callable[..., None]], Coroutine[Any, Any, None]]


def view(store: StoreUrl = STORE, host: Host = "127.0.0.1", port: Port = 8450) -> None:
    """Look at a store in a browser: runs, groups, rollouts token by token, evaluations. It only
    reads, also while runs write."""
    serve: Callable[[Store, str, int, Callable[..., None]], None] = opened(COMMANDS["view"], "view")
    serve(readable_store(store), host, port, echo)


def sql(
    query: Query,
    run: Runs = None,
    kind: Annotated[Format, typer.Option("--format", help="json: an object a line")] = "table",
    rows: Annotated[int, typer.Option(min=1, help="rows of a table that are shown")] = 100,
    store: StoreUrl = STORE,
) -> None:
    """Ask the runs of a store in SQL. Views: runs, iterations, prompts, rollouts, scores,
    evaluations, evaluation_rollouts, artifacts."""
    answer: Callable[[Store, str, list[str], Format, int, Callable[..., None]], list[str]]
    answer = opened(COMMANDS["sql"], "sql")
    faults = answer(readable_store(store), query, run or [], kind, rows, echo)
    for fault in faults:
        echo(f"FAULT {fault}", err=True)
    if faults:
        raise StoreError(
            f"the answer lacks what is damaged: {len(faults)} faults; rlpipe verify RUN lists the damaged files,"
            " and --run asks other runs only"
        )


def compare(a: str, b: str, as_json: AsJson = False, store: StoreUrl = STORE) -> None:
    """Two runs side by side: the settings that differ, their newest metrics,
    evaluations before and after RL."""
    side_by_side: Callable[[Run, Run], Report] = opened(COMMANDS["compare"], "compare")
    stored = readable_store(store)
    echo_report(side_by_side(open_existing(stored, a), open_existing(stored, b)), as_json=as_json)


def why(
    run: str,
    at: AtIteration = None,
    prove: Prove = False,
    second: Second = None,
    as_json: AsJson = False,
    store: StoreUrl = STORE,
) -> None:
    """Rank the changes around an iteration by how much of the reward's change they explain.

    Exit code 4 when no cause is found.
    """
    if prove and as_json:
        raise UserError("--prove --json: a fork prints as it runs; leave out --prove, and run the report's own command")
    stored, show = open_existing(readable_store(store), run), partial(echo_report, as_json=as_json)
    if second is not None:
        if prove or at is not None:
            raise UserError("--second compares two rewards over the whole run: leave out --at and --prove")
        read_secrets(stored.config)
        rescore: Callable[[Run, str, Callable[[Report], None]], bool] = opened(COMMANDS["why --second"], "why")
        is_named = rescore(stored, second, show)
    else:
        explain: Callable[..., bool] = opened(COMMANDS["why"], "why")
        is_named = explain(stored, at, _run_rlpipe if prove else None, show, echo_all)
    if not is_named:
        raise typer.Exit(NO)


def gate(
    run: str,
    version: Annotated[int | None, typer.Option(metavar="K", help="weight version, by default the newest")] = None,
    against: Annotated[str, typer.Option(help="base, run:NAME, run:NAME@K or champion; by default as configured")] = "",
    as_json: AsJson = False,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Compare a policy with another on the same held-out prompts, by the rules of its run.

    --set evaluation.gate_... gives other rules. Exit code 4 when one does not hold.
    """
    stored = open_existing(readable_store(store), run)
    report = opened(COMMANDS["gate"], "gate")(stored, version, against, sets or [])
    echo_report(report, as_json=as_json)
    if not report.passed:
        raise typer.Exit(NO)


def serve(
    run: str,
    version: Version = None,
    engine: Engine = None,
    host: ServeHost = "127.0.0.1",
    port: Port = 8400,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Serve a policy of a run over OpenAI's API, until stopped: chat, completions, streaming,
    logprobs, tools. The run may go on meanwhile."""
    serve_policy: Serve = opened(COMMANDS["serve"], "serve")
    run_unless_stopped(serve_policy(_to_serve(store, run, engine, sets), version, host, port, echo))


def chat(
    run: str,
    version: Version = None,
    against: Annotated[
        str | None, typer.Option(metavar="RUN[@K]", help="a second policy that answers each line, too")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the likeliest token each time")] = 0.0,
    tokens_max: Annotated[
        int | None, typer.Option(min=1, help="tokens of a reply; by default all that the context has room for")
    ] = None,
    engine: Engine = None,
    sets: Sets = None,
    store: StoreUrl = STORE,
) -> None:
    """Talk to a policy of a run, line by line, or to two at once; lines may be piped in."""
    parties = [(_to_serve(store, run, engine, sets), version)]
    if against is not None:
        name, _, number = against.partition("@")
        if number and not number.removeprefix("-").isdecimal():
            raise UserError(f"--against {against}: after the @ is a weight version, a number")
        parties.append((_to_serve(store, name, engine, sets), int(number) if number else None))
    talk: Talk = opened(COMMANDS["chat"], "chat")
    run_unless_stopped(talk(parties, temperature, tokens_max, echo_part))


def _to_serve(store: str, name: str, engine: str | None, sets: list[str] | None) -> Run:
    """A stored run with other settings of engines."""
    if others := [entry for entry in sets or [] if not entry.startswith("engines.")]:
        raise UserError(f"--set {others[0]}: only engines.* may be set here; the policy has the other settings")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    run = open_existing(readable_store(store), name)
    kind = [f"engines.kind={json.dumps(engine)}"] if engine else []
    return replace(run, config=override_config(run.config, [*(sets or []), *kind, f"store={json.dumps(store)}"]))


def _run_rlpipe(arguments: list[str]) -> int:
    """The exit code of `rlpipe`, as a process of its own."""
    return subprocess.run([sys.executable, "-m", "flows.cli", *arguments], check=False).returncode
