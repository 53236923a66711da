"""Ends a command on a signal: once, in one line, and within END_S even if a store or a server does
not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

from flows.printing import echo

END_S = 75.0  # to release a run takes seconds, up to a minute while the store is away
_bound = threading.Event()
Result = TypeVar("Result")


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which ends a command as Ctrl-C does."""


def bound_end(number: int) -> None:
    """Ends this process after END_S, in one line, if it has not ended by then: a thread that waits
    for an answer cannot be interrupted. Nothing is lost by that, as by any kill; its children end
    with it, and the next start sees that it is gone. A second call does nothing.
    """
    if _bound.is_set():
        return
    _bound.set()

    def end() -> None:
        time.sleep(END_S)
        with contextlib.suppress(OSError):
            echo(
                f"rlpipe: stopped after waiting {END_S:g} s for calls that were not answered. Nothing committed is"
                " lost: start the run again with the same command",
                err=True,
            )
        os._exit(128 + number)

    threading.Thread(target=end, daemon=True, name="bound-end").start()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raises Terminated on SIGTERM in the body, KeyboardInterrupt on SIGINT, and ignores further
    ones. Without a handler SIGTERM would end the process without a message, and without releasing
    the run.
    """
    before = _handlers()

    def stop(number: int, _frame: object) -> NoReturn:
        _set(dict.fromkeys(before, unheard))
        bound_end(number)
        raise _said(number)

    _set(dict.fromkeys(before, stop))
    try:
        yield
    finally:
        _set(before)


def run_unless_stopped(steps: Coroutine[Any, Any, Result]) -> Result:
    """Returns the coroutine's result; Terminated after SIGTERM, KeyboardInterrupt after SIGINT,
    once it has released what it held. Signals after the first are ignored: they would interrupt the
    release.
    """
    before, stopped = _handlers(), list[int]()

    async def whole() -> Result:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "asyncio.run made it"

        def stop(number: int) -> None:
            stopped.append(number)
            if len(stopped) == 1:
                _set(dict.fromkeys(before, unheard))
                bound_end(number)
                task.cancel()

        for number in before:  # asyncio calls this one also where Prefect has set a handler since
            loop.add_signal_handler(number, stop, number)
            signal.signal(number, bounding)  # called also while the loop stands still
        try:
            return await steps
        finally:
            if stopped:
                raise _said(stopped[0])

    try:
        return asyncio.run(whole())
    finally:
        _set(dict.fromkeys(before, unheard) if stopped else before)


def _said(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def bounding(number: int, _frame: object) -> None:
    """Python's handler of a signal that the event loop handles too: if the loop is blocked, the
    process still ends.
    """
    bound_end(number)


def unheard(*_: object) -> None:
    """Ignores a signal. Unlike SIG_IGN it is not inherited by the programs that this process
    starts.
    """


def _handlers() -> dict[int, Any]:
    """The handlers of the signals that end a command, by signal. An ignored SIGINT is left out and
    stays ignored: so a shell starts its background processes."""
    set_now = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    return {
        number: handler
        for number, handler in set_now.items()
        if number == signal.SIGTERM or handler is not signal.SIG_IGN
    }


def _set(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
