"""The database of the Prefect server that `rlpipe run` starts: a file in `scratch`, one for each
store and machine. A run goes on without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.store.backend import open_store

VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
FOLDER = "prefect"  # in scratch, beside the folders of runs, which have a digest in their names
PATH_BYTES_MAX = 500  # SQLite takes 512, with what it appends
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
def creating(path: Path, *, waits: bool = True) -> Iterator[None]:
    """Holds a lock on this file while the body starts a server: each server creates, or updates,
    the tables as it starts. `waits`: False for a BlockingIOError where another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(path).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        yield
