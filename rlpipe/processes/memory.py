"""The memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


def trim() -> None:
    """Gives the kernel what this process has freed and the C library has kept; does nothing where
    that is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect() -> None:
    """Frees at once all objects that nobody holds, also those in cycles, and those that were
    settled."""
    gc.unfreeze()
    gc.collect()


def settle_heap() -> None:
    """The garbage collector looks through what is in memory now, and no more from then on, until
    this is called again.

    A process with Prefect or torch has half a million objects, nearly all of them for good: to look
    through them takes 0.1 to 0.3 s, and was done every other iteration.
    """
    collect()
    gc.freeze()


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """A settled heap in the body; behind it the garbage collector
    looks through everything again."""
    settle_heap()
    try:
        yield
    finally:
        gc.unfreeze()
