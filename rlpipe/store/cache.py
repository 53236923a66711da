"""The cache of a node: files that its processes read from the store, or wrote to it, by their
sha256.

Its entries are data files and manifests that a reference names by sha256: these never change, so no
entry is out of date. A reader hashes what it finds; a torn or damaged entry is deleted, and the
store is read. A fault of this disk costs a read of the store, and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rlpipe.base.hashing import SHA256
from rlpipe.store.disk import link

log = logging.getLogger(__name__)
FOLDER = "cache"  # in the folder of a run, or of a service, on this machine
BYTES_MAX = 4 * 2**30
FILES_MAX = 1_000  # so that a look at all of them takes some milliseconds
# a file above 1 / SHARE_MAX of the bytes stays out, as it would displace most others, and all
# entries together have at most 1 / SHARE_MAX of what the disk has left: others need it
SHARE_MAX = 4
LOOKS = 32  # a process looks at all of them once in 1 / LOOKS of the bounds


class CachedFile(NamedTuple):
    """A file in the folder of a cache, by the time of its last use."""

    used_ns: int
    bytes: int
    path: Path


class Cache:
    """Files in a folder that the processes of a node share. Without a folder it stays empty.

    An entry appears by a rename, whole. When there are more than the bounds allow, or when they
    have more than their share of what the disk has left, those that were used longest ago are
    deleted; files that a killed process left behind are among them.
    """

    def __init__(self, folder: Path | None, bytes_max: int = BYTES_MAX, files_max: int = FILES_MAX) -> None:
        self._folder, self._bytes_max, self._files_max = folder, bytes_max, files_max
        self._new_files, self._new_bytes = files_max, 0  # since the last look; the first add looks

    def read(self, sha256: str) -> bytes | None:
        """The bytes that have this sha256; None where they are not here."""
        if (path := self._path(sha256)) is None:
            return None
        try:
            os.utime(path)
            data = path.read_bytes()
        except OSError:
            return None
        return data if self._is_whole(path, hashlib.sha256(data).hexdigest()) else None

    def link(self, sha256: str, target: Path) -> bool:
        """Makes `target`, a new file, a second name of an entry; False where it is not here."""
        if (path := self._path(sha256)) is None:
            return False
        try:
            os.utime(path)
            link(path, target)
            with target.open("rb") as file:
                is_whole = self._is_whole(path, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError:
            is_whole = False
        if not is_whole:
            target.unlink(missing_ok=True)
        return is_whole

    def add(self, sha256: str, data: bytes) -> None:
        """Adds bytes that have this sha256."""
        self._add(sha256, len(data), lambda temporary: temporary.write_bytes(data))

    def add_file(self, sha256: str, source: Path) -> None:
        """Adds a local file that has this sha256, and that nobody changes any more."""
        self._add(sha256, source.stat().st_size, lambda temporary: link(source, temporary))

    def _path(self, sha256: str) -> Path | None:
        """The place of an entry; None without a folder, or where a document names no sha256."""
        return self._folder / sha256 if self._folder and SHA256.fullmatch(sha256) else None

    def _is_whole(self, path: Path, actual: str) -> bool:
        if path.name == actual:
            return True
        log.warning("%s is damaged: it is deleted, and read from the store again", path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return False

    def _add(self, sha256: str, size: int, write: Callable[[Path], object]) -> None:
        path = self._path(sha256)
        if path is None or size > self._bytes_max // SHARE_MAX:
            return
        temporary = path.with_name(f"{sha256}.{uuid.uuid4().hex[:8]}.tmp")
        with contextlib.suppress(OSError):  # a full disk
            path.parent.mkdir(parents=True, exist_ok=True)
            if size <= shutil.disk_usage(path.parent).free // SHARE_MAX:
                write(temporary)
                os.replace(temporary, path)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            self._look(path.parent, size)

    def _look(self, folder: Path, size: int) -> None:
        """Makes room, once so much was added that it may be needed."""
        self._new_files, self._new_bytes = self._new_files + 1, self._new_bytes + size
        if self._new_files * LOOKS >= self._files_max or self._new_bytes * LOOKS >= self._bytes_max:
            self._new_files, self._new_bytes = 0, 0
            self._make_room(folder)

    def _make_room(self, folder: Path) -> None:
        entries = sorted(_entries(folder))
        count, used, free = len(entries), sum(entry.bytes for entry in entries), shutil.disk_usage(folder).free
        for entry in entries:
            if count <= self._files_max and used <= min(self._bytes_max, free // SHARE_MAX):
                return
            with contextlib.suppress(OSError):  # another process has deleted it, or it cannot be
                entry.path.unlink()
                count, used, free = count - 1, used - entry.bytes, free + entry.bytes


NO_CACHE = Cache(None)


def _entries(folder: Path) -> Iterator[CachedFile]:
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                status = file.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield CachedFile(status.st_mtime_ns, status.st_size, Path(file.path))
