"""Where benchmarks/weights.py measures: the nodes, what runs on them, the plain copy,
and the clock of what hosts do.

weights_world.py trainer|host ARGUMENTS    # `rlpipe trainer`, `rlpipe host`, whose parts are timed
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.engines.host import EngineHost
from rlpipe.engines.sglang_client import SglangClient
from rlpipe.processes.launch import free_port
from rlpipe.services.registration import ADDRESS_VARIABLE
from tests.network_world import Node
from tests.pipeline import kill_group

TIMES = "RLPIPE_TIMES"  # of a process: the file that it writes its spans to
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Span:
    """A part of the work, from and to in seconds of the clock."""

    part: str
    start: float
    end: float


def timed(function: Callable[..., Any], part: str, note: Callable[[Span], None]) -> Callable[..., Any]:
    """The same function, each call of which is noted."""

    @functools.wraps(function)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        start = time.time()
        answer = await function(*arguments, **named)
        note(Span(part, start, time.time()))
        return answer

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        start = time.time()
        answer = function(*arguments, **named)
        note(Span(part, start, time.time()))
        return answer

    return awaited if inspect.iscoroutinefunction(function) else called


def time_hosts() -> None:
    """The hosts of this process write the spans of their parts to the
    file that $RLPIPE_TIMES names."""

    def note(span: Span) -> None:
        with open(os.environ[TIMES], "a") as file:
            file.write(f"{json.dumps([span.part, span.start, span.end])}\n")

    EngineHost._fetch = timed(EngineHost._fetch, "fetch", note)
    EngineHost._prove = timed(EngineHost._prove, "prove", note)
    SglangClient.load = timed(SglangClient.load, "load", note)


def copy_here(folder: Path) -> Callable[[Path], float]:
    """A plain copy on this disk."""

    def copy(path: Path) -> float:
        began = time.time()
        shutil.copyfile(path, folder / "copy")
        ended = time.time()
        (folder / "copy").unlink()
        return ended - began

    return copy


@contextlib.contextmanager
def copier(folder: Path, nodes: dict[str, Node]) -> Iterator[Callable[[Path], float]]:
    """What copies a file from the trainer's node to all hosts at
    once; seconds until all have it."""
    port, program = free_port(), [sys.executable, str(Path(__file__).with_name("raw_copy.py"))]
    at = [nodes["trainer"].address, str(port)]

    def started(node: str, *arguments: str) -> subprocess.Popen[str]:
        command = [*nodes[node].inside, *program, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    def copy(path: Path) -> float:
        targets = [folder / f"copy-{node}" for node in nodes if node.startswith("host-")]
        receivers = [started(target.name[5:], "receive", *at, str(path), str(target)) for target in targets]
        began = time.time()
        for receiver in receivers:
            assert receiver.stdin is not None
            print(file=receiver.stdin, flush=True)
        ended = max(float(receiver.communicate(timeout=300)[0]) for receiver in receivers)
        for target in targets:
            assert target.stat().st_size == path.stat().st_size
            target.unlink()
        return ended - began

    sender = started("trainer", "send", *at)
    try:
        yield copy
    finally:
        sender.kill()
        sender.wait(timeout=10)


@contextlib.contextmanager
def services(folder: Path, nodes: dict[str, Node], store: str) -> Iterator[None]:
    """The trainer and two hosts on their nodes.

    Hosts have no look at the trainer's disk: it is covered where they are.
    """
    join, started = ["--store", store, "--run", "a"], list[subprocess.Popen[str]]()
    for name in ("trainer", "host-a", "host-b"):
        (folder / name).mkdir()
        cover = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder / "trainer")]
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            *(["trainer"] if name == "trainer" else ["host"]),
            *join,
        ]
        inside = [*nodes[name].inside, *([] if name == "trainer" else cover)]
        with (folder / name / "log").open("w") as log:
            started.append(
                subprocess.Popen([*inside, *command], cwd=folder / name, stdout=log,
                                 stderr=log, text=True, start_new_session=True,
                                 env={**os.environ, ADDRESS_VARIABLE: nodes[name].address})
            )  # fmt: skip
    try:
        yield
    finally:
        for process in started:
            kill_group(process)


def enter(node: Node) -> None:
    """This process, and what it starts, is on a node from here on."""
    with open(f"/proc/{node.inside[1].removeprefix('--target=')}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    time_hosts()
    from flows.cli import app

    app(sys.argv[1:])
