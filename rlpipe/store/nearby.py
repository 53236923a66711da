"""An artifact that the store does not have yet, or that is nearer than the store: on the disk of
this node, of the node that wrote it, or of the other nodes that fetch it.

A reader reads the nearest copy, and the store where there is none any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from rlpipe.base.errors import StoreError
from rlpipe.base.references import FileRecord
from rlpipe.records.sending import Sender
from rlpipe.store.artifacts import MANIFEST, Blocks, parse_manifest
from rlpipe.store.backend import Objects, Readable, Store
from rlpipe.store.disk import Disk, link
from rlpipe.store.file_server import FileServer
from rlpipe.store.relay import Relay, order_of_parts, owner_of
from rlpipe.store.transfer import PART_BYTES, FileContent, Part, content_of, mapped_part

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
# of one file: as many threads receive, write and hash; more take turns for one interpreter
PARTS_AT_ONCE = 4


@dataclass(frozen=True)
class NodeDisk:
    """The place where a node has the files that it wrote: its own folder `disk`, and its server.

    A file has the same key as in the store: it is at `disk`/key and at `url`/key. `url` is empty
    without a server.
    """

    disk: str
    url: str


@dataclass(frozen=True)
class Nearby:
    """The places of an artifact's files beside the store.

    `folder`: of the artifact in the store; `manifest`: its document, as it is committed; `places`:
    of the nodes that made the files; `made_on`: the index in `places` of each file, by its name in
    the artifact, and 0 for a file that is not in it; `peers`: the servers of the nodes that fetch
    the files at the same time, in the same order for all; `sender`: trainer processes that have the
    policy in their memory and send it; None when it travels as files alone; `parts`: the sha256 of
    each part of a file, by its name in the artifact, from who took the sha256 in the manifest. A
    file that is not in it is hashed whole.
    """

    folder: str
    manifest: str
    places: list[NodeDisk]
    made_on: dict[str, int] = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)
    sender: Sender | None = None
    parts: dict[str, Blocks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(0 <= place < len(self.places) for place in (0, *self.made_on.values())):
            raise ValueError(f"made_on={self.made_on!r:.200}: {len(self.places)} places are given, numbered from 0")

    @property
    def servers(self) -> list[str]:
        return [url for url in (*(place.url for place in self.places), *self.peers) if url]


def nearer(store: Store, nearby: Nearby | None, keys: Mapping[str, str], relay: Relay | None = None) -> Store:
    """`store`, with one artifact read from nearby as far as it is there.

    `keys`: the bearer keys of its servers, by their URLs; a server without a key is not asked.
    `relay`: passes on what is read.
    """
    if relay is not None:
        relay.clear()
    return NearStore(store, nearby, keys, relay) if nearby else store


class NearStore(Store):
    """A store that reads the files of one artifact from nearby where they are there."""

    def __init__(self, store: Store, nearby: Nearby, keys: Mapping[str, str], relay: Relay | None) -> None:
        self._near = NearObjects(store.objects, nearby, keys, relay.url if relay else "")
        self._relay = relay
        super().__init__(store.url, store.local, cast("Objects", self._near))

    def get_file(self, key: str, target: Path) -> FileContent:
        """Gets a file from the nearest place.

        A file on this node's disk is linked to `target`, unread: the process that wrote it has
        hashed it, and the upload hashes it again before anything made from it is committed. A file
        from the network is hashed: each part when it has arrived, and comes from the next place
        where it is damaged; or, without hashes of its parts, the whole file, and is then read from
        the store.
        """
        record = self._near.records.get(key)
        if record is None:
            return super().get_file(key, target)
        wanted = FileContent(record.bytes, record.sha256)
        if (source := self._near.on_disk(key)) is not None:
            try:
                link(source, target)
            except OSError as error:  # the next save has deleted it meanwhile
                log.warning("%s: %s", source, error)
            else:
                if self._relay is not None:
                    self._relay.has(key, target)
                return wanted
        content = self._get(key, wanted, target)
        if content != wanted and self._near.leave(key, "it is damaged there"):
            content = self._get(key, wanted, target)
        return content

    def _get(self, key: str, wanted: FileContent, target: Path) -> FileContent:
        """Reads a file from the servers, or the store; its parts are passed on as they arrive, and
        where their hashes are known only right ones.
        """
        order, own = self._near.order(wanted.bytes)
        target.unlink(missing_ok=True)  # parts of a damaged file may still be sent to others
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(target.open("w+b", buffering=0))
            arrived = stack.enter_context(self._relay.arriving(key, target, own)) if self._relay else None
            spans = stack.enter_context(contextlib.closing(self._fetched(key, wanted.bytes, file, order, arrived)))
            if key not in self._near.sha256s:
                return content_of(file, spans)
            deque(spans, maxlen=0)  # each part was hashed
            return wanted


class NearObjects:
    """Reads of the files of one artifact; other files are read from the store.

    `own_url`: the URL of this node among the peers. `sha256s`: of the parts of a file by their
    starts, by its key.
    """

    parts_at_once = PARTS_AT_ONCE

    def __init__(self, objects: Objects, nearby: Nearby, keys: Mapping[str, str], own_url: str) -> None:
        self._keys, self._places, self._made_on = keys, nearby.places, nearby.made_on
        self._prefix = f"{nearby.folder}/"
        address, document = f"{nearby.folder}/{MANIFEST}", nearby.manifest.encode()
        self.records = {f"{nearby.folder}/{record.name}": record for record in parse_manifest(address, document).files}
        self._documents = {address: document}
        self.sha256s = {
            key: dict(zip(range(0, record.bytes, PART_BYTES), nearby.parts[record.name].sha256s, strict=True))
            for key, record in self.records.items()
            if record.name in nearby.parts and _fit(nearby.parts[record.name], record)
        }
        self._store = objects
        self._left: set[NodeDisk] = set()  # those that are not asked any more
        self._servers: dict[str, Readable] = {}  # of places and peers that were asked
        self._peers, self._own_url = nearby.peers, own_url
        self._peers_left = set(nearby.peers) - keys.keys()

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
        return self._nearest(
            key, lambda objects: objects.read_part(key, start, end), lambda part: len(part) == end - start
        )

    def order(self, size: int) -> tuple[list[int], list[int]]:
        """The starts of a file's parts in the order in which this node begins them, and the starts
        of those that it gets before other nodes.
        """
        starts, num_nodes = range(0, size, PART_BYTES), len(self._peers)
        if self._own_url not in self._peers:
            return [*starts], []
        place = self._peers.index(self._own_url)
        return order_of_parts(size, place, num_nodes), [
            start for start in starts if owner_of(start, num_nodes) == place
        ]

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        """Copies a part from the node that gets it first, where that is another node, else from the
        nearest copy that is right. StoreError when there is none.
        """

        def is_copied(objects: Readable) -> bool:
            return objects.copy_part(key, start, end, descriptor) == end and self._is_right(key, start, end, descriptor)

        peer = self._peers[owner_of(start, len(self._peers))] if self._peers and key in self.records else self._own_url
        asks = peer != self._own_url and peer not in self._peers_left and self._place(key) not in self._left
        if asks and self.on_disk(key) is None:
            try:
                if is_copied(self._server(peer)):
                    return end
                why = f"{key} is damaged there"
            except OSError as error:
                why = str(error)
            if peer not in self._peers_left:
                log.warning("a node that fetches the same weights passes nothing on: %s", why)
            self._peers_left.add(peer)
        if not self._nearest(key, is_copied, bool):
            raise StoreError(f"{key} is damaged in the store, between the bytes {start} and {end}")
        return end

    def _is_right(self, key: str, start: int, end: int, descriptor: int) -> bool:
        """True when a part that was written has its sha256, or none is known."""
        if key not in self.sha256s:
            return True
        with mapped_part(descriptor, start, end) as part:
            return hashlib.sha256(part).hexdigest() == self.sha256s[key][start]

    def on_disk(self, key: str) -> Path | None:
        """The path of a file on this node's disk, if it is there with its full size."""
        place = self._place(key)
        path = Path(place.disk) / key
        try:
            is_there = place not in self._left and path.is_file() and path.stat().st_size == self.records[key].bytes
        except OSError:
            return None
        return path if is_there else None

    def leave(self, key: str, why: str) -> bool:
        """Reads from here on the files of the node that wrote this one from the store alone; False
        when that was so before.
        """
        place = self._place(key)
        if place in self._left:
            return False
        self._left.add(place)
        log.warning("reading from the store instead of a nearer copy: %s: %s", key, why)
        return True

    def _place(self, key: str) -> NodeDisk:
        return self._places[self._made_on.get(key.removeprefix(self._prefix), 0)]

    def _server(self, url: str) -> Readable:
        return self._servers.get(url) or self._servers.setdefault(url, FileServer(url, self._keys[url]))

    def _nearest(self, key: str, read: Callable[[Readable], Answer], is_whole: Callable[[Answer], bool]) -> Answer:
        """Returns the answer of the nearest place that has the key.

        The places are, in order: this node's disk, the server of the node that wrote the file, the
        store.
        """
        if key not in self.records:
            return read(self._store)
        place = self._place(key)
        if self.on_disk(key) is not None:
            with contextlib.suppress(OSError):  # deleted meanwhile
                if is_whole(answer := read(Disk(Path(place.disk)))):
                    return answer
        if place.url in self._keys and place not in self._left:
            try:
                if is_whole(answer := read(self._server(place.url))):
                    return answer
                self.leave(key, "it is damaged there")
            except OSError as error:
                self.leave(key, str(error))
        return read(self._store)


def _fit(parts: Blocks, record: FileRecord) -> bool:
    """True when there is a hash for every part of a file; parts have another size in other
    versions.
    """
    return parts.size == PART_BYTES and len(parts.sha256s) == len(range(0, record.bytes, PART_BYTES))
