"""A PREFECT_HOME whose database is made already: the processes of pytest-xdist make
the tables once, and copy them."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tests.deadlines import DEADLINE_S, PIPELINE_S

PREFECT = Path(sys.executable).parent / "prefect"
DATABASE = "prefect.db"
# the folder that the databases to copy are in (conftest.py); none: each home makes its own
shared: list[Path] = []


def new_home(home: Path) -> None:
    """Gives a PREFECT_HOME without a database one with Prefect's tables, which a server's first
    start would take half its time to make."""
    _copy("tables", home, _make_tables)


def new_deployed_home(home: Path, deploy: Callable[[Path], None]) -> bool:
    """The same with all that `deploy` leaves in the database of a home that it is given, the first
    time. False: there is nothing to copy."""
    return _copy("deployed", home, deploy)


def _make_tables(home: Path) -> None:
    environment = {**os.environ, "PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"}
    told = subprocess.run([PREFECT, "server", "database", "upgrade", "-y"],
                          env=environment, capture_output=True, text=True,
                          timeout=DEADLINE_S)  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr


def _copy(name: str, home: Path, make: Callable[[Path], None]) -> bool:
    if not shared:
        return False
    if (home / DATABASE).exists():
        return True
    made = shared[0] / f"{name}.db"
    with FileLock(f"{made}.lock", timeout=PIPELINE_S):
        if not made.exists():
            first = shared[0] / name / "home"
            shutil.rmtree(first, ignore_errors=True)  # of one that failed
            first.mkdir(parents=True)
            make(first)
            _whole(first / DATABASE, made)
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, home / DATABASE)
    return True


def _whole(database: Path, to: Path) -> None:
    """A database with its journal, as one file."""
    part = to.with_suffix(".part")
    part.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(database)) as source, contextlib.closing(sqlite3.connect(part)) as copy:
        source.backup(copy)
    part.rename(to)
