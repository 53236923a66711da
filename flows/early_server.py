"""Starts the Prefect server of a run beside its preflight, each of which takes seconds; nothing of
it is left of a run that is refused. Imports no Prefect, whose import would delay the refusal.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

from flows.database import database_of, delete_unused
from flows.server import OwnServer
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.loop.scratch import work_dir_of

NAMING = ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH")  # a server, or a place that may name one
OWN_FILES = ("PREFECT_HOME", "PREFECT_SERVER_DATABASE", "PREFECT_API_DATABASE")  # the user's own database, by prefix
NO_NAMES = {"PREFECT_SERVER_EPHEMERAL_ENABLED", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"}  # of Prefect's first profile


class EarlyServer:
    """The server that a config needs, started; None in `server` where the user may have named one,
    another process makes the same database, or it was taken.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.server: OwnServer | None = None
        self._new: list[Path] = []  # files, then folders, that were not there before
        if _may_be_named():
            return
        logs, has_own = work_dir_of(config), any(name.startswith(OWN_FILES) for name in os.environ)
        server = OwnServer(logs, None if has_own else database_of(config))
        self._new = _absent(logs / "prefect-server.log")
        with contextlib.suppress(OSError):  # another process starts one with this database; no place for it
            server.start()
            self.server = server

    def take(self, database: Path | None) -> OwnServer | None:
        """The server, which is the caller's to stop from now on; None where it has another
        database than this one."""
        if self.server is not None and self.server.database != database:
            self.undo()
        server, self.server = self.server, None
        return server

    @property
    def makes_tables(self) -> bool:
        """True while it makes its database, which takes longer than its start."""
        return self.server is not None and self.server.makes_tables

    def undo(self) -> None:
        """Stops the server, unless it was taken, and deletes what it made and nobody else uses."""
        if self.server is None:
            return
        self.server.stop()
        if self.server.database is not None and self.server.has_new_database:
            delete_unused(self.server.database)
        self.server = None
        for path in self._new:
            with contextlib.suppress(OSError):  # not made, or no longer empty
                path.rmdir() if path.is_dir() else path.unlink()


@contextlib.contextmanager
def server_beside(config: PipelineConfig) -> Iterator[EarlyServer]:
    """Starts the server beside the body, which undoes that by any error before it takes it."""
    early = EarlyServer(config)
    try:
        yield early
    finally:
        early.undo()


def _absent(file: Path) -> list[Path]:
    """The file, then its folders, the deepest first, as far as they are not there."""
    return [path for path in (file, *file.parents) if not os.path.exists(path)]


def _may_be_named() -> bool:
    """True when the user's settings may name a Prefect server; Prefect itself says later if they
    do."""
    if any(os.environ.get(name) for name in NAMING) or Path("prefect.toml").exists():
        return True
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    try:
        texts = [path.read_text() for path in (Path(".env"), Path("pyproject.toml")) if path.exists()]
        profiles = tomllib.loads((home / "profiles.toml").read_text()) if (home / "profiles.toml").exists() else {}
        active = profiles.get("profiles", {}).get(profiles.get("active"), {})
        return bool(active.keys() - NO_NAMES) or any("PREFECT_" in text or "[tool.prefect" in text for text in texts)
    except (OSError, ValueError, AttributeError):
        return True
