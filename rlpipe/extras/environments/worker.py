"""The process that holds environments: `python -m rlpipe.extras.environments.worker`.

An event loop, in which many calls may be in progress.

First request: {"name", "path", "args"}; answer: {"roles": [...], "is_async"} or {"error": message}.
Then {"environment", "prompt", "start_messages", "history", "completion", "call_s", "step_s"}, with
a key; answer with that key, as each is known: {"start_messages", "step", "took_s"} or {"reason",
"message"}. `environment` is the number of an environment, which has one call at a time. `prompt` is
null when this process holds it; else it is made here: started, and given the completions of
`history` again, each with the messages that it answered before. `completion` is null when only its
start is wanted. Each call of a method has `call_s`, the step that answers `completion` has
`step_s`, and took `took_s`. {"drop": number}: its rollout is over. A call of the environment in
progress is cancelled, it is closed where it has a `close`, and forgotten.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

from rlpipe.base.errors import UserError
from rlpipe.extras.environments.protocol import (
    DEFAULT_ROLES,
    Environment,
    Message,
    Step,
    checked_messages,
    checked_step,
)
from rlpipe.extras.environments.wire import (
    Answer,
    Dropped,
    EnvironmentHello,
    EnvironmentReady,
    Played,
    PlayLine,
    PlayRequest,
    StepFields,
)
from rlpipe.processes.kernel import kill_descendants
from rlpipe.processes.lines import LineReader, line_of
from rlpipe.processes.user_code import (
    ORPHAN_GRACE_S,
    CodeLacks,
    CodeRaised,
    InvalidAnswer,
    greeted,
    load_function,
    take_pipes,
    user_code,
)
from rlpipe.records.prompt import RewardPrompt

PROMPT_ROLES = ["system", "user", "assistant", "tool"]
T = TypeVar("T")


class NotAgain(Exception):
    """Raised when an environment is not made again as it was made before: no completion is to
    blame.
    """


class TookTooLong(Exception):
    """Raised when a call of a method takes longer than allowed."""


REASONS: dict[type[BaseException], str] = {
    InvalidAnswer: "environment_invalid", CodeRaised: "environment_error", TookTooLong: "environment_timeout",
    CodeLacks: "environment_unavailable", NotAgain: "environment_unavailable",
}  # fmt: skip


def load(hello: EnvironmentHello) -> tuple[EnvironmentReady, Home]:
    """Returns the facts of an environment that the owner needs, and the home that holds its
    rollouts' environments; UserError when it cannot be made."""
    name, args = hello["name"], hello["args"]
    kind = load_function("rl.environment", hello["path"])
    roles: list[str] = list(getattr(kind, "roles", DEFAULT_ROLES))
    try:
        with user_code():
            environment = kind(**args)
    except CodeRaised as error:
        raise UserError(f"rl.environment={name!r} refuses rl.environment_args={args} ({error})") from error
    methods = {method: getattr(environment, method, None) for method in ("start", "step")}
    missing = [name for name, method in methods.items() if not callable(method)]
    if missing:
        raise UserError(
            f"rl.environment={name!r} has no method {missing[0]!r}: see rlpipe/extras/environments/protocol.py"
        )
    if not roles or not all(isinstance(role, str) and role != "assistant" for role in roles):
        raise UserError(
            f"rl.environment={name!r}: its roles are {roles}; they are names, and 'assistant' is the policy's"
        )
    is_async = any(map(inspect.iscoroutinefunction, methods.values()))
    return {"roles": roles, "is_async": is_async}, Home(lambda: kind(**args), roles)


