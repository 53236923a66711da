"""The output of a process that runs a user's code: it is read as it arrives, and copied to our
stderr up to a limit; of the rest only the end is copied.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import IO

log = logging.getLogger(__name__)
PASSED_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
CHUNK_BYTES = 1 << 16
END_S = 2.0  # to read the rest of the pipe after the process has ended


class Printed:
    """Reads a pipe to its end: copies the first PASSED_BYTES to our stderr, and after the end the
    last TAIL_BYTES of the rest.
    """

    def __init__(self, name: str, pipe: IO[bytes]) -> None:
        """Begins to read. `name`: of the process, in the log."""
        self._name, self._pipe = name, pipe
        self._left, self._more, self._tail = PASSED_BYTES, 0, b""
        self._thread = threading.Thread(target=self._read, daemon=True, name=f"printed by {name}")
        self._thread.start()

    def wait(self) -> None:
        """Waits until all is read, END_S at most: a process that escaped the kill may hold the pipe
        open.
        """
        self._thread.join(END_S)

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), CHUNK_BYTES):
                self._take(chunk)
        if self._more:
            cut = self._more - len(self._tail)
            _pass_on(
                f"\n[{self._name}: {cut} bytes that it printed are left out here; the last ones:]\n".encode()
                + self._tail
            )

    def _take(self, chunk: bytes) -> None:
        passed, more = chunk[: self._left], chunk[self._left :]
        self._left -= len(passed)
        _pass_on(passed)
        if more and not self._more:
            log.warning(
                "%s has printed %d bytes: of what more it prints the last %d are shown, when its process has ended",
                self._name, PASSED_BYTES, TAIL_BYTES,
            )  # fmt: skip
        self._more += len(more)
        self._tail = (self._tail + more)[-TAIL_BYTES:]


def _pass_on(data: bytes) -> None:
    with suppress(OSError):  # the reader of our stderr is gone
        while data:
            data = data[os.write(2, data) :]
