"""Retries of a store's calls to a server.

A call is tried again for minutes in a process that works for a run, for seconds where a person
waits for an answer. A fault that may pass (5xx, throttling, a reset, a refused connection, no
answer) is tried again, whatever call it was; a fault that every try would meet (no such bucket,
wrong keys) is not. One log line says that the process waits, one that the wait is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

log = logging.getLogger(__name__)
WORK_S = 300.0  # after the first fault of a call, in a process that works for a run
FIRST_S = 8.0  # in any other process: then the error names the server that is down
# between two tries, doubled each time; half of it is random, so that many do not retry at once
PAUSE_FIRST_S, PAUSE_MAX_S = 0.3, 8.0
SAID_AFTER_S = 3.0  # shorter faults are not logged
# answers of a server, or of what stands before it
PASSING_STATUSES = {408, 429, 500, 502, 503, 504, 509, *range(520, 531)}
LOOK_S = 0.2  # how soon a waiting call sees that the work has ended

Answer = TypeVar("Answer")


class Passing(OSError):
    """Raised for a fault that another try may not have."""


class Away(OSError):
    """Raised when the tries of a call are used up: another one at once would change nothing.

    Its text names the first fault.
    """


class Errand:
    """A reason for long waits; `end` removes it, also for calls that wait at that time."""

    def end(self) -> None:
        _works.discard(self)


_works: set[Errand] = set()
_hurries: ContextVar[bool] = ContextVar("hurries", default=False)


@contextlib.contextmanager
def working() -> Iterator[Errand]:
    """Marks this process as working for a run within the body: calls wait for a server for
    WORK_S.
    """
    work = Errand()
    _works.add(work)
    try:
        yield work
    finally:
        work.end()


@contextlib.contextmanager
def hurrying() -> Iterator[None]:
    """Limits the waits of the calls in the body to FIRST_S, even in a process that works for a run:
    for a heartbeat, which is useless when it is late.
    """
    token = _hurries.set(True)
    try:
        yield
    finally:
        _hurries.reset(token)


def is_hurried() -> bool:
    """True when the caller should end soon: in `hurrying`, or in a cancelled asyncio task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        task = None
    return _hurries.get() or (task is not None and task.cancelling() > 0)


class Wait:
    """The tries of one call after its first fault, for at most `bound_s`, which may change
    meanwhile.

    All calls that wait for one `server` at the same time log one line when they wait, and one when
    it is over.
    """

    # how many wait for a server, of those that have lasted
    _lock, _said = threading.Lock(), Counter[str]()

    def __init__(self, server: str, what: str, fault: str, bound_s: Callable[[], float]) -> None:
        self._server, self._what, self._fault, self.bound_s = server, what, fault, bound_s
        self._since, self._pause_s, self._is_said, self._is_answered = time.monotonic(), PAUSE_FIRST_S, False, True

    @property
    def lasted_s(self) -> float:
        """Seconds since the first fault, which may have taken minutes to be noticed."""
        return time.monotonic() - self._since

    def is_over(self) -> bool:
        return self.lasted_s >= self.bound_s()

    def next_pause_s(self) -> float:
        """Seconds until the next try. Logs that it waits, once that has lasted SAID_AFTER_S."""
        if not self._is_said and self.lasted_s >= SAID_AFTER_S:
            self._is_said = True
            with Wait._lock:
                Wait._said[self._server] += 1
                if Wait._said[self._server] == 1:
                    log.warning("%s: %s; it is tried again, for %g s at most", self._what, self._fault, self.bound_s())
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
        return pause_s * random.uniform(0.5, 1.0)

    def given_up(self) -> str:
        """The text of the error for a call that got no answer."""
        self._is_answered = False
        return f"{self._fault} (the first fault of {self.lasted_s:.0f} s of tries)"

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # also "it is not there" is an answer
        is_answered = self._is_answered and (kind is None or issubclass(kind, Exception))
        with Wait._lock:
            Wait._said[self._server] -= self._is_said
            if self._is_said and is_answered and not Wait._said[self._server]:
                log.warning("%s: answered, after %.0f s", self._what, self.lasted_s)


def persistently(address: str, ask: Callable[[], Answer]) -> Answer:
    """Returns `ask()`, called again while it raises Passing.

    Away, with the first fault, when the time is up or the work has ended.
    """
    try:
        return ask()
    except Passing as fault:
        first = str(fault.strerror)
    with Wait("store", address, first, _bound_s) as wait:
        while not wait.is_over():
            _pause(wait)
            with contextlib.suppress(Passing):
                return ask()
        raise Away(errno.EIO, wait.given_up(), address)


def _bound_s() -> float:
    return FIRST_S if is_hurried() or not _works else WORK_S


def _pause(wait: Wait) -> None:
    """Sleeps until the next try; less when the bound changes before, because the work has ended."""
    end, bound_s = time.monotonic() + wait.next_pause_s(), wait.bound_s()
    while (left := end - time.monotonic()) > 0 and wait.bound_s() == bound_s:
        time.sleep(min(left, LOOK_S))
