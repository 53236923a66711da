"""The process that runs an agent: `python -m rlpipe.agents.worker`, one rollout at a time.

First line in: {"agent"}; out: {} or {"error": message}. Then {"prompt", "base_url", "api_key"}, out: {"reward", "metrics"} or {"reason", "message"},
or {"signal"} when the command was killed. An agent is a command, run anew for each rollout, or a function that this process keeps.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpipe.environments.protocol import Step, checked_step
from rlpipe.processes.launch import PARENT_POLL_S
from rlpipe.processes.user_code import CodeRaised, InvalidAnswer, Loaded, load_function, serve, user_code
from rlpipe.types import JsonDict, UserError

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
SCRIPTS = (".py", ".sh", ".js", ".ts")
TAIL_CHARS = 1000  # of what a command wrote last


def load(hello: JsonDict) -> Loaded:
    """What runs the agent; UserError when there is none."""
    agent = hello["agent"]
    if FUNCTION.fullmatch(agent):
        function = load_function("rl.agent", agent)
        return {}, lambda request: call(function, request)
    argv = command_of(agent)
    return {}, lambda request: run(argv, request)


def command_of(agent: str) -> list[str]:
    """The command's words, its program as a path; UserError when that, or the script after it, is not there. `python` is the one that runs this."""
    words = shlex.split(agent)
    program = shutil.which(words[0], path=_path()) if words else None
    if program is None:
        raise UserError(
            f"rl.agent={agent!r}: there is no program {words[:1]}; name one that is installed, or package.module:function"
        )
    script = next((word for word in words[1:2] if word.endswith(SCRIPTS) and not Path(word).is_file()), "")
    if script:
        raise UserError(
            f"rl.agent={agent!r}: there is no file {script} in {os.getcwd()}; start from its folder, or write the whole path"
        )
    return [program, *words[1:]]


def run(argv: list[str], request: JsonDict) -> JsonDict:
    """Runs the command for one rollout: it reads the prompt as JSON, and finds URL and key where OpenAI's clients look for them."""
    done = subprocess.run(
        argv,
        input=json.dumps(request["prompt"]),
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PATH": _path(), **_settings(request)},
    )
    if done.returncode < 0:
        return {"signal": signal.Signals(-done.returncode).name}
    if done.returncode:
        return {"reason": "agent_error", "message": f"exit code {done.returncode}: {done.stderr.strip()[-TAIL_CHARS:]}"}
    return outcome_of(last_line(done.stdout))


def call(function: Callable[..., Any], request: JsonDict) -> JsonDict:
    """Calls the function for one rollout, awaiting what it returns."""
    os.environ.update(_settings(request))  # where clients look for them
    try:
        with user_code():
            value = function(request["prompt"], {"base_url": request["base_url"], "api_key": request["api_key"]})
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            said = json.loads(json.dumps(value))
    except CodeRaised as error:
        return {"reason": "agent_error", "message": str(error)}
    return outcome_of(said)


def outcome_of(said: Any) -> JsonDict:
    """What an agent says at its end: {"reward", "metrics"}, reward null where it gives none; or the fault agent_invalid."""
    said = said if isinstance(said, dict) else {}
    reward, metrics = (said.get(name) for name in ("reward", "metrics"))
    given = Step(done=True, reward=0.0 if reward is None else reward, metrics={} if metrics is None else metrics)
    try:
        checked = checked_step(given, [])
    except InvalidAnswer as error:
        return {"reason": "agent_invalid", "message": f"its outcome: {error}"}
    return {"reward": None if reward is None else checked.reward, "metrics": checked.metrics}


def last_line(output: str) -> Any:
    """The last line of a command's output as JSON; none where that is none."""
    lines = output.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _settings(request: JsonDict) -> dict[str, str]:
    base_url, key = request["base_url"], request["api_key"]
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


def _end_with_owner() -> None:
    """Kills this process and the command that it runs when the owner ends, however that ended."""
    owner = os.getppid()

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(PARENT_POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-owner").start()


if __name__ == "__main__":
    _end_with_owner()
    serve(load)
