"""An artifact that the store does not have yet, or that is nearer than the store: on this node's disk, or on that of the node which made it.

Who reads it reads the nearest copy, and the store where there is none any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from rlpipe.store.artifacts import MANIFEST, parse_manifest
from rlpipe.store.backend import Objects, Store
from rlpipe.store.disk import Disk, link
from rlpipe.store.transfer import FileContent, Part

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Nearby:
    """Where the files of an artifact are beside the store.

    `folder`: of the artifact in the store; `manifest`: its document, as it is committed; `disk`: a folder of the node that made the files,
    which has them under their keys of the store; `url`: of a server with the same files at `url`/key, empty without one.
    """

    folder: str
    manifest: str
    disk: str
    url: str


def nearer(store: Store, nearby: Nearby | None, key: str = "") -> Store:
    """`store`, which reads one artifact from nearby, as far as it is there. `key`: the bearer key of the server."""
    return NearStore(store, nearby, key) if nearby else store


class NearStore(Store):
    """A store of which one artifact's files are read from nearby where they are there."""

    def __init__(self, store: Store, nearby: Nearby, key: str) -> None:
        self.local, self.url = store.local, store.url
        self._near = NearObjects(store.objects, nearby, key)
        self.objects = cast("Objects", self._near)

    def get_file(self, key: str, target: Path) -> FileContent:
        """A file of this node's disk gets `target` as another name, unread: the process that wrote it has hashed it, and the upload does again
        before anything that is made of it is committed. What comes over the network is hashed, and comes from the store where it is damaged.
        """
        record = self._near.records.get(key)
        if record is None:
            return super().get_file(key, target)
        wanted = FileContent(record.bytes, record.sha256)
        if (source := self._near.on_disk(key)) is not None:
            try:
                link(source, target)
                return wanted
            except OSError as error:  # the next save has deleted it meanwhile
                log.warning("%s: %s", source, error)
        content = super().get_file(key, target)
        if content != wanted and self._near.leave(f"{key} is damaged there"):
            content = super().get_file(key, target)
        return content


class NearObjects:
    """Reads of the files of one artifact; all else is the store's own."""

    def __init__(self, objects: Objects, nearby: Nearby, key: str) -> None:
        self._disk = Path(nearby.disk)
        address, document = f"{nearby.folder}/{MANIFEST}", nearby.manifest.encode()
        self.records = {f"{nearby.folder}/{record.name}": record for record in parse_manifest(address, document).files}
        self._documents = {address: document}
        self._store, self._node = objects, cast("Objects", Disk(self._disk))
        self._server: Objects | None = file_server(nearby.url, key) if nearby.url else None
        self._left = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def exists(self, key: str) -> bool:
        return key in self._documents or key in self.records or self._store.exists(key)

    def size(self, key: str) -> int:
        if key in self._documents:
            return len(self._documents[key])
        return self.records[key].bytes if key in self.records else self._store.size(key)

    def read(self, key: str) -> bytes:
        if key in self._documents:
            return self._documents[key]

        def is_whole(data: bytes) -> bool:
            return hashlib.sha256(data).hexdigest() == self.records[key].sha256

        return self._nearest(key, lambda objects: objects.read(key), is_whole)

    def read_part(self, key: str, start: int, end: int) -> Part:
        return self._nearest(key, lambda objects: objects.read_part(key, start, end), lambda part: len(part) == end - start)

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        return self._nearest(key, lambda objects: objects.copy_part(key, start, end, descriptor), lambda last: last == end)

    def on_disk(self, key: str) -> Path | None:
        """A file of this node's disk, if it is there whole."""
        path = self._disk / key
        try:
            is_there = not self._left and path.is_file() and path.stat().st_size == self.records[key].bytes
        except OSError:
            return None
        return path if is_there else None

    def leave(self, why: str) -> bool:
        """From here on the store is read alone; False when it was before."""
        if not self._left:
            log.warning("the store is read, not what is nearer: %s", why)
        was_left, self._left = self._left, True
        return not was_left

    def _nearest(self, key: str, read: Callable[[Objects], Answer], is_whole: Callable[[Answer], bool]) -> Answer:
        """What this node's disk answers, else the server, else the store."""
        if key in self.records and self.on_disk(key) is not None:
            with contextlib.suppress(OSError):  # deleted meanwhile
                if is_whole(answer := read(self._node)):
                    return answer
        if key in self.records and self._server is not None and not self._left:
            try:
                if is_whole(answer := read(self._server)):
                    return answer
                self.leave(f"{key} is not whole there")
            except OSError as error:
                self.leave(str(error))
        return read(self._store)


def file_server(url: str, key: str) -> Objects:
    """The files of another node."""
    from rlpipe.store.remote import FileServer  # obstore takes 0.3 s to import

    return cast("Objects", FileServer(url, key))
