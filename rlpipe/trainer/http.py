"""An HTTP server of threads that strangers cannot fill: whoever brings no key gets little time, little memory, and no more threads.

It says nothing of what is asked: that is `GangServer`'s (server.py).
"""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlpipe.secrecy import key_fits
from rlpipe.types import JsonDict

CONNECTIONS_MAX = 128
STRANGER_S = 30.0  # for the head and body of a first request
IDLE_S = 600.0  # a known client's connection without a request is closed
BODY_BYTES_MAX = 4 * 1024 * 1024
REFUSED_BYTES_MAX = 64 * 1024  # read of a stranger's body, so that he reads the answer; closing with more unread would reset it

Answer = Callable[[str, str, bytes], tuple[int, JsonDict]]  # (method, path, body) -> status and answer


class _Until(io.RawIOBase):
    """A connection, read until `ends_at`: who sends a byte now and then gains no time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.ends_at = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class BoundedServer(ThreadingHTTPServer):
    """At most CONNECTIONS_MAX at a time; one more is closed unheard. `key`: what everybody has to bring; empty: nothing."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], key: str, answer: Answer) -> None:
        super().__init__(address, BoundedHandler)
        self.key = key
        self.answer = answer
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class BoundedHandler(BaseHTTPRequestHandler):
    """One connection: JSON in, JSON out, for who brings the key."""

    protocol_version = "HTTP/1.1"
    wbufsize = 64 * 1024  # head and body in one packet: two would wait for a delayed ACK (40 ms)
    disable_nagle_algorithm = True
    server: BoundedServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        self._known = False
        self._arriving = _Until(self.connection)
        self.rfile.close()
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        self._arriving.ends_at = time.monotonic() + (IDLE_S if self._known else STRANGER_S)
        super().handle_one_request()

    def do_GET(self) -> None:
        data = self._body()
        if data is not None:
            self._answer(*self.server.answer(self.command, self.path, data))

    do_POST = do_GET

    def _body(self) -> bytes | None:
        """What was sent by a client with the key; None when it was refused, and the connection will be closed."""
        told = self.headers.get("Content-Length", "0")
        length = int(told) if told.isascii() and told.isdecimal() and len(told) < 20 else -1
        self._known = key_fits(self.headers.get("Authorization", ""), self.server.key)
        if not self._known:
            self.rfile.read(min(max(length, 0), REFUSED_BYTES_MAX))
            return self._refuse(401, "wrong or missing bearer key")
        if length < 0 or "Transfer-Encoding" in self.headers:
            return self._refuse(411, "say how long the body is, as Content-Length")
        if length > BODY_BYTES_MAX:
            return self._refuse(413, f"the body has {length} bytes, at most {BODY_BYTES_MAX} are read")
        return self.rfile.read(length)

    def _refuse(self, status: int, error: str) -> None:
        self.close_connection = True
        self._answer(status, {"error": error})

    def _answer(self, status: int, answer: JsonDict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Polls would fill the log."""
