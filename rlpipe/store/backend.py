"""Objects under one fsspec URL (`file://` or `s3://`): read, overwrite, create exclusively. fsspec is imported only here."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from rlpipe.types import StoreError, UserError, is_key

PART_BYTES = 16 * 1024 * 1024
PARTS = 8  # of one range, that are read at the same time


class Store:
    """One URL as a flat map of keys to bytes.

    Local writes are atomic (temporary file in the same folder, fsync, rename or link, fsync of the folder);
    S3 writes are atomic by nature. `create` never clobbers: the first writer of a key wins.
    """

    def __init__(self, url: str) -> None:
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
            self.local: Path | None = Path(rest if separator else url).expanduser().resolve()
            self.url = f"file://{self.local}"
            self.filesystem: Any = fsspec.filesystem("file")
        elif scheme == "s3":
            self.local = None
            self.url = url.rstrip("/")
            # listings are cached by default: a listing must show what another process committed a moment ago
            self.filesystem = _ErrorsAsOSError(fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True))
        else:
            raise UserError(f"store={url!r}: unknown scheme {scheme!r}; use file:///path or s3://bucket/prefix")

    def address(self, key: str) -> str:
        """Where a person finds `key`: a path, or an s3:// URL. UserError for what is no key: some come from other processes."""
        if not is_key(key):
            raise UserError(f"{key!r:.200} is no key of the store: it would lead out of it")
        return str(self.local / key) if self.local else f"{self.url}/{key}"

    def exists(self, key: str) -> bool:
        return bool(self.filesystem.exists(self.address(key)))

    def read(self, key: str) -> bytes:
        """StoreError naming the file when it is missing."""
        try:
            return self.filesystem.cat_file(self.address(key))
        except FileNotFoundError as error:
            raise StoreError(f"{self.address(key)} is missing from the store") from error

    def size(self, key: str) -> int:
        """Bytes of a file; StoreError naming it when it is missing."""
        try:
            return int(self.filesystem.size(self.address(key)))
        except FileNotFoundError as error:
            raise StoreError(f"{self.address(key)} is missing from the store") from error

    def read_range(self, key: str, start: int, end: int) -> bytearray:
        """The bytes `start` to `end` of a file; StoreError naming it when it is missing or shorter."""
        path, data = self.address(key), bytearray(end - start)
        for first in range(start, end, PARTS * PART_BYTES):
            starts = list(range(first, min(first + PARTS * PART_BYTES, end), PART_BYTES))
            ends = [min(at + PART_BYTES, end) for at in starts]
            try:
                parts = self.filesystem.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
            except FileNotFoundError as error:
                raise StoreError(f"{path} is missing from the store") from error
            for at, stop, part in zip(starts, ends, parts, strict=True):
                if len(part) != stop - at:
                    raise StoreError(f"{path} is torn: it ends before byte {stop}")
                data[at - start : stop - start] = part
        return data

    def put(self, key: str, data: bytes) -> None:
        """Overwrites `key` atomically."""
        if self.local is None:
            self.filesystem.pipe_file(self.address(key), data)
        else:
            self._replace(key, io.BytesIO(data))

    def _replace(self, key: str, source: BinaryIO) -> None:
        path = Path(self.address(key))
        with _temporary(path, source) as temporary:
            os.replace(temporary, path)
        _sync_folder(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        """Creates `key` exclusively: True when this call did, False when it was there. The bytes are never empty."""
        assert data, "an empty exclusive S3 write overwrites (an s3fs trap)"
        if self.local is None:
            return self._create_s3(key, data)
        path = Path(self.address(key))
        with _temporary(path, io.BytesIO(data)) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        _sync_folder(path.parent)
        return True

    def _create_s3(self, key: str, data: bytes) -> bool:
        try:
            self.filesystem.pipe_file(self.address(key), data, mode="create")
        except OSError as error:
            # s3fs reports a lost If-None-Match race as a plain EINVAL whose cause names the precondition
            lost = isinstance(error, FileExistsError) or "PreconditionFailed" in f"{error.__cause__!r} {error}"
            if not lost:
                raise
            # a retried PUT whose first answer was lost loses against itself: equal bytes are ours
            return self.read(key) == data
        return True

    def put_file(self, key: str, source: Path) -> None:
        """Uploads a local file; atomic like `put`."""
        if self.local is None:
            self.filesystem.put_file(str(source), self.address(key), chunksize=PART_BYTES, max_concurrency=4)
            return
        with source.open("rb") as file:
            self._replace(key, file)

    def get_file(self, key: str, target: Path) -> None:
        """Downloads `key` to `target` (not atomic: callers verify the hash and rename)."""
        try:
            self.filesystem.get_file(self.address(key), str(target))
        except FileNotFoundError as error:
            raise StoreError(f"{self.address(key)} is missing from the store") from error

    def list(self, prefix: str) -> list[str]:
        """All keys below the folder `prefix`, sorted; empty when there is none."""
        base = str(self.local) if self.local else self.url.removeprefix("s3://")
        paths = self.filesystem.find(self.address(prefix))
        keys = (path.removeprefix("s3://").removeprefix(base).lstrip("/") for path in paths)
        return sorted(key for key in keys if key.startswith(f"{prefix}/"))  # an emptied folder is a key of its own in SeaweedFS

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly below `prefix`, sorted."""
        try:
            entries = self.filesystem.ls(self.address(prefix), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory")

    def delete(self, key: str) -> None:
        self.filesystem.rm_file(self.address(key))


class _ErrorsAsOSError:
    """A file system whose connection and credential errors are OSErrors: botocore's are not, and s3fs passes them on."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._filesystem, name)

        def call(*arguments: Any, **options: Any) -> Any:
            from botocore.exceptions import BotoCoreError

            try:
                return method(*arguments, **options)
            except BotoCoreError as error:
                raise OSError(errno.EIO, str(error)) from error

        return call


@contextlib.contextmanager
def _temporary(path: Path, source: BinaryIO) -> Iterator[Path]:
    """A file beside `path` with what `source` holds, on disk; it is gone afterwards, unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with temporary.open("wb") as file:
            shutil.copyfileobj(source, file, PART_BYTES)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_store(url: str) -> Store:
    """The store at `url`, without touching it."""
    return Store(url)


def check_readable(store: Store) -> None:
    """UserError with the way out when the store cannot be reached or listed. It may be mounted read-only."""
    try:
        store.folders("runs")
    except OSError as error:
        raise _no_access(store, "read", error) from error


def check_access(store: Store) -> None:
    """UserError with the way out when the store cannot be reached, listed or written; writes nothing that stays."""
    probe = f".rlpipe-probe-{uuid.uuid4().hex[:8]}"
    try:
        if store.local:
            _check_folder(store.local, probe)
        else:
            store.put(probe, b"probe")
            store.delete(probe)
    except (OSError, StoreError) as error:
        raise _no_access(store, "written", error) from error


def _no_access(store: Store, what: str, error: Exception) -> UserError:
    cause = "path and its permissions" if store.local else "bucket, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return UserError(f"store={store.url}: cannot be {what} ({error}); check the {cause}")


def _check_folder(folder: Path, probe: str) -> None:
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(folder))
    # os.access says yes to root on a read-only mount, so try for real
    try:
        (folder / probe).touch()
    finally:
        (folder / probe).unlink(missing_ok=True)
