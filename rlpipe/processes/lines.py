"""JSON lines over pipes, in an event loop, for a process and its owner that exchange many messages
at the same time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from rlpipe.base.values import JsonDict, json_object
from rlpipe.processes.user_code import Record

LINE_BYTES_MAX = 1 << 28  # a hundred times the largest answer of a process


def parsed_line(line: bytes | bytearray) -> JsonDict:
    """Parses the JSON object in a line. ValueError when a user's code wrote something else to that
    pipe.
    """
    if (said := json_object(line)) is None:
        raise ValueError(f"its code wrote {bytes(line[:40])!r} in the place of an answer")
    return said


class LineReader(asyncio.Protocol):
    """Calls `on_message` with the object of each line, and `on_end` once the other end has closed,
    or has sent an invalid line: then `fault` describes it.
    """

    def __init__(self, on_message: Callable[[Any], None], on_end: Callable[[], object]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self.fault = ""
        self._begun: list[bytes] = []  # parts of the current, incomplete line
        self._num_bytes = 0  # of these parts
        self._is_over = False

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            self._read(data)

    def _read(self, data: bytes) -> None:
        *ends, rest = data.split(b"\n")
        try:
            for end in ends:
                line = b"".join([*self._begun, end])
                self._begun.clear()
                self._num_bytes = 0
                self._on_message(parsed_line(line))
        except ValueError as error:
            self._end(str(error))
            return
        if rest:
            self._begun.append(rest)
            self._num_bytes += len(rest)
        if self._num_bytes > LINE_BYTES_MAX:
            self._end(f"its answer has more than {LINE_BYTES_MAX} bytes")

    def _end(self, fault: str) -> None:
        self._is_over, self.fault = True, fault
        self._begun.clear()
        self._on_end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


def line_of(message: Record) -> bytes:
    return json.dumps(message).encode() + b"\n"
