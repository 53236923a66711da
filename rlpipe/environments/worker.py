"""The process that environments live in: `python -m rlpipe.environments.worker`.

First line in: {"name", "args"}; out: {"roles": [...]} or {"error": message}.
Then {"key", "prompt", "asked", "history", "completion", "dropped"}, out: {"asked", "step"} or {"reason", "message"}. `prompt` is null when this process holds the environment `key`; else it is made here: started, and told the `history` of
completions again, each with the messages it has answered before. `completion` is null when only its start is wanted.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.child import Answer, describe, serve
from rlpipe.environments.protocol import Environment, InvalidAnswer, Message, checked_messages, checked_step
from rlpipe.environments.registry import resolve
from rlpipe.types import JsonDict

PROMPT_ROLES = ["system", "user", "assistant", "tool"]


def load(hello: JsonDict) -> tuple[JsonDict, Answer]:
    """The roles of an environment's messages, and what answers the calls; UserError when it cannot be loaded."""
    make, roles = resolve(hello["name"], hello["args"])
    return {"roles": roles}, Home(make, roles).answer


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
            asked = self._make(request) if request["prompt"] is not None else None
            told = {"asked": asked, "step": None}
            if request["completion"] is not None:
                told["step"] = checked_step(self._held[request["key"]].step(request["completion"]), self.roles)
            return told
        except InvalidAnswer as error:
            return {"reason": "environment_invalid", "message": str(error)}
        except Exception as error:  # a user's environment may raise anything; the rollout gets a counted reason
            return {"reason": "environment_error", "message": describe(error)}

    def _make(self, request: JsonDict) -> list[Message]:
        environment = self._held[request["key"]] = self.make()
        asked = checked_messages(environment.start(request["prompt"]), PROMPT_ROLES)
        if not asked or asked[-1]["role"] == "assistant":
            raise InvalidAnswer(f"start gave {asked!r:.200}: it must end with a message to the policy")
        if request["asked"] is not None and asked != request["asked"]:
            raise InvalidAnswer(f"start gave {asked!r:.200}, and before that {request['asked']!r:.200}")
        for completion, messages in request["history"]:
            again = checked_step(environment.step(completion), self.roles)["messages"]
            if again != messages:
                raise InvalidAnswer(f"step gave {again!r:.200} to what it had answered with {messages!r:.200}")
        return asked


if __name__ == "__main__":
    serve(load)
