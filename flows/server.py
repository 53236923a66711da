"""Runs a flow for `rlpipe run`: ends it on a signal or a fault, and starts a Prefect server of its
own where the user has none. Also sets up the automations of unattended nights on the team's server.

Prefect is imported only inside of the functions: the environment that it reads is set before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from flows.database import copy_template, creating, environment_of, keep_template, using
from flows.printing import echo
from flows.stopping import bounding, run_unless_stopped
from rlpipe.base.errors import UserError
from rlpipe.processes.launch import READY_TIMEOUT_S, Service, answers, free_port, wrapped

AUTOMATIONS = Path(__file__).parent / "automations.yaml"
BLOCK = "{notify}"
AGAIN = "Start the run again with the same command: it goes on after the newest committed stage"
SERVER = [sys.executable, "-m", "flows.prefect_server"]
Result = TypeVar("Result")

# finished tasks' events are written in batches: an iteration of one subflow and 7 tasks took
# 2.1-2.8 s without, 0.25-0.35 s with them
DEFAULTS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": (
        "INFO"
    ),  # the lines of iterations are in the UI, and on the terminal once
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
}
# of a server that ends with its run: nobody makes a block or an automation there, and the blocks of
# all installed collections took a second of its start
OWN_DEFAULTS = {
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",  # by which it compares the blocks with the last start's
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
}
# of one with a database of its own, too, where there are no deployments, workers and automations:
# the services that look for them would only take processor time
OWN_DATABASE_DEFAULTS = {
    f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false"
    for service in ("CLEANUP_RECONCILER", "FOREMAN", "LATE_RUNS", "SCHEDULER", "TRIGGERS")
}


def set_defaults() -> None:
    """Sets the Prefect settings of a laptop run, before Prefect is imported; the user's own
    environment wins.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def run_flow(flow: Coroutine[Any, Any, Result]) -> Result:
    """Returns the flow's result; Terminated after SIGTERM, KeyboardInterrupt after SIGINT, once the
    flow has released its run.

    RuntimeError, one line, when Prefect's server refuses a call or does not answer.
    """
    import httpx
    import prefect.utilities.engine as engine
    from prefect.exceptions import ObjectNotFound, PrefectException

    from flows.outage import PrefectAway

    # else it raises wherever the main thread is
    engine._prefect_sigterm_handler = bounding  # pyright: ignore[reportPrivateUsage]

    try:
        return run_unless_stopped(flow)
    except PrefectAway as error:
        raise RuntimeError(f"{error}. {AGAIN}") from error
    except (PrefectException, httpx.HTTPError) as error:
        is_gone = isinstance(error, ObjectNotFound)
        said = (
            "has the flow run no more: it was deleted"
            if is_gone
            else " ".join(f"failed: {type(error).__name__}: {error}".split())
        )
        raise RuntimeError(f"Prefect's server {said}. {AGAIN}") from error


