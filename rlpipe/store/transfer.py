"""Transfer of large files through memory: in parts of one size, a few at a time.

A thread hashes the parts meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
Part = bytes | memoryview
Span = tuple[int, int]  # of a file: the first byte of a part, and the end
PART_BYTES = 8 * 1024 * 1024
PARTS = 8  # of one file, that are transferred at the same time
WAITING = 32  # pieces that were sent, and are not hashed yet
# of a part on its way from or to a file: larger ones cost more processor time than they save
PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class FileContent:
    """The size of a file in bytes, and its sha256."""

    bytes: int
    sha256: str


class RangeFile(io.RawIOBase):
    """A file of which any range can be read, `read_range(start, end)`; each `read` is one request.
    pyarrow reads a file from one thread at a time.
    """

    def __init__(self, read_range: Callable[[int, int], Part], size: int) -> None:
        super().__init__()
        self._read_range, self._size, self._at = read_range, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        part = bytes(self._read_range(self._at, end)) if self._at < end else b""
        self._at += len(part)
        return part

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        part = self.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)


class Hashing:
    """The sha256 and the number of the bytes that pass through.

    A thread computes it; at most WAITING pieces wait for it.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread, self._sha256, self._bytes = thread, hashlib.sha256(), 0
        self._pending: deque[Future[None]] = deque()

    def passing(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yields the same pieces and hashes them; a new call starts the hash anew."""
        while self._pending:
            self._pending.popleft().result()
        self._sha256, self._bytes = hashlib.sha256(), 0
        for piece in pieces:
            if len(self._pending) == WAITING:
                self._pending.popleft().result()
            self._bytes += len(piece)
            self._pending.append(self._thread.submit(self._sha256.update, piece))
            yield piece

    def content(self) -> FileContent:
        """The size and the sha256 of all bytes that passed."""
        while self._pending:
            self._pending.popleft().result()
        return FileContent(self._bytes, self._sha256.hexdigest())


@contextlib.contextmanager
def hashing() -> Iterator[Hashing]:
    with ThreadPoolExecutor(1, "hashing") as thread:
        yield Hashing(thread)


def write_at(descriptor: int, data: Part, start: int) -> int:
    """Writes all of `data` at a place of an open file; returns the position of its end."""
    left = memoryview(data)
    while left:
        left = left[os.pwrite(descriptor, left, start + len(data) - len(left)) :]
    return start + len(data)


def pieces_of(file: io.BufferedIOBase) -> Iterator[bytes]:
    """Yields the rest of an open file, in pieces of at most PIECE_BYTES."""
    while piece := file.read(PIECE_BYTES):
        yield piece


def parts_ahead(read_part: Callable[[int, int], Part], start: int, end: int, at_once: int) -> Iterator[Part]:
    """Yields the bytes `start` to `end` in order, as `read_part(start, end)` returns them.

    In memory are the parts that are read `at_once`, and one more.
    """
    assert 0 <= start <= end, f"{start} to {end}"
    spans = [(at, min(at + PART_BYTES, end)) for at in range(start, end, PART_BYTES)]
    if len(spans) <= 1:
        yield from (read_part(*span) for span in spans)
        return
    yield from in_order(lambda span: read_part(*span), spans, min(at_once, len(spans)), at_once)


def in_order(make: Callable[[Item], Made], items: Iterable[Item], threads: int, ahead: int) -> Iterator[Made]:
    """Yields `make(item)` of each item, in the order of the items. Threads compute them, at most
    `ahead` items before the one that is waited for.
    """
    with ThreadPoolExecutor(threads, "reading") as pool:
        waiting: deque[Future[Made]] = deque()
        try:
            for item in items:
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(make, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for made in waiting:  # the reader needs no more of them
                made.cancel()


def fetch_parts(
    size: int, fetch_part: Callable[[int, int], None], at_once: int, order: Sequence[int] = ()
) -> Iterator[Span]:
    """Fetches every part of a file of `size` bytes by `fetch_part(start, end)`, `at_once` at the
    same time; yields them in the order of the file, each when it is there.

    `order`: the starts of the parts in the order in which they are begun; default: that of the
    file.
    """
    starts = range(0, size, PART_BYTES)
    with ThreadPoolExecutor(max(1, min(at_once, len(starts))), "fetching") as threads:
        fetches = {at: threads.submit(fetch_part, at, min(at + PART_BYTES, size)) for at in order or starts}
        try:
            for at in starts:
                fetches[at].result()
                yield at, min(at + PART_BYTES, size)
        finally:
            threads.shutdown(cancel_futures=True)


def content_of(file: io.FileIO, spans: Iterator[Span]) -> FileContent:
    """The content of an open file whose parts arrive in order; hashed meanwhile."""
    digest, size = hashlib.sha256(), 0
    for start, size in spans:
        with mapped_part(file.fileno(), start, size) as part:
            digest.update(part)
    return FileContent(size, digest.hexdigest())


def mapped_part(descriptor: int, start: int, end: int) -> mmap.mmap:
    """A part of an open file, to be hashed without a copy. `start`: of a part.

    Trap: the process dies when the file is cut meanwhile, so only for files of this process.
    """
    return mmap.mmap(descriptor, end - start, prot=mmap.PROT_READ, offset=start)
