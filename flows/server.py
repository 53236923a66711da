"""A Prefect server for `rlpipe run` where the user has none: on a free port, gone with its parent."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rlpipe.launch import Service, answers, free_port, wrapped

# On SQLite, finished tasks' events make the server answer 503 "database is locked" and the client sleep 2 s;
# batching them took an iteration of one subflow and 7 tasks from 2.1-2.8 s to 0.25-0.35 s.
DEFAULTS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
}


def set_defaults() -> None:
    """Sets what a laptop run wants of Prefect, before Prefect is imported; the user's own environment wins."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def prefect_server(log_dir: Path) -> Iterator[str]:
    """The URL of the API to use: the user's server when one is configured, else one of our own for as long as the body runs."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if configured:
        yield configured
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    service = Service(
        name="Prefect server",
        argv=wrapped([sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]),
        log_path=log_dir / "prefect-server.log",
        ready=lambda: answers(f"{url}/health"),
        environment={"PREFECT_API_URL": url},
    )
    service.start()
    try:
        service.wait_ready()
        with temporary_settings({PREFECT_API_URL: url}):
            yield url
    finally:
        service.stop()
