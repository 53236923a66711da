"""JSON lines over pipes, in an event loop: for a process and its owner that have many things to say at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from rlpipe.processes.user_code import Record
from rlpipe.types import JsonDict


class LineReader(asyncio.Protocol):
    """Calls `on_message` with what each line says, and `on_end` once the other end has closed."""

    def __init__(self, on_message: Callable[[JsonDict], None], on_end: Callable[[], object]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._begun: list[bytes] = []  # parts of a line that has not ended

    def data_received(self, data: bytes) -> None:
        *ends, rest = data.split(b"\n")
        for end in ends:
            line = b"".join([*self._begun, end])
            self._begun.clear()
            self._on_message(json.loads(line))
        if rest:
            self._begun.append(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


def line_of(message: Record) -> bytes:
    return json.dumps(message).encode() + b"\n"
