"""The protocol of environments, and the checks of their answers. The module of an environment needs
to import nothing else of rlpipe.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlpipe.processes.answers import checked_numbers
from rlpipe.processes.user_code import InvalidAnswer
from rlpipe.records.prompt import Message, RewardPrompt, is_message

CHARS_MAX = 1_000_000  # of what an environment says at a time
DEFAULT_ROLES = ("user",)


@dataclass(frozen=True)
class Step:
    """The answer of an environment to a completion.

    Example: Step([{"role": "tool", "content": "148"}], metrics={"tool_calls": 1}). The policy gets
    `messages`, unless `done`; rewards and metrics of a rollout's steps add up.
    """

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The world of one rollout, made anew for each with `rl.environment_args`.

    Its answers are a function of the prompt and the completions alone: it may be made again in
    another process, and get them again. `async` methods may wait for other things meanwhile: then
    thousands of environments live in one process side by side. An attribute `roles` names the roles
    of its messages; without it they are ("user",). A method `close`, where there is one, is called
    when the rollout is over, unless the process has died.
    """

    def start(self, prompt: RewardPrompt) -> list[Message] | Awaitable[list[Message]]:
        """Returns the first messages to the policy; `prompt` is the one that a reward gets
        (prompt_id, messages, answer, metadata).
        """
        ...

    def step(self, completion: str) -> Step | Awaitable[Step]:
        """The answer to one completion of the policy, without special tokens."""
        ...


def checked_messages(said: Any, roles: list[str]) -> list[Message]:
    """Messages {"role", "content"} as plain JSON; InvalidAnswer when they are not messages, or have
    a role that is not in `roles`.
    """
    if not isinstance(said, list):
        raise InvalidAnswer(f"messages must be a list, and are {said!r:.200}")
    for message in said:
        if not is_message(message):
            raise InvalidAnswer(f"a message needs a 'role' and a 'content', both text, and is {message!r:.200}")
        if message["role"] not in roles:
            raise InvalidAnswer(
                f"a message has role {message['role']!r}, and the environment's roles are {', '.join(roles)}"
            )
    if sum(len(message["content"]) for message in said) > CHARS_MAX:
        raise InvalidAnswer(f"messages are longer than {CHARS_MAX} characters")
    return [{"role": message["role"], "content": message["content"]} for message in said]


def checked_step(step: Any, roles: list[str]) -> Step:
    """A step as plain JSON has it; InvalidAnswer says what is wrong with it."""
    if not isinstance(step, Step):
        raise InvalidAnswer(f"step gave {step!r:.200}, and must give an rlpipe.extras.environments.protocol.Step")
    messages = checked_messages(step.messages, roles)
    if not (step.done or messages):
        raise InvalidAnswer("step is neither done nor says anything")
    reward, metrics = checked_numbers(step.reward, step.metrics)
    return Step(messages, bool(step.done), reward, metrics)
