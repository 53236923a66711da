"""Passes results to waiters in another thread, and starts work in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def settle(future: Future[Result], function: Callable[[], Result]) -> None:
    """Sets a future to the result of the function, or to any exception that it raises; otherwise
    waiters would wait for ever. Does nothing to a cancelled future.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def begin_after(before: asyncio.Task[None] | None, act: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
    """Starts `act` when `before` has ended; returns its task. The fault of one is that of all after
    it, and is raised for those that wait.
    """

    async def follow() -> None:
        if before is not None:
            await before
        await act()

    task = asyncio.create_task(follow())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
