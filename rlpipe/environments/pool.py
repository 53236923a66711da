"""Environments in processes of their own, since one may raise, crash, print or never return.

Processes are a cache: an environment whose process was lost is made again in another one, which
gets the earlier completions again. A step that kills a process is tried once more, so that a kill
from outside costs only time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Mapping
from contextlib import closing
from functools import partial

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.environments.process import EnvironmentCall, EnvironmentFault, EnvironmentProcess
from rlpipe.environments.protocol import Message, Step
from rlpipe.environments.wire import EnvironmentHello, History, PlayRequest
from rlpipe.processes.pool import Child, ChildPool, code_environment
from rlpipe.records.prompt import RewardPrompt

log = logging.getLogger(__name__)
# processes lost in a row, nothing answered between, after which an environment counts as broken
LOSSES_MAX = 64
NAMED = {"calculator": "rlpipe.environments.calculator:Calculator"}


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
        self._total_s = total_s
        self.num_losses = 0  # in a row
        self._name = name
        given = _field(name), _hello(name, args), timeout_s, self._lost, environment or code_environment()
        self._processes = [EnvironmentProcess(*given) for _ in range(workers)]
        self._keys = itertools.count()
        self._num_answered = 0  # when a process was lost last

    def open(self, prompt: RewardPrompt, history: History = ()) -> RemoteEnvironment:
        """An environment for a prompt (`Prompt.for_reward`), which has answered `history` already;
        its process makes it at the first call.
        """
        process = min(self._processes, key=lambda process: process.num_environments)
        return RemoteEnvironment(process, next(self._keys), prompt, history, self._total_s)

    def _lost(self, message: str) -> None:
        """Counts a lost process; UserError when processes are lost again and again without an
        answer.
        """
        num_answered = sum(process.num_answered for process in self._processes)
        self.num_losses = 1 if num_answered > self._num_answered else self.num_losses + 1
        self._num_answered = num_answered
        log.warning("%s: %s", _field(self._name), message)
        if self.num_losses >= LOSSES_MAX:
            raise UserError(
                f"{_field(self._name)}: {self.num_losses} processes in a row were lost ({message}); mend it and start "
                "again: what was committed is kept"
            )

    async def close(self) -> None:
        """Kills the processes; callers that wait for one, or call later, get an EngineError."""
        await asyncio.gather(*(process.close() for process in self._processes))


class RemoteEnvironment:
    """The environment of one rollout, in whatever process."""

    def __init__(
        self, process: EnvironmentProcess, key: int, prompt: RewardPrompt, history: History, total_s: float | None
    ) -> None:
        self.prompt = prompt
        # its first messages to the policy, once known
        self.start_messages: list[Message] | None = None
        self._process = process
        self._key = key
        self._lives_in = 0  # the number of the process that holds it; 0: none yet
        self._history = [*history]
        self._dropped = False
        self._total_s = total_s
        self._took_s = 0.0  # its steps so far; repeated ones do not count
        process.num_environments += 1

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
            self._process.drop(self._key)

    async def _call(self, completion: str | None) -> Step | None:
        """Makes one call, and returns the step that answers a completion; EnvironmentFault."""
        left_s = math.inf if self._total_s is None else self._total_s - self._took_s
        call = EnvironmentCall(self._key, partial(self._request, completion), left_s)
        try:
            answer = await self._process.ask(call)
            if "reason" in answer:
                raise EnvironmentFault(answer["reason"], answer["message"])
        except EnvironmentFault as fault:
            if fault.reason == "environment_timeout" and left_s < self._process.timeout_s and completion is not None:
                message = f"its steps took more than rl.environment_total_s={self._total_s:g}"
                raise EnvironmentFault("environment_total_timeout", message) from fault
            raise
        self._took_s += answer["took_s"]
        self._lives_in = call.sent_to
        self.start_messages = answer["start_messages"] or self.start_messages
        return Step(**answer["step"]) if answer["step"] else None

    def _request(self, completion: str | None, number: int) -> PlayRequest:
        """The request to process `number`. A process that does not hold the environment gets all
        that it needs to make it.
        """
        is_new = self._lives_in != number
        return {
            "prompt": self.prompt if is_new else None,
            "start_messages": self.start_messages,
            "history": self._history if is_new else [],
            "completion": completion,
        }


def check_environment(name: str, args: JsonDict, environment: Mapping[str, str] | None = None) -> list[str]:
    """The roles of an environment's messages; UserError when it cannot be loaded.

    It is imported in a process of its own.
    """
    with closing(
        ChildPool(_field(name), "rlpipe.environments.worker", _hello(name, args), environment=environment)
    ) as children:
        (ready,) = children.on_all(Child.start)
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
