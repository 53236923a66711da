"""Postgres from Debian's packages, without a password: it listens on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlpipe.processes.launch import free_port
from tests.compose_world import POSTGRES
from tests.deadlines import until
from tests.pipeline import kill_group

INSTALLED = (POSTGRES / "initdb").exists()
AS_POSTGRES = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of an empty database, as Prefect's server wants it."""
    folder, port = (
        Path(tempfile.mkdtemp(prefix="rlpipe-postgres-")),
        free_port(),
    )  # pytest's folders are closed to the user postgres
    shutil.chown(folder, "postgres", "postgres")
    data, log_path = folder / "data", folder / "postgres.log"
    create = [*AS_POSTGRES, str(POSTGRES / "initdb"), "-D", str(data), "-U", "prefect", "--auth=trust"]
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    subprocess.run(create, check=True, capture_output=True, cwd="/", env=environment)
    serve = [*AS_POSTGRES, str(POSTGRES / "postgres"), "-D", str(data), "-p", str(port),
             "-c", f"unix_socket_directories={folder}", "-c", "listen_addresses=127.0.0.1"]  # fmt: skip
    with log_path.open("w") as log:
        process = subprocess.Popen(
            serve, stdout=log, stderr=log, cwd="/", env=environment, start_new_session=True, text=True
        )
    try:
        ready = [str(POSTGRES / "pg_isready"), "-h", "127.0.0.1", "-p", str(port)]
        is_ready = lambda: subprocess.run(ready, capture_output=True).returncode == 0  # noqa: E731
        until(is_ready, lambda: log_path.read_text()[-3000:], running=process, look_s=0.2)
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    finally:
        kill_group(process)
        shutil.rmtree(folder, ignore_errors=True)
