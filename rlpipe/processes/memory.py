"""The memory of this process, and of this machine's GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
from collections.abc import Iterator

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 30.0


def trim() -> None:
    """Gives the kernel what this process has freed and the C library has kept; does nothing where that is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect() -> None:
    """What nobody holds is freed now, also what is part of cycles, and was settled."""
    gc.unfreeze()
    gc.collect()


def settle_heap() -> None:
    """The garbage collector looks through what is in memory now, and no more from then on, until this is called again.

    A process with Prefect or torch has half a million objects, nearly all of them for good: to look through them takes 0.1 to 0.3 s, and was done
    every other iteration.
    """
    collect()
    gc.freeze()


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """A settled heap in the body; behind it the garbage collector looks through everything again."""
    settle_heap()
    try:
        yield
    finally:
        gc.unfreeze()


def gpu_gib(gpu_ids: list[int]) -> float | None:
    """Memory of the smallest of these GPUs of this machine; None where nvidia-smi does not say."""
    try:
        done = subprocess.run(
            [*QUERY, f"--id={','.join(map(str, gpu_ids))}"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        return min(float(line) for line in done.stdout.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
