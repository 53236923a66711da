"""Relay of an artifact between the nodes that fetch it at the same time.

Each node gets its own parts from the node that wrote them, and the rest from the other nodes, so
each cable carries about one copy, however many nodes there are. Nodes never wait in a circle: a
node waits for another one only for parts that the other gets from no peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from rlpipe.store.transfer import PART_BYTES

# for a part that this node is to get first, or for the file; less than the silence that ends a
# request (file_server.py)
WAIT_S = 10.0
POLL_S = 0.05


def owner_of(start: int, num_nodes: int) -> int:
    """The index of the node that gets the part at byte `start` first.

    It is `start // PART_BYTES % num_nodes`.
    """
    return start // PART_BYTES % num_nodes


def order_of_parts(size: int, place: int, num_nodes: int) -> list[int]:
    """The starts of a file's parts in the order in which the node at `place` begins them.

    It begins its own parts one round before the others need them; within a round it asks the next
    node first, so that no two nodes ask the same one.
    """
    starts = range(0, size, PART_BYTES)
    rounds = [starts[first : first + num_nodes] for first in range(0, len(starts), num_nodes)]
    order = [*starts[place : place + 1]]
    for number, parts in enumerate(rounds):
        following = number * num_nodes + num_nodes + place
        order += starts[following : following + 1]
        others = ((place + step) % num_nodes for step in range(1, num_nodes))
        order += [parts[other] for other in others if other < len(parts)]
    return order


@dataclass(frozen=True)
class RelayedFile:
    """A file on this disk, and its parts by their start: those that are there, and those that this
    node gets first.
    """

    path: Path
    parts: dict[int, Future[None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arrived(self, start: int) -> None:
        with self.lock:
            part = self.parts.setdefault(start, Future())
            if not part.done():
                part.set_result(None)


class Relay:
    """The files of the newest artifact that this node fetches, for the other nodes.

    `folder`: holds a second link of each file, which stays when the first is removed; `url`: the
    server of this node for them.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self._folder = folder
        self._files: dict[str, RelayedFile] = {}
        self._failed: set[str] = set()

    def clear(self) -> None:
        """Stops passing on all files."""
        for key in [*self._files]:
            self._drop(key)
        self._failed.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def has(self, key: str, path: Path) -> None:
        """Adds a complete file."""
        file = self._named(key, path)
        for start in range(0, path.stat().st_size, PART_BYTES):
            file.arrived(start)
        self._files[key] = file

    @contextlib.contextmanager
    def arriving(self, key: str, path: Path, own: list[int]) -> Iterator[Callable[[int], None]]:
        """Adds a file that arrives part by part within the body, which gets a function to call with
        the start of each part. Not passed on when the body fails.

        `own`: the starts of the parts for which other nodes may wait.
        """
        file = self._named(key, path)
        file.parts.update({start: Future() for start in own})
        self._files[key] = file
        with contextlib.ExitStack() as undo:
            undo.callback(self._drop, key)
            yield file.arrived
            undo.pop_all()

    async def part(self, key: str, start: int) -> Path | None:
        """The file with the part at `start`; None where it is not on this node and will not be
        soon.
        """
        deadline = time.monotonic() + WAIT_S
        while (file := self._files.get(key)) is None:
            if key in self._failed or time.monotonic() > deadline:
                return None
            await asyncio.sleep(POLL_S)
        part = file.parts.get(start)
        if part is None:  # it comes from another node
            return None
        if not part.done():
            await asyncio.wait({asyncio.wrap_future(part)}, timeout=max(0.0, deadline - time.monotonic()))
        return file.path if part.done() and not part.cancelled() else None

    def _named(self, key: str, path: Path) -> RelayedFile:
        named = self._folder / key
        named.parent.mkdir(parents=True, exist_ok=True)
        named.unlink(missing_ok=True)
        try:
            os.link(path, named)
        except OSError:
            # without hard links the file is here for as long as it has its first name
            named = path
        return RelayedFile(named)

    def _drop(self, key: str) -> None:
        self._failed.add(key)
        file = self._files.pop(key)
        with file.lock:
            for part in file.parts.values():
                part.cancel()
