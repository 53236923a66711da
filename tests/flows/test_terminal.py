"""The terminal shows a line for what is logged; the log folder has it whole.

SIGTERM ends what runs in it with a line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.utilities.engine import capture_sigterm
from typer.testing import CliRunner

from flows import cli, stopping
from flows.printing import echo, echo_above, fail
from flows.server import run_flow
from flows.stopping import Terminated, terminable
from flows.terminal import LOG_NAME, bar, log_to
from flows.ui import printable_exception
from rlpipe.base.errors import EngineError, StoreError, TrainerError, UserError
from rlpipe.base.printable import printable
from tests.deadlines import DEADLINE_S, SHORT_S
from tests.docs_blocks import ROOT


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    root, prefects = logging.getLogger(), [logging.getLogger(f"prefect.{name}") for name in ("flow_runs", "task_runs")]
    before, level, to_the_server = root.handlers[:], root.level, [logger.handlers for logger in prefects]
    root.handlers = []  # pytest's own would be closed
    for logger in prefects:
        logger.handlers = []
    yield
    for logger, kept in zip(prefects, to_the_server, strict=True):
        logger.handlers = kept
    for handler in root.handlers:
        handler.close()
    root.handlers = before
    root.setLevel(level)


def test_tracebacks_are_in_the_log_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_to(tmp_path / "logs")
    try:
        raise RuntimeError("x is gone")
    except RuntimeError as error:
        logging.getLogger("prefect.task_runs").exception(
            "Task run failed with exception: %r. Retry 1/2 will start", error
        )
        logging.getLogger("prefect.flow_runs").exception("Encountered exception during execution: %r", error)
    logging.getLogger("prefect.flow_runs").error("Finished in state Failed()")
    logging.getLogger("rlpipe.x").warning("an engine is slow")
    assert capsys.readouterr().err.splitlines() == [
        "ERROR Task run failed with exception: RuntimeError('x is gone'). Retry 1/2 will start",
        "WARNING an engine is slow"
    ]  # fmt: skip
    log = (tmp_path / "logs" / LOG_NAME).read_text()
    assert log.count("Traceback") == 2 and "Finished in state" in log and "an engine is slow" in log


EVIL = "a\x1b[2J\x1b]0;x\x07\x9b1m\r\u202eb\ud800\x00"
SAFE = r"a\x1b[2J\x1b]0;x\x07\x9b1m\r\u202eb\ud800\x00"


def test_what_others_wrote_moves_no_cursor_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a log and its tracebacks, in lines of a command, in errors, in the
    state of a flow run that failed."""
    log_to(tmp_path / "logs")
    for kind in (UserError, StoreError, EngineError, TrainerError):
        assert str(kind(EVIL)) == SAFE
    assert printable("tab\tline\nfeed é 漢 🙂") == "tab\tline\nfeed é 漢 🙂"
    assert SAFE in printable_exception(ValueError(EVIL)) and EVIL not in printable_exception(KeyError(EVIL))
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("anybody").exception("it said %s", EVIL)
    logging.getLogger("anybody").warning("100 %", EVIL)  # which logging itself complains about
    echo(EVIL, err=True)
    with pytest.raises(typer.Exit):
        fail(OSError(EVIL), 1)
    with bar("RL", 1, 0, "iteration"):
        echo_above(EVIL)
    shown = capsys.readouterr()
    assert (
        f"ERROR it said {SAFE}" in shown.err and f"\n{SAFE}\nrlpipe: {SAFE}\n" in shown.err and shown.out == f"{SAFE}\n"
    )
    log = (tmp_path / "logs" / LOG_NAME).read_text()
    assert f"it said {SAFE}" in log and f"ValueError: {SAFE}" in log
    assert [each for each in (*shown, log) if printable(each) != each] == []


def test_text_goes_to_a_terminal_in_one_place() -> None:
    """Of the flows and commands; what the library prints are lines of its own."""
    prints = re.compile(r"\bprint\(|\becho\(.*typer|typer\.(echo|secho)\(|click\.|std(out|err)\.write\(|\bwrite\(line")
    found = [f"{path.name}: {line.strip()}" for folder in ("flows", "tasks") for path in (ROOT / folder).glob("*.py")
             for line in path.read_text().splitlines() if path.name != "printing.py"
             and prints.search(line)]  # fmt: skip
    assert found == []


