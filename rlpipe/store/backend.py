"""The store: one URL (`file://` or `s3://`) as a flat map of keys to bytes, read, overwritten,
created exclusively.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import is_key
from rlpipe.base.values import expanded
from rlpipe.store.cache import NO_CACHE, Cache
from rlpipe.store.disk import Disk
from rlpipe.store.transfer import (
    PART_BYTES,
    FileContent,
    Part,
    Span,
    content_of,
    fetch_parts,
    hashing,
    parts_ahead,
    pieces_of,
)


class Readable(Protocol):
    """A place from which files are read by their keys: a store, or another node.

    Every error is an OSError; FileNotFoundError for a key that does not exist.
    """

    def read(self, key: str) -> bytes: ...
    def read_part(self, key: str, start: int, end: int) -> Part: ...
    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int: ...


class Objects(Readable, Protocol):
    """The operations of one kind of store. Listings are in any order."""

    @property
    def parts_at_once(self) -> int: ...
    def exists(self, key: str) -> bool: ...
    def size(self, key: str) -> int: ...
    def put(self, key: str, data: bytes) -> None: ...
    def put_parts(self, key: str, size: int, pieces: Callable[[], Iterable[bytes]]) -> None: ...
    def create(self, key: str, data: bytes) -> bool: ...
    def list(self, prefix: str) -> list[str]: ...
    def folders(self, prefix: str) -> list[str]: ...
    def delete(self, key: str) -> None: ...
    def check_writable(self, key: str) -> None: ...


@dataclass(eq=False)
class Store:
    """One URL as a flat map of keys to bytes, which are kept in `objects`.

    Writes are atomic. `create` never overwrites: the first writer of a key wins. `local`: the
    folder of the store; None for one on S3. `cache`: of this node, for the files of artifacts that
    it read or wrote (rlpipe/store/artifacts.py asks it); a store on a disk needs none.
    """

    url: str
    local: Path | None
    objects: Objects
    cache: Cache = NO_CACHE

    def address(self, key: str) -> str:
        """The path or s3:// URL of `key` for a person.

        UserError when `key` is not a valid key: some come from other processes.
        """
        _check(key)
        return str(self.local / key) if self.local else f"{self.url}/{key}"

    def exists(self, key: str) -> bool:
        return self.objects.exists(_check(key))

    def read(self, key: str) -> bytes:
        """The bytes of a file; StoreError naming it when it is missing."""
        with self._missing(key):
            return self.objects.read(_check(key))

    def size(self, key: str) -> int:
        """Bytes of a file; StoreError naming it when it is missing."""
        with self._missing(key):
            return self.objects.size(_check(key))

    def parts(self, key: str, start: int, end: int) -> Iterator[Part]:
        """The bytes `start` to `end` of a file in order, with the next parts read ahead; StoreError
        naming it when it is missing or shorter.
        """
        _check(key)

        def whole(first: int, last: int) -> Part:
            part = self.objects.read_part(key, first, last)
            if len(part) != last - first:
                raise StoreError(f"{self.address(key)} is torn: it ends before byte {last}")
            return part

        with self._missing(key):
            yield from parts_ahead(whole, start, end, self.objects.parts_at_once)

    def read_range(self, key: str, start: int, end: int) -> memoryview:
        """The bytes `start` to `end` of a file; StoreError naming it
        when it is missing or shorter."""
        parts = self.parts(key, start, end)
        first = next(parts, b"")
        if len(first) == end - start:
            return memoryview(first)
        data, at = memoryview(bytearray(end - start)), 0
        for part in itertools.chain([first], parts):
            data[at : at + len(part)] = part
            at += len(part)
        assert at == end - start, f"{key}: {at} bytes of {end - start}"
        return data

    def put(self, key: str, data: bytes) -> None:
        """Overwrites `key` atomically."""
        self.objects.put(_check(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Creates `key` exclusively: True when this call did, False when it existed.

        `data` must not be empty.
        """
        assert data, f"{key}: an empty file says nothing of who created it"
        return self.objects.create(_check(key), data)

    def put_file(self, key: str, source: Path) -> FileContent:
        """Uploads a local file, atomic like `put`.

        The size and sha256 returned are those of the bytes that were sent, hashed meanwhile.
        """
        with source.open("rb") as file, hashing() as passed:
            size = source.stat().st_size

            def pieces() -> Iterator[bytes]:
                file.seek(0)
                return passed.passing(pieces_of(file))

            if size <= PART_BYTES:
                self.objects.put(_check(key), b"".join(pieces()))
            else:
                self.objects.put_parts(_check(key), size, pieces)
            return passed.content()

    def get_file(self, key: str, target: Path) -> FileContent:
        """Downloads `key` to `target`; returns size and sha256 of what it wrote, hashed meanwhile.

        Not atomic: callers compare the hash and rename.
        """
        size = self.size(key)
        with (
            target.open("w+b", buffering=0) as file,
            contextlib.closing(self._fetched(key, size, file)) as spans,
        ):
            return content_of(file, spans)

    def _fetched(
        self,
        key: str,
        size: int,
        file: io.FileIO,
        order: Sequence[int] = (),
        arrived: Callable[[int], None] | None = None,
    ) -> Generator[Span, None, None]:
        """Downloads `key`, of `size` bytes, into an open file; yields its parts as they arrive, in
        order.

        `order`: the starts of the parts in the order in which they are begun; `arrived` is called
        with the start of each part that was written.
        """

        def fetch_part(start: int, end: int) -> None:
            if self.objects.copy_part(key, start, end, file.fileno()) != end:
                raise StoreError(f"{self.address(key)} is torn: it ends before byte {end}")
            if arrived is not None:
                arrived(start)

        file.truncate(size)
        with self._missing(key):
            yield from fetch_parts(size, fetch_part, self.objects.parts_at_once, order)

    def list(self, prefix: str) -> list[str]:
        """All keys below the folder `prefix`, sorted; empty when there is none."""
        return sorted(key for key in self.objects.list(_check(prefix)) if key.startswith(f"{prefix}/"))

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly below `prefix`, sorted."""
        return sorted(self.objects.folders(_check(prefix)))

    def delete(self, key: str) -> None:
        self.objects.delete(_check(key))

    @contextlib.contextmanager
    def _missing(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StoreError(f"{self.address(key)} is missing from the store") from error


def _check(key: str) -> str:
    """UserError for an invalid key: some come from other processes."""
    if not is_key(key):
        raise UserError(f"{key!r:.200} is no key of the store: it would lead out of it")
    return key


def _bucket(url: str) -> Objects:
    from rlpipe.store.s3 import Bucket  # imported only for a store on S3: it takes 0.3 s

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if prefix and not is_key(prefix):
        raise UserError(f"store={url!r}: names no place; use s3://bucket/prefix")
    return Bucket(bucket, prefix)


def open_store(url: str, cache: Path | None = None) -> Store:
    """The store at `url`; makes no request to it. UserError when `url` names no place. `cache`: the
    folder of this node for what it reads on S3.
    """
    scheme, separator, rest = url.partition("://")
    if "\0" in url or (separator and not rest):
        raise UserError(f"store={url!r}: names no place; use file:///path or s3://bucket/prefix")
    if scheme == "file" and separator and not rest.startswith("/"):
        raise UserError(
            f"store={url!r}: {rest.split('/')[0]!r} would be another host; write file:///path, or just the path"
        )
    if scheme == "s3" and set(rest) & set("?#"):
        raise UserError(f"store={url!r}: '?' and '#' have a meaning of their own in an s3:// URL; leave them out")
    if not separator or scheme == "file":
        local = expanded(rest if separator else url).resolve()
        return Store(f"file://{local}", local, Disk(local))
    if scheme == "s3":
        return Store(url.rstrip("/"), None, _bucket(url.rstrip("/")), Cache(cache))
    raise UserError(f"store={url!r}: unknown scheme {scheme!r}; use file:///path or s3://bucket/prefix")


def check_readable(store: Store) -> None:
    """UserError with the way out when the store cannot be reached or listed.

    It may be mounted read-only.
    """
    try:
        store.folders("runs")
    except OSError as error:
        raise _no_access(store, "read", error) from error


def check_access(store: Store) -> None:
    """UserError with the way out when the store cannot be reached, listed or written; writes
    nothing that stays.
    """
    try:
        store.objects.check_writable(f".rlpipe-probe-{uuid.uuid4().hex[:8]}")
    except OSError as error:
        raise _no_access(store, "written", error) from error


def _no_access(store: Store, what: str, error: Exception) -> UserError:
    cause = (
        "path and its permissions"
        if store.local
        else "bucket, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )
    return UserError(f"store={store.url}: cannot be {what} ({error}); check the {cause}")
