"""The end of a session whose run was taken over by another process.

The session ends soon, whatever it waits for, and reports TakenOver and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rlpipe.store.lease import Lease, TakenOver


@contextlib.asynccontextmanager
async def told(held: Lease) -> AsyncIterator[None]:
    """Raises TakenOver in place of any error that ends the body after the run was taken over.

    The new holder has other files, services and commits, so the error may come from them.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        # the store does not answer: the error is raised as it is
        with contextlib.suppress(OSError):
            try:
                await asyncio.to_thread(held.check)
            except TakenOver as over:
                raise over from (None if isinstance(error, TakenOver) else error)
        raise


@contextlib.asynccontextmanager
async def cancelled_when_taken_over(held: Lease) -> AsyncIterator[None]:
    """Cancels the body, whatever it waits for, as soon as this process finds that the run was taken
    over.

    Code after the body is not cancelled.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a session is opened in a task"
    within, cancelled = True, False

    def cancel() -> None:
        nonlocal cancelled
        if within and not cancelled:
            cancelled = task.cancel()

    held.on_taken_over(lambda: loop.call_soon_threadsafe(cancel))
    async with told(held):
        try:
            yield
        finally:
            within = False  # first: each check from here on, that of `told` too, calls `cancel`
            held.on_taken_over(None)
            if cancelled:
                task.uncancel()