class OwnServer:
    """A Prefect server of this process, on a free port, which ends with it.

    `database`: its database file; None: where the user's settings of Prefect say.
    """

    def __init__(self, log_dir: Path, database: Path | None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api"
        self.database = database
        defaults = OWN_DEFAULTS | (OWN_DATABASE_DEFAULTS if database else {})
        self._service = Service(
            name="Prefect server",
            argv=wrapped([*SERVER, "--host", "127.0.0.1", "--port", str(port)]),
            log_path=log_dir / "prefect-server.log",
            ready=lambda: answers(f"{self.url}/health"),
            environment={
                **{name: os.environ.get(name, value) for name, value in defaults.items()},
                "PREFECT_API_URL": self.url,
                **(environment_of(database) if database else {}),
            },
        )
        self.has_new_database, self.makes_tables = False, False
        self._held = contextlib.ExitStack()  # the lock by which the database is in use
        self._starting: threading.Thread | None = None
        self._fault: RuntimeError | None = None  # of the start

    def start(self, wait_s: float = 0.0) -> None:
        """Starts it, once no other process creates the database; BlockingIOError where one has done
        so for `wait_s`.
        """
        with contextlib.ExitStack() as held, contextlib.ExitStack() as creation:
            if self.database:
                held.enter_context(using(self.database, wait_s))
                creation.enter_context(creating(self.database, wait_s))
                self.has_new_database = not self.database.exists()
                self.makes_tables = self.has_new_database and not copy_template(self.database)
            self._service.start()
            self._held, lock = held.pop_all(), creation.pop_all()
        # other runs of this database wait no longer than until this server answers
        self._starting = threading.Thread(target=self._wait, args=(lock,), daemon=True, name="Prefect server")
        self._starting.start()

    def _wait(self, creation: contextlib.ExitStack) -> None:
        with creation:
            try:
                self._service.wait_ready()
                if self.makes_tables and self.database:
                    keep_template(self.database)  # before anybody knows of the server, and writes a row
            except RuntimeError as error:
                self._fault = error

    def wait_ready(self) -> None:
        """Returns once it answers. RuntimeError when it does not start."""
        assert self._starting is not None, "it was not started"
        self._starting.join()
        if self._fault is None:
            return
        if self.database is None:
            raise self._fault
        raise RuntimeError(
            f"{self._fault}\nIf the database is at fault, move {self.database} away: it has only what Prefect's UI"
            " shows of earlier runs"
        ) from self._fault

    def stop(self) -> None:
        """Stops it; a second call does nothing."""
        with self._held:
            self._service.stop()
        if self._starting is not None:
            self._starting.join()


@contextlib.contextmanager
def running_server(log_dir: Path, database: Path | None, started: OwnServer | None = None) -> Iterator[str]:
    """Yields the URL of the API to use: the user's server when one is configured, else a server of
    this process, `started` already or here, which is stopped afterwards.

    `database`: the database file of a server started here; None: where the user's settings of
    Prefect say.
    """
    from prefect.logging.handlers import APILogHandler
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if configured:
        if started:
            started.stop()
        yield configured
        return
    server = started or OwnServer(log_dir, database)
    try:
        if not started:
            _start_alone(server)
        server.wait_ready()
        with temporary_settings({PREFECT_API_URL: server.url}):
            yield server.url
    finally:
        APILogHandler().flush()  # of this process; later there is no server to send them to
        server.stop()


def _start_alone(server: OwnServer) -> None:
    """Starts it; where another run starts one with the same database, afterwards. RuntimeError when
    that takes too long.
    """
    try:
        server.start()
    except BlockingIOError:
        echo(f"another run is starting Prefect's server with {server.database}: waiting for it", err=True)
        try:
            server.start(READY_TIMEOUT_S)
        except BlockingIOError as error:
            raise RuntimeError(
                f"another process has been starting a server with {server.database} for {READY_TIMEOUT_S:.0f} s:"
                " end it, or name another scratch folder"
            ) from error


async def apply_automations(notify: str) -> list[str]:
    """Creates or updates the automations of `automations.yaml` on the server; returns one line for
    each. A second call creates nothing twice.

    `notify`: the notification block as TYPE/NAME (for example slack-webhook/team); empty leaves out
    the automations that need one. UserError when there is no server, or no such block.
    """
    from prefect.client.orchestration import get_client
    from prefect.events.schemas.automations import AutomationCore
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import PREFECT_API_URL

    import flows.outage  # noqa: F401  # a server that is away is named in one line

    if not PREFECT_API_URL.value():
        raise UserError("PREFECT_API_URL is not set: name the team's server (`prefect config set PREFECT_API_URL=...`)")
    lines = []
    kind, _, name = notify.partition("/")
    async with get_client() as client:
        try:
            block = str((await client.read_block_document_by_name(name, kind)).id) if notify else ""
        except ObjectNotFound as error:
            raise UserError(
                f"--notify {notify}: the server has no such block; create one in the UI (Blocks), and name it as"
                " TYPE/NAME, for example slack-webhook/team"
            ) from error
        for entry in yaml.safe_load(AUTOMATIONS.read_text())["automations"]:
            if any(action.get("block_document_id") == BLOCK for action in entry["actions"]):
                if not block:
                    lines.append(f"left out {entry['name']}: name a notification block with --notify TYPE/NAME")
                    continue
                entry["actions"] = [{**action, "block_document_id": block} for action in entry["actions"]]
            automation = AutomationCore.model_validate(entry)
            if standing := await client.read_automations_by_name(automation.name):
                await client.update_automation(standing[0].id, automation)
            else:
                await client.create_automation(automation)
            lines.append(f"{'updated' if standing else 'created'} {automation.name}")
    return lines
