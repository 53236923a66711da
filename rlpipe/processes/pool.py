"""Workers for callers without an event loop, and the environment of users' code."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from rlpipe.base.errors import EngineError, UserError
from rlpipe.config.secrecy import Secrets
from rlpipe.processes.user_code import Record
from rlpipe.processes.worker import START_TIMEOUT_S, Losses, UserCode, Worker

ONE_THREAD = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}  # many processes share the machine

T = TypeVar("T")


class WorkerPool:
    """Workers that all load the same code, for callers without an event loop: a thread of the pool
    has one. `close` ends it.
    """

    def __init__(
        self, field: str, module: str, hello: Record, *, workers: int = 1, start_timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Prepares the pool, see `UserCode`. `environment`: the variables of the processes; None:
        those of `code_environment`.
        """
        assert workers > 0
        variables = code_environment() if environment is None else environment
        self.losses = Losses()
        code = UserCode(field, module, hello, variables, start_timeout_s)
        self.workers = [Worker(code, self.losses) for _ in range(workers)]
        self._field = field
        self._loop: asyncio.AbstractEventLoop | None = None  # while the thread runs
        self._over = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards the thread and `_closed`

    def on_all(self, function: Callable[[Worker], Coroutine[Any, Any, T]]) -> list[T]:
        """Calls the function with every worker at the same time; raises the first error once all
        calls have ended. EngineError when the pool is closed, before or meanwhile.
        """
        with self._lock:
            if self._closed:
                raise EngineError(f"{self._field}: its processes were closed")
            if self._loop is None:
                self._start_thread()
            assert self._loop is not None
            calls = asyncio.run_coroutine_threadsafe(self._gathered(function), self._loop)
        outcomes = calls.result()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def start(self) -> list[Any]:
        """Starts all processes; returns the messages that they send when they are ready. UserError
        when one cannot load the code.
        """
        return self.on_all(Worker.start)

    def ask(self, request: Record, timeout_s: float) -> Any:
        """The answer of the only worker. ProcessEnded or TimeoutError: it is not asked again."""
        (answer,) = self.on_all(lambda worker: worker.ask(lambda _: (request, timeout_s)))
        return answer

    def close(self) -> None:
        """Kills the processes: waiting and later requests get an EngineError."""
        with self._lock:
            self._closed = True
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._gathered(Worker.close), self._loop).result()
                self._loop.call_soon_threadsafe(self._over.set)
                self._loop = None
        if self._thread is not None:
            self._thread.join()

    async def _gathered(self, function: Callable[[Worker], Coroutine[Any, Any, T]]) -> list[Any]:
        return await asyncio.gather(*map(function, self.workers), return_exceptions=True)

    def _start_thread(self) -> None:
        loop = asyncio.new_event_loop()  # here: the caller gets the error when there is no descriptor left

        async def run() -> None:
            await self._over.wait()
            if calls := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(calls)  # their workers are closed

        def live() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(run())

        thread = threading.Thread(target=live, daemon=True, name=self._field)
        try:
            thread.start()
        except RuntimeError:
            loop.close()
            raise
        self._loop, self._thread = loop, thread


def code_environment(secrets: Secrets = Secrets()) -> dict[str, str]:  # noqa: B008 (it cannot be changed)
    """The environment of a process that runs a user's code: ours, without secrets other than those
    that are passed, as a policy may get it printed.

    UserError when a passed one is not set.
    """
    unset = next((name for name in secrets.passed if name not in os.environ), None)
    if unset is not None:
        raise UserError(f"rl.pass_environment: {unset} is not set in the environment; set it, or leave it out")
    return {**secrets.without(os.environ), **ONE_THREAD}
