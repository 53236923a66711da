"""An artifact that the store does not have yet, or that is nearer than the store: on this node's disk, or on that of the node which made it.

Who reads it reads the nearest copy, and the store where there is none any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from rlpipe.store.artifacts import MANIFEST
from rlpipe.store.backend import Objects, Store
from rlpipe.store.disk import Disk, link
from rlpipe.store.documents import parse_document
from rlpipe.store.transfer import FileContent, Part
from rlpipe.types import Manifest

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
        """A file of this node's disk gets `target` as another name: the process that wrote it has hashed it."""
        record, source = self._near.records.get(key), self._near.disk / key
        if record is None or not source.is_file() or source.stat().st_size != record.bytes:
            return super().get_file(key, target)
        link(source, target)
        return FileContent(record.bytes, record.sha256)


class NearObjects:
    """Reads of the files of one artifact; all else is the store's own."""

    def __init__(self, objects: Objects, nearby: Nearby, key: str) -> None:
        self.disk = Path(nearby.disk)
        address, document = f"{nearby.folder}/{MANIFEST}", nearby.manifest.encode()
        manifest = parse_document(address, document, Manifest)
        self.records = {f"{nearby.folder}/{record.name}": record for record in manifest.files}
        self._documents = {address: document}
        self._store, self._node = objects, Disk(self.disk)
        self._server: Objects | None = file_server(nearby.url, key) if nearby.url else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def exists(self, key: str) -> bool:
        return key in self._documents or key in self.records or self._store.exists(key)

    def size(self, key: str) -> int:
        if key in self._documents:
            return len(self._documents[key])
        return self.records[key].bytes if key in self.records else self._store.size(key)

    def read(self, key: str) -> bytes:
        return self._documents[key] if key in self._documents else self._nearest(key, lambda objects: objects.read(key))

    def read_part(self, key: str, start: int, end: int) -> Part:
        return self._nearest(key, lambda objects: objects.read_part(key, start, end))

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        return self._nearest(key, lambda objects: objects.copy_part(key, start, end, descriptor))

    def _nearest(self, key: str, read: Callable[[Objects], Answer]) -> Answer:
        """What this node's disk answers, else the server, else the store."""
        if key in self.records and (self.disk / key).is_file():
            return read(self._node)
        if key in self.records and self._server is not None:
            try:
                return read(self._server)
            except OSError as error:
                log.warning("the store is read instead: %s", error)
                self._server = None
        return read(self._store)


def file_server(url: str, key: str) -> Objects:
    """The files of another node."""
    from rlpipe.store.remote import FileServer  # obstore takes 0.3 s to import

    return cast("Objects", FileServer(url, key))
