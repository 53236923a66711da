"""The owner's side of a process that holds environments: many calls in progress at once, sent and
answered in one event loop.

No thread waits for its answers. When it dies, or stops answering, its calls are sent again to a new
one, half as many at a time, so that the call that kills a process is soon sent alone: then it is
known, and no other call has failed for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rlpipe.base.errors import EngineError, UserError
from rlpipe.environments.wire import (
    Answer,
    EnvironmentHello,
    EnvironmentReady,
    EnvironmentRefused,
    PlayLine,
    PlayRequest,
)
from rlpipe.processes.lines import LineReader, line_of
from rlpipe.processes.pool import LATE_S, LOADS_MAX, POLL_S, START_TIMEOUT_S, has_ended, kill, spawned, wait_for_end
from rlpipe.processes.printed import Printed
from rlpipe.processes.user_code import Record

log = logging.getLogger(__name__)
TRIES_MAX = 2  # of a call that was alone in a process that died
TRIES_BESIDE_MAX = 32  # of a call that was there with others
GRACE_S = 1.0  # the process itself ends a call that takes too long; it is given up when it does not
ANY_NUMBER = 1 << 30


class EnvironmentFault(Exception):
    """Raised when an environment ends its rollout with a fault.

    Reasons: environment_error, _timeout, _total_timeout, _crash (its process died), _invalid.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EnvironmentCall:
    """One request to an environment.

    `request` makes it when it is sent, for the process of that number. `left_s`: seconds for its
    new step.
    """

    def __init__(self, key: int, request: Callable[[int], PlayRequest], left_s: float = math.inf) -> None:
        self.key = key
        self.request = request
        self.left_s = left_s
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.sent_to = 0  # the number of the process
        self.deadline_s = 0.0
        self.num_losses = 0

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class EnvironmentProcess:
    """A process, replaced by a new one when it has ended and a call is to be sent.

    Environments with ordinary methods get one call at a time; those with `async` methods get all
    calls at once.
    """

    def __init__(
        self,
        field: str,
        hello: EnvironmentHello,
        timeout_s: float,
        on_loss: Callable[[str], None],
        environment: Mapping[str, str],
    ) -> None:
        """`field`: the config field that errors name; `on_loss`: called for each process that was
        lost with calls, may raise UserError.
        """
        self.num_environments = 0
        self.hello = hello
        self.num_started = 0  # processes so far, so that a new one can be told from the one before
        self.num_answered = 0
        self._field = field
        self.timeout_s = timeout_s
        self._on_loss = on_loss
        self._environment = environment
        self._waiting: deque[EnvironmentCall] = deque()
        self._in_flight: dict[int, EnvironmentCall] = {}
        self._room = 0  # for calls in flight; 0 until it is known
        # what the process said when it had loaded the environment, or could not
        self._ready: EnvironmentReady | EnvironmentRefused | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: Printed | None = None
        self._pipes: list[asyncio.ReadTransport | asyncio.WriteTransport] = []
        self._life: asyncio.Task[None] | None = None
        self._closed = False

    async def ask(self, call: EnvironmentCall) -> Answer:
        """The answer to a call.

        EnvironmentFault; UserError when the environment does not load; EngineError when this is
        closed, before or meanwhile.
        """
        if self._closed:
            raise self._was_closed()
        self._waiting.append(call)
        if self._life is None:
            self._life = asyncio.create_task(self._live())
        self._send()
        return await call.answer

    def drop(self, key: int) -> None:
        """Lets the process forget an environment."""
        self.num_environments -= 1
        if self._is_ready:
            self._write({"drop": key})

    async def close(self) -> None:
        """Kills the process; callers that wait for it get an EngineError."""
        self._closed = True
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life})
        await self._end()
        self._fail(self._was_closed())

    @property
    def _is_ready(self) -> bool:
        return self._ready is not None and "error" not in self._ready

    def _was_closed(self) -> EngineError:
        return EngineError(f"{self._field}: its processes were closed")

    async def _live(self) -> None:
        """Starts a process, and others after it, until no call is left."""
        loads_left = LOADS_MAX
        try:
            while self._waiting:
                loads_left -= 1
                await self._start()
                is_late = await self._watch()
                ready, self._ready = self._ready, None  # from here on no call is sent
                if not is_late and self._process is not None:
                    await asyncio.to_thread(wait_for_end, self._process)
                code = await self._end()
                # its own alarm came before this loop's
                is_late = is_late or code == -signal.SIGALRM
                is_killed = ready is None and not is_late and code is not None and code < 0
                if is_killed and loads_left:
                    log.warning("%s: the process that loads it was killed (code %d): once more", self._field, code)
                    continue
                if ready is None or "error" in ready:
                    raise self._not_loaded(ready, is_late)
                loads_left = LOADS_MAX
                self._lose(is_late)
        except Exception as error:  # raised for all calls that wait
            self._fail(error)
        finally:
            self._ready = self._life = None

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        process, self._printed = spawned(self._field, "rlpipe.environments.worker", self._environment)
        self._process = process
        self.num_started += 1
        self._started_s = self._heard_s = loop.time()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        ended = self._ended
        reading, _ = await loop.connect_read_pipe(
            lambda: LineReader(self._hear, lambda: ended.done() or ended.set_result(None)), process.stdout
        )
        self._pipes = [self._writing, reading]
        self._write({"request": self.hello})

    async def _watch(self) -> bool:
        """Returns when the process has ended; True when it still runs but does not answer."""
        assert self._process is not None
        while True:
            await asyncio.wait({self._ended}, timeout=POLL_S)
            if self._ended.done() or has_ended(self._process):  # a child of its own may hold the pipe
                return False
            if self._is_late():
                return True

    def _is_late(self) -> bool:
        assert self._process is not None and self._process.stdout is not None
        now_s = asyncio.get_running_loop().time()
        if self._ready is None:
            return now_s > self._started_s + START_TIMEOUT_S
        late_s = max((now_s - call.deadline_s for call in self._in_flight.values()), default=0.0)
        is_silent = now_s > self._heard_s + self.timeout_s and not _can_be_read(self._process.stdout.fileno())
        # with many at work a call's answer may come late
        return late_s > (GRACE_S if is_silent else LATE_S)

    async def _end(self) -> int | None:
        """Waits until the process and its children have ended; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        kill(process)
        for pipe in self._pipes:
            if not pipe.is_closing():
                pipe.abort() if isinstance(pipe, asyncio.WriteTransport) else pipe.close()
        self._pipes = []
        await asyncio.to_thread(process.__exit__, None, None, None)  # closes what it had of the pipes, and waits
        if self._printed is not None:
            await asyncio.to_thread(self._printed.wait)
        return process.returncode

    def _send(self) -> None:
        """Sends as many calls as there is room for."""
        while self._is_ready and self._waiting and len(self._in_flight) < self._room:
            call = self._waiting.popleft()
            if call.answer.done():  # its rollout waits no more
                continue
            request = call.request(self.num_started)
            # every call of the environment's methods has the timeout for itself
            step_s = 0.0 if request["completion"] is None else min(self.timeout_s, max(0.0, call.left_s))
            again_s = self.timeout_s * ((request["prompt"] is not None) + len(request["history"]))
            call.sent_to = self.num_started
            call.deadline_s = asyncio.get_running_loop().time() + again_s + step_s
            self._in_flight[call.key] = call
            sent: PlayLine = {"key": call.key, **request, "timeout_s": self.timeout_s, "step_s": step_s}
            self._write(sent)

    def _write(self, message: Record) -> None:
        self._writing.write(line_of(message))

    def _hear(self, message: Any) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        if self._ready is None:
            self._ready = message
            self._room = self._room or (ANY_NUMBER if message.get("is_async") else 1)
        else:
            call = self._in_flight.pop(message.get("key", -1), None)
            if call is None:
                raise ValueError("its code wrote an answer that nobody waits for")
            if self._ready.get("is_async"):
                self._room += 1
            self.num_answered += 1
            if not call.answer.done():
                call.answer.set_result(message)
        self._send()

    def _lose(self, is_late: bool) -> None:
        """Handles the loss of the process: its calls are sent again, before any other, except one
        that is known to be at fault.
        """
        lost, self._in_flight = [*self._in_flight.values()], {}
        if not lost:
            return
        what = f"took more than rl.environment_timeout_s={self.timeout_s:g}" if is_late else "its process died"
        self._room = max(1, len(lost) // 2)
        for call in reversed(lost):
            call.num_losses += 1
            if len(lost) == 1 and is_late:
                call.fail(EnvironmentFault("environment_timeout", what))
            elif call.num_losses >= (TRIES_MAX if len(lost) == 1 else TRIES_BESIDE_MAX):
                call.fail(EnvironmentFault("environment_crash", f"its process died {call.num_losses} times"))
            else:
                self._waiting.appendleft(call)
        self._on_loss(f"{what}, with {len(lost)} calls under way" if len(lost) > 1 else what)

    def _not_loaded(self, ready: EnvironmentRefused | None, is_late: bool) -> UserError:
        if ready is not None:
            return UserError(ready["error"])
        what = f"did not answer in {START_TIMEOUT_S:.0f} s" if is_late else "ended"
        return UserError(f"{self._field}: the process that loads it {what}; its output is above")

    def _fail(self, error: Exception) -> None:
        for call in (*self._in_flight.values(), *self._waiting):
            call.fail(error)
        self._in_flight.clear()
        self._waiting.clear()


def _can_be_read(file: int) -> bool:
    """True when bytes wait to be read: then this process was stopped, or had no CPU time."""
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(0))
