"""Connections of which each use ends at a deadline, for services that trickle."""

from __future__ import annotations

import time
from ssl import SSLContext
from typing import Any

import httpcore


class DeadlineStream(httpcore.NetworkStream):
    """A connection of which each use ends at a deadline, passed as `timeout`: a time on the
    monotonic clock.

    httpcore's own timeout would start again with every byte that arrives.
    """

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, _left_s(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class DeadlineBackend(httpcore.SyncBackend):
    """Makes such connections."""

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any
    ) -> DeadlineStream:
        return DeadlineStream(super().connect_tcp(host, port, _left_s(timeout), *args, **options))


def _left_s(ends_s: float | None) -> float:
    """Seconds until a deadline; TimeoutError when it is past."""
    assert ends_s is not None, "a call without a deadline"
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
