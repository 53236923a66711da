"""The deadlines of all tests, and how a test waits for something.

A deadline of a test finds what hangs. It is ten times what a quiet machine of two cores needs, and
no test measures by it. Where a machine is busier than that, RLPIPE_TEST_PATIENCE=3 makes every
deadline three times as long.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = float(os.environ.get("RLPIPE_TEST_PATIENCE", "1"))
# for one thing: an answer, or a process that starts, imports torch, and is ready or ends
DEADLINE_S = 300.0 * PATIENCE
PIPELINE_S = 10 * DEADLINE_S  # for a whole pipeline
# for what rlpipe has to give up in a test, and what is well beside it has to keep
SHORT_S = 3.0 * PATIENCE
LOOK_S = 0.02


def until(
    condition: Callable[[], T],
    what: str | Callable[[], object] = "",
    *,
    running: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None,
    within_s: float = DEADLINE_S,
    look_s: float = LOOK_S,
) -> T:
    """Returns the first true value of `condition`, asked again every `look_s` seconds.

    AssertionError with `what` (or what it returns) when there is none in `within_s` seconds, or
    once the process `running` has ended.
    """
    end = time.monotonic() + within_s
    while True:
        over = _over(end, running)  # before the condition: what comes true at the end has come true
        if value := condition():
            return value
        assert not over, f"{over} ({_told(condition, what)})"
        time.sleep(look_s)


async def until_async(
    condition: Callable[[], T | Awaitable[T]],
    what: str | Callable[[], object] = "",
    *,
    running: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None,
    within_s: float = DEADLINE_S,
    look_s: float = LOOK_S,
) -> T:
    """As `until`, without blocking the event loop. A condition may be a coroutine function."""
    end = time.monotonic() + within_s
    while True:
        over = _over(end, running)
        value = condition()
        if inspect.isawaitable(value):
            async with asyncio.timeout(max(0.0, end - time.monotonic()) + LOOK_S):
                value = await value
        if value:
            return value  # pyright: ignore[reportReturnType]
        assert not over, f"{over} ({_told(condition, what)})"
        await asyncio.sleep(look_s)


def _over(end: float, running: subprocess.Popen[str] | subprocess.Popen[bytes] | None) -> str:
    if running is not None and running.poll() is not None:
        return f"it ended first, with {running.returncode}"
    return "" if time.monotonic() < end else "it hangs"


def _told(condition: Callable[[], object], what: str | Callable[[], object]) -> object:
    return what() if callable(what) else what or f"line {condition.__code__.co_firstlineno}"
