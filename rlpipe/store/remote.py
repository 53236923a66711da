"""Reads of objects from a server through obstore (object_store of Rust). Its transfers run in
threads of its own, beside the interpreter.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import obstore
from botocore.exceptions import BotoCoreError, HTTPClientError, MetadataRetrievalError
from botocore.exceptions import ConnectionError as NoConnection
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

from rlpipe.store.patience import PASSING_STATUSES, Answer, Passing
from rlpipe.store.transfer import PART_BYTES, PARTS, PIECE_BYTES, parts_ahead, write_at

if TYPE_CHECKING:
    from obstore.store import S3Store

NO_ANSWER = NoConnection, HTTPClientError, MetadataRetrievalError  # of who has the keys
_NOISE = re.compile(
    r"^Generic S3 error: | in [\d.]+\S*s(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)?(?=\s+-)"
)
_used_by: int | None = None  # the process in which the threads of obstore run


def check_process(address: str) -> None:
    """OSError in a process that was forked after obstore was used: obstore's threads do not exist
    there, and a call would wait for ever.
    """
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise OSError(
            errno.ENOTSUP, "this process was forked from one that used S3; start it by exec or spawn", address
        )
    _used_by = os.getpid()


class RemoteObjects(ABC):
    """Objects that are read in parts.

    Every error is an OSError, FileNotFoundError for an object that does not exist.
    """

    parts_at_once = PARTS

    @abstractmethod
    def _path(self, key: str) -> str:
        """The path of a key below the client's prefix."""

    @abstractmethod
    def _address(self, key: str) -> str:
        """The address of a key for a person."""

    @abstractmethod
    def _reader(self) -> S3Store:
        """The client that reads."""

    def read(self, key: str) -> bytes:
        def ask() -> tuple[int, bytes | None]:
            result = obstore.get(self._reader(), self._path(key))
            size = result.meta["size"]
            return size, bytes(result.bytes()) if size <= PART_BYTES else None

        size, data = self._ask(key, ask)
        return b"".join(parts_ahead(functools.partial(self.read_part, key), 0, size, PARTS)) if data is None else data

    def read_part(self, key: str, start: int, end: int) -> memoryview:
        """The bytes `start` to `end` of an object; fewer when it ends before."""
        try:
            return self._ask(
                key, lambda: memoryview(obstore.get_range(self._reader(), self._path(key), start=start, end=end))
            )
        except OSError as error:
            if " 416 " in str(error.strerror):  # it ends before `start`
                return memoryview(b"")
            raise

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        """Writes a part to the same place of an open file, as it arrives.

        Returns the position where it ended, which is before `end` when the object is shorter.
        """

        def ask() -> int:
            at, result = start, obstore.get(self._reader(), self._path(key), options={"range": (start, end)})
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                at = write_at(descriptor, piece, at)
            return at

        return self._ask(key, ask)

    def _ask(self, key: str, ask: Callable[[], Answer]) -> Answer:
        """Returns the answer of a call of obstore; every call is made here.

        Passing for a fault that another try may not have.
        """
        with self._faults(key):
            return ask()

    @contextlib.contextmanager
    def _faults(self, key: str) -> Iterator[None]:
        """Turns obstore's errors into OSErrors with a short text that names the object."""
        try:
            yield
        except (BaseError, BotoCoreError, FileNotFoundError, ValueError) as error:  # ValueError: no key of S3
            if isinstance(error, OSError) and error.errno:  # it is one of ours
                raise
            raise _as_oserror(error, self._address(key)) from None


def _as_oserror(error: Exception, address: str) -> OSError:
    """The same fault as an OSError.

    Its kind follows from the server's answer; for a listing, obstore gives that in the text only.
    """
    text, _, debug = str(error).partition("\n\nDebug source")
    status = re.search(r"status code: (\d{3})", text)
    causes = re.findall(r'message: "([^"]+)"', debug) or re.findall(r"HttpError {\s+kind: (\w+)", debug)
    reason = " ".join([*_NOISE.sub("", text).split(), *(f"({cause})" for cause in causes[-1:])])
    if "NoSuchBucket" in reason:
        return OSError(errno.EIO, "this bucket does not exist", address)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, reason, address)
    if isinstance(error, AlreadyExistsError):
        return FileExistsError(errno.EEXIST, reason, address)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or " 403 " in reason:
        return PermissionError(errno.EACCES, reason, address)
    passes = isinstance(error, NO_ANSWER) or "HttpError {" in debug or "Server returned error response" in text
    if status is not None:
        # as S3 says 408
        passes = int(status[1]) in PASSING_STATUSES or (int(status[1]) == 400 and "RequestTimeout" in reason)
    return (Passing if passes and "builder error" not in text else OSError)(errno.EIO, reason, address)
