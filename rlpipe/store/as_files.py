"""A store on a server as pyarrow reads files: by ranges, read-only.

File sizes come from the manifests, so no request asks for them.
"""

from __future__ import annotations

import io
from typing import Any

from fsspec import AbstractFileSystem
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

from rlpipe.store.backend import Store


def file_system(store: Store, sizes: dict[str, int]) -> FileSystem:
    """The store as a pyarrow file system, for reading. Paths are those of `path_of`.

    `sizes`: the bytes of each key that will be read.
    """
    return LocalFileSystem() if store.local else PyFileSystem(FSSpecHandler(StoreFiles(store, sizes)))


def path_of(store: Store, key: str) -> str:
    """The path of a key in its `file_system`."""
    return str(store.local / key) if store.local else key


class StoreFiles(AbstractFileSystem):
    """Keys as paths. FileNotFoundError for a key whose size was not given."""

    protocol = "rlpipe-store"
    cachable = False

    def __init__(self, store: Store, sizes: dict[str, int]) -> None:
        super().__init__()
        self._store, self._sizes = store, sizes

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if path not in self._sizes:
            raise FileNotFoundError(path)
        return {"name": path, "size": self._sizes[path], "type": "file"}

    def open(self, path: str, mode: str = "rb", *options: Any, **kwargs: Any) -> Any:
        """Opens a file for reading: a RangeFile."""
        if mode != "rb":
            raise io.UnsupportedOperation(f"{path}: a query reads only")
        return RangeFile(self._store, path, self.info(path)["size"])


class RangeFile(io.RawIOBase):
    """One file of a store; each `read` is one request. pyarrow reads a file from one thread at a
    time.
    """

    def __init__(self, store: Store, key: str, size: int) -> None:
        super().__init__()
        self._store, self._key, self._size, self._at = store, key, size, 0

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
        start, self._at = self._at, max(end, self._at)
        return bytes(self._store.read_range(self._key, start, end)) if start < end else b""
