"""The process that environments live in: `python -m rlpipe.environments.worker`.

First line in: {"name", "path", "args"}; out: {"roles": [...]} or {"error": message}.
Then {"key", "prompt", "start_messages", "history", "completion", "dropped"}, out: {"start_messages", "step"} or {"reason", "message"}.
`prompt` is null when this process holds the environment `key`; else it is made here: started, and given the completions of `history`
again, each with the messages that it answered before. `completion` is null when only its start is wanted.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.environments.protocol import DEFAULT_ROLES, Environment, Message, checked_messages, checked_step
from rlpipe.processes.user_code import CodeRaised, InvalidAnswer, Loaded, load_function, serve, user_code
from rlpipe.types import JsonDict, UserError

PROMPT_ROLES = ["system", "user", "assistant", "tool"]


def load(hello: JsonDict) -> Loaded:
    """The roles of an environment's messages, and what answers the calls; UserError when it cannot be made."""
    name, args = hello["name"], hello["args"]
    kind = load_function("rl.environment", hello["path"])
    roles: list[str] = list(getattr(kind, "roles", DEFAULT_ROLES))
    try:
        with user_code():
            environment = kind(**args)
    except CodeRaised as error:
        raise UserError(f"rl.environment={name!r} refuses rl.environment_args={args} ({error})") from error
    missing = [method for method in ("start", "step") if not callable(getattr(environment, method, None))]
    if missing:
        raise UserError(f"rl.environment={name!r} has no method {missing[0]!r}: see rlpipe/environments/protocol.py")
    if not roles or not all(isinstance(role, str) and role != "assistant" for role in roles):
        raise UserError(f"rl.environment={name!r}: its roles are {roles}; they are names, and 'assistant' is the policy's")
    return {"roles": roles}, Home(lambda: kind(**args), roles).answer


class Home:
    """The environments that this process holds."""

    def __init__(self, make: Callable[[], Environment], roles: list[str]) -> None:
        self.make = make
        self.roles = roles
        self._held: dict[int, Environment] = {}

    def answer(self, request: JsonDict) -> JsonDict:
        """One request's answer; a fault as its reason."""
        for key in request["dropped"]:
            self._held.pop(key, None)
        try:
            with user_code():
                start_messages = self._make(request) if request["prompt"] is not None else None
                assert request["key"] in self._held, "the owner knows which environments this process holds"
                completion, environment = request["completion"], self._held[request["key"]]
                step = None if completion is None else vars(checked_step(environment.step(completion), self.roles))
            return {"start_messages": start_messages, "step": step}
        except InvalidAnswer as error:
            return {"reason": "environment_invalid", "message": str(error)}
        except CodeRaised as error:
            return {"reason": "environment_error", "message": str(error)}

    def _make(self, request: JsonDict) -> list[Message]:
        environment = self._held[request["key"]] = self.make()
        messages = checked_messages(environment.start(request["prompt"]), PROMPT_ROLES)
        if not messages or messages[-1]["role"] == "assistant":
            raise InvalidAnswer(f"start gave {messages!r:.200}: it must end with a message to the policy")
        if request["start_messages"] is not None and messages != request["start_messages"]:
            raise InvalidAnswer(f"start gave {messages!r:.200}, and before that {request['start_messages']!r:.200}")
        for completion, before in request["history"]:
            again = checked_step(environment.step(completion), self.roles).messages
            if again != before:
                raise InvalidAnswer(f"step gave {again!r:.200} to what it had answered with {before!r:.200}")
        return messages


if __name__ == "__main__":
    serve(load)
