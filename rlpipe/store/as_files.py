"""A store on a server as pyarrow reads files: by ranges, read-only.

File sizes come from the manifests, so no request asks for them.
"""

from __future__ import annotations

import functools
import io
from typing import Any

from fsspec import AbstractFileSystem
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

from rlpipe.store.backend import Store
from rlpipe.store.transfer import RangeFile


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
        return RangeFile(functools.partial(self._store.read_range, path), self.info(path)["size"])
