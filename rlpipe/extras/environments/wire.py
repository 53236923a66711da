"""The messages between a process that holds environments and its owner, one JSON line each (their
order: `rlpipe.extras.environments.worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, final

from rlpipe.extras.environments.protocol import Message
from rlpipe.records.prompt import RewardPrompt

History = Sequence[tuple[str, list[Message]]]  # completions, and the answers to them


class EnvironmentHello(TypedDict):
    """The first line: an environment's name, the path of its class, and `rl.environment_args`."""

    name: str
    path: str
    args: dict[str, Any]


@final
class EnvironmentReady(TypedDict):
    """The answer to EnvironmentHello: the roles of its messages, and if it takes many calls at
    once.
    """

    roles: list[str]
    is_async: bool


class PlayRequest(TypedDict):
    """A request to the environment of that number.

    `prompt`: None where the process holds the environment. `history`: earlier steps to repeat.
    `completion`: None where only its start is wanted. `call_s`: seconds for each call of a method,
    `step_s` for the step.
    """

    environment: int
    prompt: RewardPrompt | None
    start_messages: list[Message] | None
    history: History
    completion: str | None
    call_s: float
    step_s: float


@final
class PlayLine(TypedDict):
    """The line of a PlayRequest: a key for its answer, and the seconds that its owner waits."""

    key: int
    request: PlayRequest
    timeout_s: float


@final
class Dropped(TypedDict):
    """The line that says that a rollout is over."""

    drop: int


class StepFields(TypedDict):
    """The fields of a Step."""

    messages: list[Message]
    done: bool
    reward: float
    metrics: dict[str, float]


class Played(TypedDict):
    """The results of a PlayRequest: start and step, where they were requested, and the seconds of
    the step.
    """

    start_messages: list[Message] | None
    step: StepFields | None
    took_s: float


@final
class PlayedAnswer(Played):
    """The line of a Played."""

    key: int


@final
class FaultAnswer(TypedDict):
    """The line of a request that failed: a reason, as in EnvironmentFault."""

    key: int
    reason: str
    message: str


Answer = PlayedAnswer | FaultAnswer
