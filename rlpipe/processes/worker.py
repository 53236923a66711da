"""The owner of a process that runs a user's code, in an event loop: rewards, environments and
agents have such workers.

One rule says what a lost process means. A request that was alone in it is asked once more
(`ask_twice`); it is at fault when it loses a second process so. Requests that were in it together
are asked again before any other, half as many at a time, so that the one which kills is soon alone.
A request that was alone and took too long is at fault at once. So a kill from outside costs no
request its answer. A pool has a bound on the processes that are lost in a row (`Losses`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from rlpipe.base.errors import EngineError, UserError
from rlpipe.processes.child import ChildProcess, kill
from rlpipe.processes.user_code import Record

log = logging.getLogger(__name__)
# to start Python and import the code, also on a busy machine; a process that hangs is given up
START_TIMEOUT_S = 300.0
# tries of a process that is killed while it loads the code (by the kernel, for memory, or from
# outside)
LOADS_MAX = 2
POLL_S = 0.5
LATE_S = 60.0  # to read an answer that began before the deadline, or comes from a busy process
ANY_NUMBER = 1 << 30

T = TypeVar("T")
# makes the request to the process of that number, and the seconds for its answer
MakeRequest = Callable[[int], tuple[Record, float]]


class ProcessEnded(Exception):
    """The process died before it answered, with this request alone in it."""


class TooManyLost(UserError):
    """Raised when a pool has lost too many processes in a row."""


class UserCode(NamedTuple):
    """The code of a process: its module, which calls `greeted` or `serve`; `hello`, the first
    request, names what to load. `field`: the config field that errors name.
    """

    field: str
    module: str
    hello: Record
    environment: Mapping[str, str]
    start_timeout_s: float = START_TIMEOUT_S


class Losses:
    """The processes that all workers of a pool lost in a row, with no answer between: fewer than
    `in_a_row_max`.
    """

    def __init__(self, in_a_row_max: float = math.inf) -> None:
        self.in_a_row = 0
        self.in_a_row_max = in_a_row_max

    def answered(self) -> None:
        self.in_a_row = 0

    def add(self, field: str, what: str) -> None:
        """Counts one; TooManyLost."""
        self.in_a_row += 1
        if self.in_a_row >= self.in_a_row_max:
            raise TooManyLost(f"{field}: {self.in_a_row} processes in a row were lost ({what})")


class _Call:
    """A request and its future answer; without a request the answer is the process's greeting."""

    def __init__(self, make: MakeRequest | None, is_suspect: bool = False) -> None:
        self.make = make
        self.is_suspect = is_suspect  # it was in a process that was lost
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.deadline_s = 0.0

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Worker:
    """A process, started when something is asked, and replaced when it has ended.

    It gets one request at a time; many at once where its greeting has `is_async`.
    """

    def __init__(self, code: UserCode, losses: Losses, silent_s: float = 0.0) -> None:
        """`losses`: those of its pool. `silent_s`: a process that has answered something within
        this time is busy, and not stuck.
        """
        self.code = code
        self.silent_s = silent_s
        self.num_started = 0  # processes so far: tells a new process from the one before
        self._losses = losses
        self._waiting: deque[_Call] = deque()
        self._in_flight: dict[int, _Call] = {}
        self._keys = itertools.count(1)
        self._room = 0  # for calls in flight; 0 until it is known
        self._ready: Any = None  # the greeting of the process: it is ready, or could not load
        self._process: ChildProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> Any:
        """Starts a process if there is none; returns the message that it sends when it is ready.
        UserError when it cannot load the code.
        """
        return await self._answer(_Call(None))

    async def ask(self, make: MakeRequest, is_again: bool = False) -> Any:
        """The answer to a request, whose fields the module defines; one that `is_again` comes
        before others.

        ProcessEnded or TimeoutError when its process was lost with it alone; UserError when the
        code does not load, or too many processes were lost; EngineError when this is closed, before
        or meanwhile.
        """
        return await self._answer(_Call(make, is_again))

    def tell(self, message: Record) -> None:
        """Sends a message that has no answer to the process, if there is one."""
        if self._is_ready:
            self._write(message)

    async def close(self) -> None:
        """Kills the process and prevents a new one: waiting and later requests get an
        EngineError.
        """
        self._closed = True
        if self._process is not None:
            self._process.leave()
        if self._life is not None:
            await asyncio.wait({self._life})

    async def _answer(self, call: _Call) -> Any:
        self._check_open()
        if call.is_suspect:
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)
        if self._life is None:
            self._life = asyncio.create_task(self._live())
        self._send()
        return await call.answer

    @property
    def _is_ready(self) -> bool:
        return self._ready is not None and "error" not in self._ready

    def _check_open(self) -> None:
        if self._closed:  # a call may outlive the run's session: it must not record a fault
            raise EngineError(f"{self.code.field}: its processes were closed")

    async def _live(self) -> None:
        """Starts a process, and others after it, until no call is left."""
        try:
            while self._waiting:
                await self._load_and_watch()
        except Exception as error:  # raised for all calls
            await self._abandon()
            for call in (*self._in_flight.values(), *self._waiting):
                call.fail(error)
            self._in_flight.clear()
            self._waiting.clear()
        finally:
            self._life = None

    async def _abandon(self) -> None:
        """Ends a process whose watch an error has ended: nobody would see when it ends."""
        self._ready = None  # from here on no call is sent
        process, self._process = self._process, None
        if process is not None:
            try:
                await process.end(by_itself=False)
            except (OSError, RuntimeError):  # no thread is left that could wait for it
                kill(process.keeper)

    async def _load_and_watch(self) -> None:
        """Starts a process and returns when it has ended; another one if it was killed while it
        loaded the code.
        """
        for loads_left in reversed(range(LOADS_MAX)):
            self._check_open()
            process = self._process = ChildProcess(self.code.field, self.code.module, self.code.environment)
            self.num_started += 1
            now_s = self._heard_s = asyncio.get_running_loop().time()
            self._load_deadline_s = now_s + self.code.start_timeout_s
            await process.open(self._hear)
            self._write({"request": self.code.hello})
            is_stuck = await self._watch(process)
            ready, self._ready = self._ready, None  # from here on no call is sent
            is_late = is_stuck or self._late_s(ready) > 0
            refusal = None if ready is None else ready.get("error")
            code = await process.end(by_itself=not (is_stuck or refusal or self._closed))
            self._process = None
            self._check_open()
            if refusal is not None:
                raise UserError(refusal)
            if ready is not None:
                self._lose(process.fault, is_late or code == -signal.SIGALRM)  # its own alarm was faster
                return
            if is_stuck or code >= 0 or not loads_left:
                what = f"did not answer in {self.code.start_timeout_s:.0f} s" if is_stuck else f"ended with code {code}"
                raise UserError(f"{self.code.field}: the process that loads it {what}; its output is above")
            log.warning("%s: the process that loads it was killed (code %d): once more", self.code.field, code)

    async def _watch(self, process: ChildProcess) -> bool:
        """Returns when the process has ended; True when it still runs but does not answer."""
        loop = asyncio.get_running_loop()
        while not (process.ended.done() or process.has_ended):
            late_s = self._late_s(self._ready)
            # an answer that has arrived counts as in time: this process may have been stopped, or
            # had no processor
            is_silent = loop.time() > self._heard_s + self.silent_s and not process.has_unread
            if late_s > (0.0 if is_silent else LATE_S):
                return True
            await asyncio.wait({process.ended}, timeout=min(POLL_S, -late_s) if late_s < 0 else POLL_S)
        return False

    def _late_s(self, ready: Any) -> float:
        """The seconds since the first deadline that was missed; negative until the next one."""
        deadlines = [call.deadline_s for call in self._in_flight.values()]
        if ready is None:
            deadlines = [self._load_deadline_s]
        now_s = asyncio.get_running_loop().time()
        return max((now_s - deadline_s for deadline_s in deadlines), default=-POLL_S)

    def _send(self) -> None:
        """Sends as many calls as there is room for."""
        while self._is_ready and self._waiting and len(self._in_flight) < self._room:
            call = self._waiting[0]
            first = next(iter(self._in_flight.values()), call)
            if first.is_suspect and not call.is_suspect:
                return  # none joins those among which one may kill
            self._waiting.popleft()
            if call.answer.done():  # its asker waits no more
                continue
            if call.make is None:
                call.answer.set_result(self._ready)
                continue
            request, timeout_s = call.make(self.num_started)
            call.deadline_s = asyncio.get_running_loop().time() + timeout_s
            key = next(self._keys)
            self._in_flight[key] = call
            self._write({"key": key, "request": request, "timeout_s": timeout_s})

    def _write(self, message: Record) -> None:
        assert self._process is not None, "it was never started"
        self._process.write(message)

    def _hear(self, message: Any) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        if self._ready is None:
            self._ready = message
            self._room = self._room or (ANY_NUMBER if message.get("is_async") else 1)
            if not self._is_ready and self._process is not None:
                self._process.leave()
        else:
            key = message.pop("key", None)
            call = self._in_flight.pop(key, None) if isinstance(key, int) else None
            if call is None:
                raise ValueError("its code wrote an answer that nobody waits for")
            self._room += bool(self._ready.get("is_async"))
            self._losses.answered()
            if not call.answer.done():
                call.answer.set_result(message)
        self._send()

    def _lose(self, fault: str, is_late: bool) -> None:
        """Handles the loss of the process by the rule of this module."""
        lost = [*self._in_flight.values()]
        if not lost:
            return
        what = "it did not answer in time" if is_late else fault
        if len(lost) > 1:
            what += f", with {len(lost)} calls under way"
        log.info("%s: %s", self.code.field, what)  # its caller warns, and knows the rollout
        self._losses.add(self.code.field, what)
        self._in_flight.clear()
        self._room = max(1, len(lost) // 2)
        if len(lost) == 1:
            lost[0].fail(TimeoutError(what) if is_late else ProcessEnded(what))
            return
        for call in lost:
            call.is_suspect = True
        self._waiting.extendleft(reversed(lost))


async def ask_twice(once: Callable[[bool], Awaitable[T]]) -> T:
    """The answer of `once(is_again)`, which asks a worker, and does so once more when the process
    died.

    ProcessEnded when the process died both times.
    """
    try:
        return await once(False)
    except ProcessEnded:
        return await once(True)
