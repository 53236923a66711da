"""Our side of the sandbox: finds out what this system allows, starts the supervisor, reads its answers."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import platform
import select
import socket
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import rlpipe
from rlpipe.rewards.sandbox import child, jail, linux, seccomp
from rlpipe.rewards.sandbox.jail import Limits, Plan
from rlpipe.types import UserError, canonical_json

logger = logging.getLogger(__name__)

START = f"import sys; sys.path.insert(0, {str(Path(rlpipe.__file__).parent.parent)!r}); from rlpipe.rewards.sandbox.child import main; main()"
# nothing of ours; the same hash seed always, so that a program scores the same again
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
STOP_S = child.SWEEP_S + 1.0
GRACE_S = 30.0  # of the supervisor beyond a run's own time: it is ours, and busy machines are slow
CHUNK_BYTES = 1 << 16
PROBE_LIMITS = Limits(time_s=10.0, total_s=10.0, memory_mb=512, processes=4, files_mb=16)
PROBE = """
import colorsys, errno, json, os, socket, sys

def works(act):
    try:
        act()
    except OSError:
        return False
    return True

port, secret, parent = json.loads(input())
tried = {
    "programs reach the network": lambda: socket.create_connection(("127.0.0.1", port), 5),
    "programs read what this user may read": lambda: open(secret).read(),
    "programs can signal this user's processes": lambda: os.kill(parent, 0),
}
print(json.dumps([what for what, act in tried.items() if works(act)]))
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed; it says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended, and what it wrote (a tests' run: what the tests have to say).

    `status`: "ok"; "error" (exit code not 0, or a signal; tests: one failed); "timeout"; "output" (wrote too much);
    "unsupported" (the tests themselves are at fault).
    """

    status: str
    output: str


@dataclass(frozen=True)
class Run:
    """One start of the program: with `stdin` given, or with `tests` (the JSON of a check) calling its functions."""

    stdin: str | None = None
    tests: dict[str, Any] | None = None


def run(python: str, plan: Plan, limits: Limits, source: str, runs: list[Run]) -> Generator[Outcome]:
    """Runs `source` once for each of `runs`; the outcomes as they come. Closing the generator ends the sandbox.

    SandboxError when the sandbox could not be set up or did not answer.
    """
    with contextlib.ExitStack() as files:
        described = [_describe(files, one) for one in runs]
        path, readable = _interpreter(python)
        config = {
            "plan": asdict(plan), "limits": asdict(limits), "source": source, "path": path, "readable": readable,
            "runs": described, "parent": os.getpid(),
        }  # fmt: skip
        config_fd = _memory_file(files, canonical_json(config))
        process = subprocess.Popen(
            [python, "-P", "-s", "-S", "-c", START, str(config_fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,  # a kill of our group leaves it the time to end what it has started
            pass_fds=[config_fd, *(fd for one in described for name, fd in one.items() if name != "prelude")],
        )
    assert process.stdout is not None
    try:
        lines = _lines(process.stdout.fileno(), limits.time_s + GRACE_S)
        for _ in runs:
            told = json.loads(next(lines))
            outcome = Outcome(told["status"], base64.b64decode(told["output"]).decode(errors="replace"))
            if outcome.status == "sandbox":
                raise SandboxError(outcome.output)
            yield outcome
    finally:
        process.stdout.close()
        process.terminate()  # it ends everything below it
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lines(fd: int, timeout_s: float) -> Iterator[bytes]:
    """The lines of a pipe; SandboxError when it ends, or is silent for `timeout_s`."""
    buffer = b""
    while True:
        *whole, rest = buffer.split(b"\n")
        yield from whole
        buffer = rest
        chunks = [buffer]
        while b"\n" not in chunks[-1]:
            chunks.append(_chunk(fd, timeout_s))
        buffer = b"".join(chunks)


def _chunk(fd: int, timeout_s: float) -> bytes:
    if not select.select([fd], [], [], timeout_s)[0]:
        raise SandboxError(f"the supervisor did not answer in {timeout_s:.0f} s")
    if not (chunk := os.read(fd, CHUNK_BYTES)):
        raise SandboxError("the supervisor has ended; what it said is on stderr")
    return chunk


@lru_cache(maxsize=8)
def strongest_plan(python: str) -> Plan:
    """The strongest plan that works on this system with this interpreter. Warns once of what programs can do in spite of it.

    UserError when programs cannot be run at all.
    """
    if platform.system() != "Linux":
        raise UserError("reward code: programs are confined with Linux' own means; this system has none of them, run on Linux")
    refused: list[str] = []
    for plan in _plans():
        try:
            reached = _probe(python, plan)
        except SandboxError as error:
            refused.append(f"namespaces {plan.namespaces}: {error}")
            continue
        if reached:
            logger.warning("reward code: %s (the system allows no more; see docs/rewards-code.md)", "; ".join(reached))
        return plan
    raise UserError(
        f"reward code: no program can be run with {python!r} ({'; '.join(refused)}). Its folder must be readable by every user, "
        "or the process allowed to make mount namespaces; or give another interpreter: rl.reward_args = {code = {python = ...}}"
    )


def _plans() -> Iterator[Plan]:
    """From strong to weak."""
    drop = jail.can_have_uids()
    filters = [True, False] if seccomp.supported() else [False]
    landlock = min(linux.landlock_version(), 7)
    for namespaces in ("full", "partial", "none"):
        for use_filter in filters:
            plan = Plan(drop, not drop and namespaces != "none", namespaces, landlock, use_filter)
            yield plan if namespaces != "full" else replace(plan, landlock=0)  # there is no other file to see


def _probe(python: str, plan: Plan) -> list[str]:
    """What a program that tries can still reach; SandboxError where the plan does not work."""
    with tempfile.NamedTemporaryFile("w") as secret, socket.create_server(("127.0.0.1", 0)) as server:
        secret.write("secret")
        secret.flush()
        question = json.dumps([server.getsockname()[1], secret.name, os.getpid()])
        (outcome,) = run(python, plan, PROBE_LIMITS, PROBE, [Run(stdin=question)])
    if outcome.status != "ok":
        raise SandboxError(f"a program of the standard library ended with {outcome.status}")
    return json.loads(outcome.output)


@lru_cache(maxsize=8)
def _interpreter(python: str) -> tuple[list[str], list[str]]:
    """Where programs import from, and the folders they may read."""
    ask = "import json, sys; print(json.dumps([sys.path, [sys.prefix, sys.base_prefix]]))"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=30, check=True, env=ENVIRONMENT
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"reward code: python = {python!r} does not start ({error}); give the path of a Python 3.11 or newer"
        ) from error
    path, prefixes = json.loads(answer.stdout)
    path = [entry for entry in path if os.path.exists(entry)]
    return path, jail.readable_paths([*prefixes, *path])


def _describe(files: contextlib.ExitStack, one: Run) -> dict[str, Any]:
    if one.stdin is not None:
        return {"stdin": _memory_file(files, one.stdin.encode(errors="replace"))}
    assert one.tests is not None
    return {"tests": _memory_file(files, canonical_json(one.tests)), "prelude": "function" in one.tests}


def _memory_file(files: contextlib.ExitStack, content: bytes) -> int:
    """A file without a name, at its start; closed here when the sandbox has it."""
    fd = os.memfd_create("rlpipe")
    files.callback(os.close, fd)
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
