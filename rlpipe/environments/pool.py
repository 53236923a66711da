"""Environments in processes of their own, so that one may raise, crash, print or never return.

Processes are a cache: an environment whose process was lost is made again elsewhere and told its completions again. A step that
kills a process is tried once more, so that a process that was killed from outside costs nothing but time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlpipe.child import ChildProcess, ProcessEnded
from rlpipe.environments.protocol import Message, Step
from rlpipe.environments.registry import check_name
from rlpipe.types import EngineError, JsonDict, UserError

log = logging.getLogger(__name__)
TRIES_MAX = 2  # of a step whose process died
LOSSES_MAX = 64  # processes lost in a row, nothing answered between, after which an environment counts as broken


class EnvironmentFault(Exception):
    """An environment's rollout ends here. Reasons: environment_error, _timeout, _crash (its process died), _invalid."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EnvironmentPool:
    """`workers` processes, started when first needed, from here to `close`. Belongs to one event loop."""

    def __init__(self, name: str, args: JsonDict, workers: int, timeout_s: float) -> None:
        check_name(name)
        assert workers > 0
        assert timeout_s > 0
        self.name = name
        self.args = args
        self.timeout_s = timeout_s
        self.closed = False
        self.losses = 0  # in a row
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="environments")  # one waits for one process
        self._seats = [_Seat(self) for _ in range(workers)]
        self._keys = itertools.count()

    def open(self, prompt: JsonDict) -> RemoteEnvironment:
        """A fresh environment for a prompt (`prompt_of`); its process makes it with the first call."""
        seat = min(self._seats, key=lambda seat: seat.occupied)
        return RemoteEnvironment(seat, next(self._keys), prompt)

    def lost(self, what: str) -> None:
        """Counts a process that was lost; UserError when that is all they do."""
        self.losses += 1
        log.warning("rl.environment=%r: %s", self.name, what)
        if self.losses >= LOSSES_MAX:
            raise UserError(
                f"rl.environment={self.name!r}: {self.losses} processes in a row were lost ({what}); mend it and start again: what "
                "was committed is kept"
            )

    async def close(self) -> None:
        """Kills the processes; who waits for one gets an EngineError."""
        self.closed = True
        processes = [seat.process for seat in self._seats if seat.process is not None]
        for process in processes:
            process.stop()
        await asyncio.to_thread(self.threads.shutdown)  # who waits has been told
        for process in processes:
            process.kill()


class RemoteEnvironment:
    """One rollout's environment, wherever it lives."""

    def __init__(self, seat: _Seat, key: int, prompt: JsonDict) -> None:
        self.key = key
        self.prompt = prompt
        self.asked: list[Message] | None = None  # what it started with, once known
        self.home: ChildProcess | None = None  # the process that holds it
        self._history: list[tuple[str, list[Message]]] = []
        self._seat = seat
        self._dropped = False
        seat.occupied += 1

    async def start(self) -> list[Message]:
        """What the policy is asked; EnvironmentFault."""
        await self._seat.ask(self, None)
        assert self.asked is not None
        return self.asked

    async def step(self, completion: str) -> Step:
        """Its answer to the next completion; EnvironmentFault."""
        step = Step(**(await self._seat.ask(self, completion))["step"])
        self._history.append((completion, step.messages))
        return step

    def drop(self) -> None:
        """The rollout is over; said again, it changes nothing."""
        if not self._dropped:
            self._dropped = True
            self._seat.occupied -= 1
            self._seat.dropped.append(self.key)

    def request(self, process: ChildProcess, completion: str | None) -> JsonDict:
        """What the worker is asked; all that it needs to make this environment when it is not there."""
        made = {"prompt": self.prompt, "asked": self.asked, "history": self._history}
        there = {"prompt": None, "asked": None, "history": []}
        return {"key": self.key, "completion": completion, **(there if self.home is process else made)}


class _Seat:
    """The place of one process, and who waits for it: one call at a time, in order."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool
        self.occupied = 0  # by environments
        self.dropped: list[int] = []  # keys that the process may forget
        self.process: ChildProcess | None = None
        self._lock = asyncio.Lock()

    async def ask(self, environment: RemoteEnvironment, completion: str | None) -> JsonDict:
        """The answer to one call; EnvironmentFault."""
        async with self._lock:
            for _ in range(TRIES_MAX):
                try:
                    return await self._ask(environment, completion)
                except ProcessEnded as error:
                    self.pool.lost(f"prompt {environment.prompt['prompt_id']}: {error}")
            self._check_open()
            raise EnvironmentFault("environment_crash", f"its process died {TRIES_MAX} times")

    async def _ask(self, environment: RemoteEnvironment, completion: str | None) -> JsonDict:
        pool = self.pool
        self._check_open()
        if self.process is None or not self.process.alive:
            if self.process is not None:
                self.process.kill()
            self.process = _launch(pool.name, pool.args)
            try:
                await self._in_thread(self.process.wait_ready)
            except UserError:
                self._check_open()
                raise
            self._check_open()  # it may have been closed meanwhile
        process, dropped = self.process, self.dropped
        request = environment.request(process, completion)
        self.dropped = []
        # each call of the environment's methods has the timeout for itself
        num_calls = (request["prompt"] is not None) + len(request["history"]) + (completion is not None)
        try:
            answer = await self._in_thread(process.ask, {**request, "dropped": dropped}, pool.timeout_s * num_calls)
        except TimeoutError:
            what = f"took more than rl.environment_timeout_s={pool.timeout_s:g}"
            pool.lost(f"prompt {environment.prompt['prompt_id']}: {what}")
            raise EnvironmentFault("environment_timeout", what) from None
        pool.losses = 0
        if "reason" in answer:
            raise EnvironmentFault(answer["reason"], answer["message"])
        environment.home = process
        if answer["asked"] is not None:
            environment.asked = answer["asked"]
        return answer

    async def _in_thread(self, call: Callable[..., JsonDict], *args: Any) -> JsonDict:
        """What a call of the process gives. When the caller is cancelled the process ends: its answer would be taken for the next one's."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool.threads, call, *args)
        except asyncio.CancelledError:
            assert self.process is not None
            self.process.stop()
            self.process = None
            raise

    def _check_open(self) -> None:
        if self.pool.closed:  # what is at work may outlive the run's session: it must record no fault
            raise EngineError(f"rl.environment={self.pool.name!r}: its processes were closed")


def check_environment(name: str, args: JsonDict) -> list[str]:
    """The roles of an environment's messages; UserError when it cannot be loaded. In a process of its own, which imports it."""
    check_name(name)
    process = _launch(name, args)
    roles: list[str] = process.wait_ready()["roles"]
    process.kill()
    return roles


def _launch(name: str, args: JsonDict) -> ChildProcess:
    return ChildProcess(f"rl.environment={name!r}", "rlpipe.environments.worker", {"name": name, "args": args})
