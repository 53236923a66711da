"""Files of another node, over HTTP. The bytes go through one small buffer a thread from the socket
to the disk: with a client that hands over objects of its own a part costs 1.5 times the processor
time, which hosts need for its hash.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote, urlsplit

from rlpipe.store.transfer import write_at

CONNECT_S, SILENCE_S = 3.0, 20.0
REQUEST_S = 300.0  # for one file, or part of one
TRIES = 2  # a server may close a connection that was idle
BUFFER_BYTES = 1 << 20
BEYOND = {HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE}
PART_STATUSES = {HTTPStatus.PARTIAL_CONTENT, *BEYOND}
Answer = TypeVar("Answer")


class FileServer:
    """Files of another node at `url`/key, by its bearer key, for any number of threads.

    A node that is gone is noticed within seconds. Every error is an OSError; FileNotFoundError for
    a file that is not there.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._idle: list[http.client.HTTPConnection] = []  # connections that no thread uses
        self._threads = threading.local()  # the buffer of each thread

    def __del__(self) -> None:
        for connection in self._idle:
            connection.close()

    def read(self, key: str) -> bytes:
        """The bytes of a file."""
        return self._ask(key, {}, _body)

    def read_part(self, key: str, start: int, end: int) -> bytes:
        """The bytes `start` to `end` of a file; fewer when it ends before."""
        return self._ask(key, _range(start, end), _body)

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        """Writes a part to the same place of an open file, as it arrives.

        Returns the position where it ended, which is before `end` when the file is shorter.
        """
        buffer, deadline = self._buffer(), time.monotonic() + REQUEST_S

        def receive(answer: http.client.HTTPResponse) -> int:
            at = start
            while count := answer.readinto(buffer):
                at = write_at(descriptor, buffer[:count], at)
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"not all came within {REQUEST_S:g} s", self._url)
            if answer.length:
                raise ConnectionResetError(errno.ECONNRESET, f"it ended {answer.length} bytes early", self._url)
            return at

        def received(answer: http.client.HTTPResponse) -> int:
            return start + len(_body(answer)) if answer.status in BEYOND else receive(answer)

        return self._ask(key, _range(start, end), received)

    def _buffer(self) -> memoryview:
        if not hasattr(self._threads, "buffer"):
            self._threads.buffer = memoryview(bytearray(BUFFER_BYTES))
        return self._threads.buffer

    def _ask(self, key: str, headers: dict[str, str], take: Callable[[http.client.HTTPResponse], Answer]) -> Answer:
        """Requests a file or a part, and returns what `take` makes of the answer; once more, on a
        new connection, when the first one was closed.
        """
        address = f"{self._url}/{key}"
        for left in reversed(range(TRIES)):
            try:
                with self._connection(fresh=not left) as connection:
                    path = quote(f"{urlsplit(self._url).path}/{key}")
                    connection.request("GET", path, headers=headers | self._headers)
                    answer = connection.getresponse()
                    _check(answer, PART_STATUSES if headers else {HTTPStatus.OK}, address)
                    return take(answer)
            except ConnectionError as error:
                if not left:
                    raise OSError(errno.EIO, f"the connection was lost ({error})", address) from error
            except http.client.HTTPException as error:
                raise OSError(errno.EIO, f"no answer in HTTP ({error!r:.200})", address) from error
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def _connection(self, *, fresh: bool) -> Iterator[http.client.HTTPConnection]:
        """A connection for one request, kept for the next one when all of the answer was read."""
        connection = None if fresh else _popped(self._idle)
        if connection is None:
            place = urlsplit(self._url)
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=CONNECT_S)
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:  # else the server has closed it
            self._idle.append(connection)


def _popped(idle: list[http.client.HTTPConnection]) -> http.client.HTTPConnection | None:
    """The last of a list that other threads change; None where it is empty."""
    with contextlib.suppress(IndexError):
        return idle.pop()
    return None


def _range(start: int, end: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{end - 1}"}


def _body(answer: http.client.HTTPResponse) -> bytes:
    """The whole body of an answer; empty for a part beyond the end of its file."""
    data = answer.read()
    return b"" if answer.status in BEYOND else data


def _check(answer: http.client.HTTPResponse, wanted: set[HTTPStatus], address: str) -> None:
    """OSError for an answer of another status than those that are wanted."""
    if answer.status == HTTPStatus.NOT_FOUND:
        raise FileNotFoundError(errno.ENOENT, "it is not there", address)
    if answer.status not in wanted:
        raise OSError(errno.EIO, f"answered {answer.status}", address)
