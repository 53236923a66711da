"""Ranks that are started before they may work: they import meanwhile, which takes seconds, and then
wait for a byte each from the process that starts the trainer. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys

# the file descriptor of the pipe, in the environment of the launcher and its ranks
VARIABLE = "RLPIPE_TRAINER_HELD"


def inherited() -> list[int]:
    """The descriptors that this process must hand on to its ranks."""
    return [int(os.environ[VARIABLE])] if VARIABLE in os.environ else []


def wait_until_freed() -> None:
    """Waits until this rank may work; ends the process where that will never be. Returns at once in
    a rank that is not held.
    """
    for pipe in inherited():
        freed = os.read(pipe, 1)
        os.close(pipe)
        if not freed:
            sys.exit(0)


class Hold:
    """The pipe of ranks that are held: `read_end` is theirs."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def free(self, ranks: int) -> None:
        """Lets them work."""
        os.close(self.read_end)
        with contextlib.suppress(BrokenPipeError):  # they have died
            os.write(self._write_end, bytes(ranks))
        os.close(self._write_end)
