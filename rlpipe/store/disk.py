"""Files below a folder, written whole or not at all: a temporary file beside, fsync, rename or
link, fsync of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from rlpipe.store.transfer import PIECE_BYTES, write_at

FOLDER_TRIES = 20  # to make a file in a folder that other processes may delete


class Disk:
    """A folder as a flat map of keys to bytes.

    Every error is an OSError; FileNotFoundError for a file that does not exist.
    """

    parts_at_once = 1  # writers of one file wait for each other, and take processor time for it

    def __init__(self, root: Path) -> None:
        self._root = root

    def exists(self, key: str) -> bool:
        try:
            (self._root / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link to itself is a missing file
                raise
            return False
        return True

    def size(self, key: str) -> int:
        return (self._root / key).stat().st_size

    def read(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def read_part(self, key: str, start: int, end: int) -> bytes:
        """The bytes `start` to `end` of a file; fewer when it ends before."""
        with (self._root / key).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        """Writes a part to the same place of an open file.

        Returns the position where it ended, which is before `end` when the file is shorter.
        """
        with (self._root / key).open("rb", buffering=0) as file:
            file.seek(start)
            while start < end and (piece := file.read(min(PIECE_BYTES, end - start))):
                start = write_at(descriptor, piece, start)
        return start

    def put(self, key: str, data: bytes) -> None:
        self.put_parts(key, len(data), lambda: [data])

    def put_parts(self, key: str, size: int, pieces: Callable[[], Iterable[bytes]]) -> None:
        path = self._root / key
        with _temporary(path, pieces()) as temporary:
            os.replace(temporary, path)
        _sync_folder(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        path = self._root / key
        with _temporary(path, [data]) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        _sync_folder(path.parent)
        return True

    def list(self, prefix: str) -> list[str]:
        folders = os.walk(self._root / prefix, onerror=_refuse_unless_gone)
        return [str(Path(folder, name).relative_to(self._root)) for folder, _, names in folders for name in names]

    def folders(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self._root / prefix) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []

    def delete(self, key: str) -> None:
        """Deletes a file, and the folders that it leaves empty except the root: folders exist only
        as parts of keys, as on S3.
        """
        path = self._root / key
        path.unlink()
        # the first that is not empty, or that another deletes at once
        with contextlib.suppress(OSError):
            for folder in path.relative_to(self._root).parents[:-1]:
                (self._root / folder).rmdir()

    def check_writable(self, key: str) -> None:
        """OSError when `key` could not be created.

        Leaves no file, and makes no folder.
        """
        folder = self._root
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(folder))
        # os.access says yes to root on a read-only mount, so try for real
        try:
            (folder / key).touch()
        finally:
            (folder / key).unlink(missing_ok=True)


def link(source: str | Path, target: str | Path) -> None:
    """Links the file `source` to a second name, `target`; copies it on a file system without hard
    links.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _refuse_unless_gone(error: OSError) -> None:
    """Ignores the error of a folder that does not exist; raises any other, as the folder may have
    files.
    """
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextlib.contextmanager
def _temporary(path: Path, pieces: Iterable[bytes]) -> Iterator[Path]:
    """A file beside `path` with these pieces, synced to disk; deleted afterwards, unless it was
    renamed.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with _opened(temporary) as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _opened(path: Path, tries: int = FOLDER_TRIES) -> BinaryIO:
    """Opens a new file and makes its folder; tries again where another process deleted the empty
    folder in between.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except (FileNotFoundError, FileExistsError):
        # also of `mkdir`: there, and gone at the next look
        if tries == 1:
            raise
    return _opened(path, tries - 1)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # another process has deleted the file since
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
