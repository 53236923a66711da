"""The database of the Prefect server that `rlpipe run` starts: a file in `scratch`, one for each
store and machine. A run goes on without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import IO
from urllib.parse import quote

from rlpipe.base.errors import UserError
from rlpipe.base.values import expanded
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.store.backend import open_store

VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
FOLDER = "prefect"  # in scratch, beside the folders of runs, which have a digest in their names
PATH_BYTES_MAX = 500  # SQLite takes 512, with what it appends
POLL_S = 0.1  # of a lock
SQLITE = b"SQLite format 3\0"


def own_database(config: PipelineConfig) -> Path | None:
    """The file for the runs of the config's store; None where the user's settings of Prefect name a
    server, a database or a PREFECT_HOME.

    The machine is in its name: where nodes share a scratch folder, SQLite would not survive two of
    them that write one file.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    named = settings.server.database.model_fields_set & {"connection_url", "driver"}
    if settings.api.url or named or "home" in settings.model_fields_set:
        return None
    return database_of(config)


def database_of(config: PipelineConfig) -> Path:
    """The file for the runs of the config's store, where nothing else is named; UserError for a
    path that is too long."""
    digest = hashlib.sha256(open_store(config.store).url.encode()).hexdigest()[:8]
    path = config.scratch_folder / FOLDER / f"{socket.gethostname()}-{digest}.db"
    if len(str(path).encode()) > PATH_BYTES_MAX:
        raise UserError(
            f"scratch={config.scratch!r}: too long a path for a database of SQLite ({PATH_BYTES_MAX} bytes); name a"
            " shorter one"
        )
    return path


def existing_database(path: Path) -> Path:
    """The absolute path; UserError where it is not a database of SQLite."""
    try:
        with path.open("rb") as file:
            is_one = file.read(len(SQLITE)) == SQLITE
    except OSError as error:
        raise UserError(
            f"--database {path}: cannot be read ({error.strerror}); the last lines of `rlpipe run` name it"
        ) from error
    if not is_one:
        raise UserError(f"--database {path}: no database of SQLite; the last lines of `rlpipe run` name it")
    return path.absolute()


def environment_of(path: Path) -> dict[str, str]:
    """The environment variables by which a Prefect server uses this file.

    Quoted, as a path may have a question mark in it.
    """
    return {VARIABLE: f"sqlite+aiosqlite:///file:{quote(str(path))}?uri=true"}


def files_of(path: Path) -> list[Path]:
    """The files of a database: its own, what SQLite keeps beside it, and that of `creating`."""
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")), _lock_of(path)]


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


@contextlib.contextmanager
def creating(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Holds a lock on this file while the body starts a server: each server creates, or updates,
    the tables as it starts. BlockingIOError where another process holds it for longer than
    `wait_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(path).open("w") as lock:
        _lock(lock, fcntl.LOCK_EX, wait_s)
        yield


@contextlib.contextmanager
def using(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Keeps the databases of this folder from being deleted within the body; BlockingIOError where
    another process has been deleting one for `wait_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path.parent) as folder:
        _lock(folder, fcntl.LOCK_SH, wait_s)
        yield


def template() -> Path:
    """The file that new databases of this user are copied from: Prefect's tables, without rows.
    Each version of Prefect has its own.
    """
    return expanded(f"~/.cache/rlpipe/prefect-{version('prefect')}.db")


def copy_template(path: Path) -> bool:
    """Makes a new database by a copy of the template. False where that is not there, or not whole:
    the server makes the tables itself then, which is half of its start.
    """
    part = path.with_suffix(".part")
    try:
        shutil.copyfile(template(), part)
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(part))}?immutable=1", uri=True)) as copy:
            if copy.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError(f"{template()} is damaged")
            copy.execute("SELECT version_num FROM alembic_version").fetchone()
        part.rename(path)
    except OSError:
        return False
    except sqlite3.Error:
        template().unlink(missing_ok=True)
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def keep_template(path: Path) -> None:
    """Keeps a copy of a database that has no rows yet as the template, unless there is one; does
    nothing where there is no place for it.
    """
    kept = template()
    part = kept.with_suffix(f".{secrets.token_hex(4)}.part")
    with contextlib.suppress(OSError, sqlite3.Error):
        if kept.exists():
            return
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(path)) as made, contextlib.closing(sqlite3.connect(part)) as copy:
                made.backup(copy)
            part.rename(kept)
        finally:
            part.unlink(missing_ok=True)


def delete_unused(path: Path) -> None:
    """Deletes a database, and its folder where that is empty then, unless another server of this
    folder runs.
    """
    with contextlib.suppress(OSError), _opened(path.parent) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for file in files_of(path):
            file.unlink(missing_ok=True)
        path.parent.rmdir()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(file: IO[str] | int, kind: int, wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)
        except OSError:
            return None  # a file system without locks
