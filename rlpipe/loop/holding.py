"""The end of a session whose run another process has taken.

It ends soon, whatever it waits for, and says that and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rlpipe.store.lease import Lease, TakenOver


@contextlib.asynccontextmanager
async def told(held: Lease) -> AsyncIterator[None]:
    """Raises TakenOver for any error that ends the body after the run was taken over.

    The new holder has other files, services and commits.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        # a store that says nothing: then it is the error that it is
        with contextlib.suppress(OSError):
            try:
                await asyncio.to_thread(held.check)
            except TakenOver as over:
                raise over from (None if isinstance(error, TakenOver) else error)
        raise


@contextlib.asynccontextmanager
async def cancelled_when_taken_over(held: Lease) -> AsyncIterator[None]:
    """Ends what the body waits for, however long, once anyone finds that the run was taken over.

    What comes after the body is not cancelled.
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
            within = False  # first: whoever looks from here on, `told` too, tells the listener
            held.on_taken_over(None)
            if cancelled:
                task.uncancel()
