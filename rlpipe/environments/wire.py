"""What the process that environments live in and its owner say to each other, one JSON line each
(`rlpipe.environments.worker` says in which order).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, final

from rlpipe.environments.protocol import Message
from rlpipe.records.prompt import RewardPrompt

History = Sequence[tuple[str, list[Message]]]  # completions, and what they were answered with


class EnvironmentHello(TypedDict):
    """The first line: an environment's name, the path of its class, and `rl.environment_args`."""

    name: str
    path: str
    args: dict[str, Any]


@final
class EnvironmentReady(TypedDict):
    """The answer to it: the roles of its messages, and if many calls of it may be under way."""

    roles: list[str]
    is_async: bool


@final
class EnvironmentRefused(TypedDict):
    """The other answer to it: why the environment does not load."""

    error: str


class PlayRequest(TypedDict):
    """What is asked of an environment.

    `prompt`: None where the process holds it. `history`: what it is told again. `completion`: None
    where only its start is wanted.
    """

    prompt: RewardPrompt | None
    start_messages: list[Message] | None
    history: History
    completion: str | None


@final
class PlayLine(PlayRequest):
    """The line that asks it: the environment's key, and the
    seconds of each call and of the step."""

    key: int
    timeout_s: float
    step_s: float


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
    """What an environment did: its start and its step, where it was asked for them, and the seconds
    of the step.
    """

    start_messages: list[Message] | None
    step: StepFields | None
    took_s: float


@final
class PlayedAnswer(Played):
    """The line that says it."""

    key: int


@final
class FaultAnswer(TypedDict):
    """The line that says why there is none: a reason, as EnvironmentFault has it."""

    key: int
    reason: str
    message: str


Answer = PlayedAnswer | FaultAnswer