class Home:
    """The environments that this process holds."""

    def __init__(self, make: Callable[[], Environment], roles: list[str]) -> None:
        self.make = make
        self.roles = roles
        self._held: dict[int, Environment] = {}
        self._calls: dict[int, asyncio.Task[Played]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._call_s = 0.0

    async def live(self, requests: BinaryIO, answers: BinaryIO) -> None:
        """Answers requests until the owner closes the pipe, or a bug of rlpipe ends this
        process.
        """
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._answers, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, answers)
        await loop.connect_read_pipe(lambda: LineReader(self._hear, self._end), requests)
        while not self._ended.done():
            self._arm()
            await asyncio.wait({self._ended}, timeout=ORPHAN_GRACE_S / 2)
        self._ended.result()

    def _arm(self) -> None:
        """Sets a kernel timer that ends this process if the owner is gone and code blocks the loop,
        even when it holds the GIL.
        """
        signal.setitimer(signal.ITIMER_REAL, 2 * self._call_s + ORPHAN_GRACE_S)

    def _end(self, error: BaseException | None = None) -> None:
        if not self._ended.done():
            self._ended.set_exception(error) if error else self._ended.set_result(None)

    def _hear(self, message: PlayLine | Dropped) -> None:
        if "drop" in message:
            if (call := self._calls.get(message["drop"])) is not None:
                call.cancel()  # once it has ended, it is forgotten too
            else:
                self._forget(message["drop"])
            return
        key, request = message["key"], message["request"]
        number, self._call_s = request["environment"], request["call_s"]
        assert number not in self._calls, "an environment has one call at a time"
        self._arm()
        self._calls[number] = asyncio.create_task(self._answered(number, request))
        self._calls[number].add_done_callback(lambda call: self._tell(key, number, call))

    def _tell(self, key: int, number: int, call: asyncio.Task[Played]) -> None:
        """Sends the answer to a call of an environment; a fault as its reason."""
        if self._ended.done():
            return None  # the owner is gone
        del self._calls[number]
        error = None if call.cancelled() else call.exception()
        if call.cancelled():  # no rollout waits for it, but the owner counts calls in progress
            self._forget(number)
            answer: Answer = {"key": key, "reason": "environment_error", "message": "it was dropped"}
        elif error is None:
            answer = {"key": key, **call.result()}
        elif type(error) in REASONS:
            answer = {"key": key, "reason": REASONS[type(error)], "message": str(error)}
        else:
            return self._end(error)
        return self._answers.write(line_of(answer))

    def _forget(self, number: int) -> None:
        """Ends the environment of a rollout that is over: it may close what it has opened."""
        close = getattr(self._held.pop(number, None), "close", None)
        if callable(close):
            closing = asyncio.create_task(in_time(close, lambda _: None, self._call_s))
            self._closing.add(closing)
            closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            print(f"rl.environment: close: {error}", flush=True)  # to the log: the rollout has its outcome

    async def _answered(self, number: int, request: PlayRequest) -> Played:
        loop = asyncio.get_running_loop()
        played: Played = {"start_messages": None, "step": None, "took_s": 0.0}
        if (prompt := request["prompt"]) is not None:
            try:
                played["start_messages"] = await self._made(number, prompt, request)
            except (*REASONS,) as error:
                if request["completion"] is None:
                    raise
                raise NotAgain(f"it cannot be made again: {error}") from error
        assert number in self._held, "the owner knows which environments this process holds"
        environment = self._held[number]
        began_s = loop.time()
        if (completion := request["completion"]) is not None:
            step = await in_time(lambda: environment.step(completion), self._checked_step, request["step_s"])
            played["step"] = cast("StepFields", vars(step))
        played["took_s"] = loop.time() - began_s
        return played

    async def _made(self, number: int, prompt: RewardPrompt, request: PlayRequest) -> list[Message]:
        """The first messages of an environment that is made here, and has answered the history of
        the request again.
        """
        call_s = request["call_s"]
        said = await in_time(lambda: self._start(number, prompt), self._checked_start, call_s)
        messages = same_again("start", said, request["start_messages"])
        environment = self._held[number]
        for completion, before in request["history"]:
            again = await in_time(lambda text=completion: environment.step(text), self._checked_step, call_s)
            same_again("step", again.messages, before)
        return messages

    def _start(self, number: int, prompt: RewardPrompt) -> Any:
        environment = self._held[number] = self.make()
        return environment.start(prompt)

    def _checked_start(self, said: Any) -> list[Message]:
        messages = checked_messages(said, PROMPT_ROLES)
        if not messages or messages[-1]["role"] == "assistant":
            raise InvalidAnswer(f"start gave {messages!r:.200}: it must end with a message to the policy")
        return messages

    def _checked_step(self, said: Any) -> Step:
        return checked_step(said, self.roles)


def same_again(method: str, said: list[Message], before: list[Message] | None) -> list[Message]:
    """The messages; InvalidAnswer when they differ from `before`, where that is given."""
    if before is not None and said != before:
        raise InvalidAnswer(f"{method} gave {said!r:.200}, and before that {before!r:.200}")
    return said


async def in_time(method: Callable[[], Any], check: Callable[[Any], T], timeout_s: float) -> T:
    """Returns the method's result, checked: at once, or after it was awaited. TookTooLong past
    `timeout_s`; the call is cancelled then, unless it refuses.
    """
    loop, took_s = asyncio.get_running_loop(), 0.0

    async def called() -> T:
        nonlocal took_s
        began_s = loop.time()
        with user_code():
            value = method()
            checked = check(await value if inspect.isawaitable(value) else value)
        took_s = loop.time() - began_s
        return checked

    call = asyncio.create_task(called())
    try:
        await asyncio.wait({call}, timeout=timeout_s)
        if not call.done() or took_s > timeout_s:
            raise TookTooLong(f"took more than rl.environment_timeout_s={timeout_s:g}")
        if call.cancelled():
            raise CodeRaised("it cancelled itself")
        return call.result()
    finally:
        call.cancel()


def main() -> None:
    requests, answers = take_pipes()
    home = greeted(requests, answers, load)
    if home is not None:
        asyncio.run(home.live(requests, answers))
        kill_descendants(os.getpid())


if __name__ == "__main__":
    main()
