"""The process that runs an agent: `python -m rlpipe.extras.agents.worker`, one rollout at a time.

First line in: {"agent"}; out: {} or {"error": message}. Then {"prompt", "base_url", "api_key"},
out: {"reward", "metrics"} or {"reason", "message"}, or {"signal"} when the command was killed. An
agent is a command, run anew for each rollout, or a function that this process keeps.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, final

from rlpipe.base.errors import UserError
from rlpipe.processes.answers import checked_numbers
from rlpipe.processes.kernel import kill_descendants, seclude
from rlpipe.processes.user_code import CodeLacks, CodeRaised, InvalidAnswer, Loaded, load_function, serve, user_code
from rlpipe.records.prompt import RewardPrompt

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
SCRIPTS = (".py", ".sh", ".js", ".ts")
TAIL_CHARS = 1000  # of what a command wrote last, in a message
TAIL_BYTES = 1 << 16  # that are kept of each of its outputs; the line of its outcome is among them
# what is read at a time, and after its end: pipes hold 1 MiB at most
CHUNK_BYTES, REST_BYTES_MAX = 1 << 16, 4 << 20
END_POLL_S = 0.05
AWAY_CODES = (os.EX_UNAVAILABLE, os.EX_TEMPFAIL)  # 69, 75: a service is away, in sysexits.h


class AgentHello(TypedDict):
    """The first request: the agent, a command or the path of a function."""

    agent: str


class AgentRequest(TypedDict):
    """One rollout to play: its prompt, and the door of the endpoint that is open for it."""

    prompt: RewardPrompt
    base_url: str
    api_key: str


@final
class AgentEnd(TypedDict):
    """The outcome that an agent returned; reward null where it returned none."""

    reward: float | None
    metrics: dict[str, float]


@final
class AgentFailure(TypedDict):
    """The fault of an agent: the reason, as in AgentFault, and a message for a person."""

    reason: str
    message: str


@final
class AgentKilled(TypedDict):
    """The end of an agent that was killed."""

    signal: str


AgentAnswer = AgentEnd | AgentFailure | AgentKilled


def load(hello: AgentHello) -> Loaded:
    """Returns the function that runs the agent; UserError when there is none."""
    agent = hello["agent"]
    if FUNCTION.fullmatch(agent):
        function = load_function("rl.agent", agent)
        return {}, lambda request: call(function, request)
    argv = command_of(agent)
    return {}, lambda request: run(argv, request)


def command_of(agent: str) -> list[str]:
    """The command's words, its program as a path; UserError when the program, or the script after
    it, does not exist. `python` is the interpreter of this process.
    """
    words = shlex.split(agent)
    program = shutil.which(words[0], path=_path()) if words else None
    if program is None:
        raise UserError(
            f"rl.agent={agent!r}: there is no program {words[:1]}; name one that is installed, or"
            " package.module:function"
        )
    script = next((word for word in words[1:2] if word.endswith(SCRIPTS) and not Path(word).is_file()), "")
    if script:
        raise UserError(
            f"rl.agent={agent!r}: there is no file {script} in {os.getcwd()}; start from its folder, or write the whole"
            " path"
        )
    return [program, *words[1:]]


def run(argv: list[str], request: AgentRequest) -> AgentAnswer:
    """Runs the command for one rollout: it reads the prompt as JSON, and finds URL and key in the
    variables of OpenAI's clients.
    """
    environment = {**os.environ, "PATH": _path(), **_settings(request)}
    process = subprocess.Popen(
        argv,
        bufsize=0,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # apart from this process, which it cannot signal, and which ends what it leaves
        preexec_fn=seclude,
    )
    output, errors = last_words(process, json.dumps(request["prompt"]).encode())
    kill_descendants(os.getpid())
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if process.returncode < 0:
        return {"signal": signal.Signals(-process.returncode).name}
    if process.returncode:
        reason = "agent_unavailable" if process.returncode in AWAY_CODES else "agent_error"
        return {"reason": reason, "message": f"exit code {process.returncode}: {errors.strip()[-TAIL_CHARS:]}"}
    return outcome_of(last_line(output))


def last_words(process: subprocess.Popen[bytes], given: bytes) -> tuple[str, str]:
    """The end of a command's stdout and stderr when it ended, TAIL_BYTES of each; it reads `given`.

    Programs that it started may hold the pipes longer, and write on: they are not waited for.
    """
    assert process.stdin and process.stdout and process.stderr
    tails, left, rest = {process.stdout: b"", process.stderr: b""}, memoryview(given), REST_BYTES_MAX
    with selectors.DefaultSelector() as selector, process.stdin, process.stdout, process.stderr:
        for pipe in (process.stdin, *tails):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE if pipe is process.stdin else selectors.EVENT_READ, pipe)
        while rest > 0:
            if not selector.get_map():
                process.wait()
            # first: what it wrote before is then there to be read
            has_ended = process.poll() is not None
            ready = [key.data for key, _ in selector.select(0 if has_ended else END_POLL_S)]
            if process.stdin in ready:
                ready.remove(process.stdin)
                try:
                    left = left[os.write(process.stdin.fileno(), left[:CHUNK_BYTES]) :]
                except BrokenPipeError:  # it reads no more, and may go on for long
                    left = left[:0]
                if not left or has_ended:
                    selector.unregister(process.stdin)
                    process.stdin.close()
            if has_ended and not ready:
                break
            for pipe in ready:
                chunk = os.read(pipe.fileno(), CHUNK_BYTES)
                tails[pipe] = (tails[pipe] + chunk)[-TAIL_BYTES:]
                rest -= len(chunk) if has_ended else 0
                if not chunk:
                    selector.unregister(pipe)
    output, errors = (tail.decode(errors="replace") for tail in tails.values())
    return output, errors


def call(function: Callable[..., Any], request: AgentRequest) -> AgentAnswer:
    """Calls the function for one rollout, awaiting what it returns."""
    os.environ.update(_settings(request))  # where clients look for them
    try:
        with user_code():
            value = function(request["prompt"], {"base_url": request["base_url"], "api_key": request["api_key"]})
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            said = json.loads(json.dumps(value))
    except CodeRaised as error:
        reason = "agent_unavailable" if isinstance(error, CodeLacks) else "agent_error"
        return {"reason": reason, "message": str(error)}
    return outcome_of(said)


def outcome_of(said: Any) -> AgentEnd | AgentFailure:
    """The outcome that an agent returns: {"reward", "metrics"}, reward null where it returns none;
    or the fault agent_invalid.
    """
    said = said if isinstance(said, dict) else {}
    reward, metrics = (said.get(name) for name in ("reward", "metrics"))
    try:
        number, metrics = checked_numbers(0.0 if reward is None else reward, {} if metrics is None else metrics)
    except InvalidAnswer as error:
        return {"reason": "agent_invalid", "message": f"its outcome: {error}"}
    return {"reward": None if reward is None else number, "metrics": metrics}


def last_line(output: str) -> Any:
    """The last line of a command's output as JSON; None where it is not JSON."""
    lines = output.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _settings(request: AgentRequest) -> dict[str, str]:
    base_url, key = request["base_url"], request["api_key"]
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


if __name__ == "__main__":
    serve(load)
