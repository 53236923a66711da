"""Environments in processes of their own, since one may raise, crash, print or never return.

Processes are a cache: an environment whose process was lost is made again in another one, which
gets the earlier completions again. The rule of `rlpipe.processes.worker` says which step is at
fault for the loss of a process; a kill from outside costs only time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from functools import partial

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.extras.environments.protocol import Message, Step
from rlpipe.extras.environments.wire import Answer, EnvironmentHello, History, PlayRequest
from rlpipe.loop.player import PlayFault
from rlpipe.processes.pool import WorkerPool, code_environment
from rlpipe.processes.worker import Losses, ProcessEnded, TooManyLost, UserCode, Worker, ask_twice
from rlpipe.records.prompt import RewardPrompt

# processes lost in a row, nothing answered between, after which an environment counts as broken
LOSSES_MAX = 64
MODULE = "rlpipe.extras.environments.worker"
GRACE_S = 1.0  # the process itself ends a call that takes too long; it is given up when it does not
NAMED = {"calculator": "rlpipe.extras.environments.calculator:Calculator"}


class EnvironmentFault(PlayFault):
    """Raised when an environment ends its rollout with a fault, for a reason of docs/faults.md."""


class EnvironmentPool:
    """`workers` processes, started when first needed; `close` ends them.

    Belongs to one event loop.
    """

    def __init__(
        self, name: str, args: JsonDict, workers: int, timeout_s: float, total_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """A call of a method has `timeout_s`, all steps of one rollout together have `total_s`.

        `environment`: the variables of the processes.
        """
        assert timeout_s > 0 and workers > 0
        self.timeout_s = timeout_s
        self.total_s = total_s
        code = UserCode(_field(name), MODULE, _hello(name, args), environment or code_environment())
        losses = Losses(LOSSES_MAX)
        self._workers = [Worker(code, losses, silent_s=timeout_s) for _ in range(workers)]
        self._num_open: Counter[Worker] = Counter()
        self._numbers = itertools.count()

    def open(self, prompt: RewardPrompt, history: History = ()) -> RemoteEnvironment:
        """An environment for a prompt (`Prompt.for_reward`), which has answered `history` already;
        its process makes it at the first call.
        """
        worker = min(self._workers, key=lambda worker: self._num_open[worker])
        self._num_open[worker] += 1
        return RemoteEnvironment(self, worker, next(self._numbers), prompt, history)

    def drop(self, worker: Worker, number: int) -> None:
        """Lets the worker's process forget an environment."""
        self._num_open[worker] -= 1
        worker.tell({"drop": number})

    async def close(self) -> None:
        """Kills the processes; callers that wait for one, or call later, get an EngineError."""
        await asyncio.gather(*(worker.close() for worker in self._workers))


class RemoteEnvironment:
    """The environment of one rollout, in whatever process."""

    def __init__(
        self, pool: EnvironmentPool, worker: Worker, number: int, prompt: RewardPrompt, history: History
    ) -> None:
        self.prompt = prompt
        # its first messages to the policy, once known
        self.start_messages: list[Message] | None = None
        self._pool = pool
        self._worker = worker
        self._number = number
        self._sent_to = self._lives_in = 0  # the number of the process that holds it; 0: none yet
        self._history = [*history]
        self._dropped = False
        self._took_s = 0.0  # its steps so far; repeated ones do not count

    async def start(self) -> list[Message]:
        """Returns the environment's first messages to the policy; EnvironmentFault."""
        await self._call(None)
        assert self.start_messages is not None
        return self.start_messages

    async def step(self, completion: str) -> Step:
        """The answer to the next completion; EnvironmentFault."""
        step = await self._call(completion)
        assert step is not None, "a completion is answered with a step"
        self._history.append((completion, step.messages))
        return step

    def drop(self) -> None:
        """Ends the environment with its rollout; a second call does nothing."""
        if not self._dropped:
            self._dropped = True
            self._pool.drop(self._worker, self._number)

    async def _call(self, completion: str | None) -> Step | None:
        """Makes one call, and returns the step that answers a completion; EnvironmentFault."""
        try:
            answer = await self._answer(completion)
            if "reason" in answer:
                raise EnvironmentFault(answer["reason"], answer["message"])
        except EnvironmentFault as fault:
            is_of_all = self._left_s < self._pool.timeout_s and completion is not None
            if fault.reason == "environment_timeout" and is_of_all:
                message = f"its steps took more than rl.environment_total_s={self._pool.total_s:g}"
                raise EnvironmentFault("environment_total_timeout", message) from fault
            raise
        self._took_s += answer["took_s"]
        self._lives_in = self._sent_to
        self.start_messages = answer["start_messages"] or self.start_messages
        return Step(**answer["step"]) if answer["step"] else None

    async def _answer(self, completion: str | None) -> Answer:
        try:
            return await ask_twice(partial(self._asked, completion))
        except TimeoutError as error:
            message = f"took more than rl.environment_timeout_s={self._pool.timeout_s:g}"
            raise EnvironmentFault("environment_timeout", message) from error
        except ProcessEnded as error:
            raise EnvironmentFault("environment_crash", f"{error}, twice") from error
        except TooManyLost as error:
            raise UserError(f"{error}; mend it and start again: what was committed is kept") from error

    async def _asked(self, completion: str | None, is_again: bool) -> Answer:
        """One try of a call; ProcessEnded.

        A call that has ended its process is at fault also where the next process cannot make the
        environment again, as it would not have to without that.
        """
        answer: Answer = await self._worker.ask(partial(self._request, completion), is_again)
        if is_again and "reason" in answer and answer["reason"] == "environment_unavailable":
            raise ProcessEnded(f"its process died, and {answer['message']}")
        return answer

    @property
    def _left_s(self) -> float:
        """The seconds that are left for its steps."""
        return math.inf if self._pool.total_s is None else self._pool.total_s - self._took_s

    def _request(self, completion: str | None, process: int) -> tuple[PlayRequest, float]:
        """The request to the process of that number, and the seconds for its answer. A process that
        does not hold the environment gets all that it needs to make it.
        """
        is_new, call_s = self._lives_in != process, self._pool.timeout_s
        self._sent_to = process
        history = self._history if is_new else []
        # every call of the environment's methods has the timeout for itself
        step_s = 0.0 if completion is None else min(call_s, max(0.0, self._left_s))
        request: PlayRequest = {
            "environment": self._number,
            "prompt": self.prompt if is_new else None,
            "start_messages": self.start_messages,
            "history": history,
            "completion": completion,
            "call_s": call_s,
            "step_s": step_s,
        }
        return request, call_s * (is_new + len(history)) + step_s + GRACE_S


def check_environment(name: str, args: JsonDict, environment: Mapping[str, str] | None = None) -> list[str]:
    """The roles of an environment's messages; UserError when it cannot be loaded.

    It is imported in a process of its own.
    """
    with closing(WorkerPool(_field(name), MODULE, _hello(name, args), environment=environment)) as trial:
        (ready,) = trial.start()
    return ready["roles"]


def _field(name: str) -> str:
    return f"rl.environment={name!r}"


def _hello(name: str, args: JsonDict) -> EnvironmentHello:
    """The request that makes a process load an environment; UserError for a name that is neither
    known nor a path.
    """
    path = NAMED.get(name, name)
    if ":" not in path:
        raise UserError(
            f"rl.environment: there is no environment {name!r}; use {', '.join(NAMED)}, or package.module:Class"
        )
    return {"name": name, "path": path, "args": args}