def test_nothing_logged_makes_no_file(tmp_path: Path) -> None:
    log_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process goes on after its signal."""
    monkeypatch.setattr(stopping, "bound_end", lambda number: None)


@pytest.mark.usefixtures("unbound")
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.02, 0.05, 0.1])
def test_sigterm_ends_a_flow_wherever_it_comes_and_what_it_held_is_given_back(delay_s: float) -> None:
    """Prefect's own handler would raise in whatever the loop does just then: asyncio goes on after
    one that raises in a callback."""
    given_back: list[bool] = []

    async def flow() -> None:
        loop, ends_s = asyncio.get_running_loop(), time.monotonic() + DEADLINE_S
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()

        def busy() -> None:  # nearly all of the time is spent in callbacks
            sum(range(20_000))
            if time.monotonic() < ends_s and not given_back:
                loop.call_soon(busy)

        try:
            with capture_sigterm():
                loop.call_soon(busy)
                await asyncio.sleep(DEADLINE_S)
        finally:
            await asyncio.sleep(0.01)
            given_back.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        run_flow(flow())
    assert given_back and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ObjectNotFound(OSError("404")), "has the flow run no more: it was deleted"),
        (PrefectException("no such\nblock"), "failed: PrefectException: no such block"),
        (httpx.ConnectError("all connection attempts failed"), "failed: ConnectError: all connection attempts failed"),
    ],
)
def test_what_the_prefect_server_fails_is_one_line_that_says_to_start_again(error: Exception, said: str) -> None:
    async def flow() -> None:
        raise error

    with pytest.raises(RuntimeError) as told:
        run_flow(flow())
    assert str(told.value).startswith(
        f"Prefect's server {said}. Start the run again with the same command"
    ) and "\n" not in str(told.value)


@pytest.mark.usefixtures("unbound")
def test_sigterm_ends_a_command_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "runs_report", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    ended = CliRunner().invoke(cli.app, ["runs"])
    assert (ended.exit_code, ended.output) == (143, "rlpipe: stopped\n")


HANGS = """
import asyncio, os, signal, sys, threading, time
from flows import cli, stopping
from flows.server import run_flow
from prefect.utilities.engine import capture_sigterm

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell, which lets all ignore it
stopping.END_S = ENDS
def waits():
    while True:  # for an answer that does not come
        time.sleep(0.1)

async def flow():
    try:
        with capture_sigterm():
            print("begun", flush=True)
            await asyncio.sleep(60)
    finally:
        print("ends", flush=True)
        await asyncio.sleep(0.5)  # what a second signal would cut short
        print("gave back", flush=True)
        await asyncio.to_thread(waits)

async def stands():
    with capture_sigterm():
        print("begun", flush=True)
        waits()

cli.runs_report = lambda _: run_flow(FLOW())
sys.argv = ["rlpipe", "runs"]
cli.app()
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGTERM", "SIGTERM"], ["SIGINT", "SIGTERM"]])
def test_a_signal_ends_a_command_that_nobody_answers_and_only_the_first_is_heard(
    signals: list[str], tmp_path: Path
) -> None:
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    command = [sys.executable, "-c", HANGS.replace("FLOW", "flow").replace("ENDS", str(SHORT_S))]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for name, said in zip(signals, ["begun", "ends"], strict=False):
            assert process.stdout.readline() == f"{said}\n"
            process.send_signal(signal.Signals[name])
        rest = process.stdout.read()
    assert process.returncode == 128 + signal.Signals[signals[0]]
    said = (
        f"rlpipe: stopped after waiting {SHORT_S:g} s for calls that were not answered. Nothing committed is lost:"
        " start the run again with the same command"
    )
    assert rest.removeprefix("ends\n") == f"gave back\n{said}\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_command_whose_event_loop_stands_still(name: str, tmp_path: Path) -> None:
    """Only the loop heard it, and whoever pressed Ctrl-C could do nothing but kill."""
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    command = [sys.executable, "-c", HANGS.replace("FLOW", "stands").replace("ENDS", str(SHORT_S))]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            process.send_signal(signal.Signals[name])
            said, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.Signals[name] and said.startswith(
        f"rlpipe: stopped after waiting {SHORT_S:g} s"
    )
