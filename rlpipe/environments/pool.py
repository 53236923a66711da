"""Environments in processes of their own, so that one may raise, crash, print or never return.

Processes are a cache: an environment whose process was lost is made again in another one, which gets its completions again. A step
that kills a process is tried once more, so that a process that was killed from outside costs nothing but time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from contextlib import closing

from rlpipe.environments.protocol import Message, Step
from rlpipe.processes.pool import Child, ChildPool, ProcessEnded
from rlpipe.records.prompt import RewardPrompt
from rlpipe.types import JsonDict, UserError

log = logging.getLogger(__name__)
TRIES_MAX = 2  # of a step whose process died
LOSSES_MAX = 64  # processes lost in a row, nothing answered between, after which an environment counts as broken
NAMED = {"calculator": "rlpipe.environments.calculator:Calculator"}


class EnvironmentFault(Exception):
    """An environment's rollout ends here. Reasons: environment_error, _timeout, _crash (its process died), _invalid."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EnvironmentProcess:
    """A process, and the environments in it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.num_environments = 0
        self.dropped: deque[int] = deque()  # keys that the process may forget


class EnvironmentPool:
    """`workers` processes, started when first needed, from here to `close`. Belongs to one event loop."""

    def __init__(self, name: str, args: JsonDict, workers: int, timeout_s: float) -> None:
        assert timeout_s > 0
        self.timeout_s = timeout_s
        self._name = name
        self.num_losses = 0  # in a row
        self._children = _children(name, args, workers)
        self._processes = [EnvironmentProcess(child) for child in self._children.children]
        self._keys = itertools.count()

    def open(self, prompt: RewardPrompt) -> RemoteEnvironment:
        """A fresh environment for a prompt (`Prompt.for_reward`); its process makes it with the first call."""
        process = min(self._processes, key=lambda process: process.num_environments)
        return RemoteEnvironment(self, process, next(self._keys), prompt)

    def lost(self, message: str) -> None:
        """Counts a process that was lost; UserError when nothing else happens to them."""
        self.num_losses += 1
        log.warning("rl.environment=%r: %s", self._name, message)
        if self.num_losses >= LOSSES_MAX:
            raise UserError(
                f"rl.environment={self._name!r}: {self.num_losses} processes in a row were lost ({message}); mend it and start "
                "again: what was committed is kept"
            )

    async def close(self) -> None:
        """Kills the processes; whoever waits for one, or asks later, gets an EngineError."""
        await asyncio.to_thread(self._children.close)


class RemoteEnvironment:
    """One rollout's environment, wherever it lives."""

    def __init__(self, pool: EnvironmentPool, process: EnvironmentProcess, key: int, prompt: RewardPrompt) -> None:
        self.prompt = prompt
        self.start_messages: list[Message] | None = None  # what it asked the policy at its start, once known
        self._pool = pool
        self._process = process
        self._key = key
        self._lives_in = 0  # the number of the process that holds it; 0: none yet
        self._history: list[tuple[str, list[Message]]] = []
        self._dropped = False
        process.num_environments += 1

    async def start(self) -> list[Message]:
        """What the policy is asked; EnvironmentFault."""
        await self._call(None)
        assert self.start_messages is not None
        return self.start_messages

    async def step(self, completion: str) -> Step:
        """Its answer to the next completion; EnvironmentFault."""
        step = await self._call(completion)
        assert step is not None, "a completion is answered with a step"
        self._history.append((completion, step.messages))
        return step

    def drop(self) -> None:
        """The rollout is over; said again, it changes nothing."""
        if not self._dropped:
            self._dropped = True
            self._process.num_environments -= 1
            self._process.dropped.append(self._key)

    async def _call(self, completion: str | None) -> Step | None:
        """One call, in its turn: what a completion is answered with; EnvironmentFault."""
        for _ in range(TRIES_MAX):
            try:
                answer = await asyncio.wrap_future(self._process.child.thread.submit(self._ask, completion))
            except ProcessEnded as error:
                self._pool.lost(f"prompt {self.prompt['prompt_id']}: {error}")
                continue
            except TimeoutError:
                message = f"took more than rl.environment_timeout_s={self._pool.timeout_s:g}"
                self._pool.lost(f"prompt {self.prompt['prompt_id']}: {message}")
                raise EnvironmentFault("environment_timeout", message) from None
            self._pool.num_losses = 0
            if "reason" in answer:
                raise EnvironmentFault(answer["reason"], answer["message"])
            self.start_messages = answer["start_messages"] or self.start_messages
            return Step(**answer["step"]) if answer["step"] else None
        raise EnvironmentFault("environment_crash", f"its process died {TRIES_MAX} times")

    def _ask(self, completion: str | None) -> JsonDict:
        """In the process's thread: what the process answers. One that does not hold the environment gets all that it needs to make it."""
        child, dropped = self._process.child, self._process.dropped
        child.start()
        is_new = self._lives_in != child.num_started
        request = {
            "key": self._key,
            "prompt": self.prompt if is_new else None,
            "start_messages": self.start_messages,
            "history": self._history if is_new else [],
            "completion": completion,
            "dropped": [dropped.popleft() for _ in range(len(dropped))],
        }
        # each call of the environment's methods has the timeout for itself
        num_calls = is_new + len(request["history"]) + (completion is not None)
        answer = child.ask(request, self._pool.timeout_s * num_calls)
        if "reason" not in answer:
            self._lives_in = child.num_started
        return answer


def check_environment(name: str, args: JsonDict) -> list[str]:
    """The roles of an environment's messages; UserError when it cannot be loaded. In a process of its own, which imports it."""
    with closing(_children(name, args, 1)) as children:
        (ready,) = children.on_all(Child.start)
    return ready["roles"]


def _children(name: str, args: JsonDict, workers: int) -> ChildPool:
    """Processes that load the environment; UserError for a name that is neither known nor a path."""
    path = NAMED.get(name, name)
    if ":" not in path:
        raise UserError(f"rl.environment: there is no environment {name!r}; use {', '.join(NAMED)}, or package.module:Class")
    hello = {"name": name, "path": path, "args": args}
    return ChildPool(f"rl.environment={name!r}", "rlpipe.environments.worker", hello, workers=workers)
