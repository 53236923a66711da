"""A process that runs a user's code, which may raise, crash, print or never return, and its owner: JSON lines over pipes."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from rlpipe.types import JsonDict, UserError

START_TIMEOUT_S = 120.0
CHUNK_BYTES = 1 << 16
POLL_S = 0.5
MESSAGE_CHARS_MAX = 1000
LATE_S = 60.0  # that an answer may take to be read which was begun before the deadline
ORPHAN_GRACE_S = 3.0  # after its owner's deadline, the kernel ends code that never returns

Answer = Callable[[JsonDict], JsonDict]


class ProcessEnded(Exception):
    """The process died before it answered."""


class ChildProcess:
    """`python -m <module>`, which calls `serve`, as its owner sees it. One request at a time; dead after any fault."""

    def __init__(self, field: str, module: str, hello: JsonDict, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """`field` is what errors name: the user's code is loaded for it. `wait_ready` comes first, then `ask`."""
        self._field = field
        self._hello = hello
        self._start_timeout_s = start_timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a kill takes the code's own children too
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._is_idle = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._is_idle and not self._has_ended()

    def _has_ended(self) -> bool:
        """Found without reaping it: until `kill` its process group is its own, so that its children are reached."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait_ready(self) -> JsonDict:
        """What it tells of the code that it has loaded; UserError when it cannot, or is not ready in time."""
        try:
            told = self.ask(self._hello, self._start_timeout_s)
        except TimeoutError as error:
            raise self._unready(f"did not answer in {self._start_timeout_s:.0f} s") from error
        except ProcessEnded as error:
            raise self._unready(f"ended with code {self._process.returncode}") from error
        if "error" in told:
            self.kill()
            raise UserError(told["error"])
        return told

    def ask(self, request: JsonDict, timeout_s: float) -> JsonDict:
        """The answer; ProcessEnded, or TimeoutError after which the process is dead too."""
        assert self._is_idle
        self._is_idle = False
        try:
            answer = self._exchange({"request": request, "timeout_s": timeout_s}, timeout_s)
            self._is_idle = True
            return answer
        finally:
            if not self._is_idle:
                self.kill()

    def stop(self) -> None:
        """SIGKILL to the process and its children; whoever asks it, in another thread, gets ProcessEnded."""
        if self._process.returncode is None:  # once reaped, the pid may be someone else's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Stops it and closes its pipes, which no other thread may be using; returns when it is gone."""
        self.stop()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def _exchange(self, line: JsonDict, timeout_s: float) -> JsonDict:
        deadline_s = time.monotonic() + timeout_s
        outgoing = memoryview(json.dumps(line).encode() + b"\n")
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while not answer.endswith(b"\n"):
                left_s = deadline_s - time.monotonic()
                ready = {key.fileobj for key, _ in selector.select(max(0.0, min(left_s, POLL_S)))}
                # an answer that is here is in time, when it is this process that was stopped or had no processor
                if left_s <= 0 and (self._stdout not in ready or left_s < -LATE_S):
                    raise TimeoutError
                if self._stdin in ready:
                    try:
                        outgoing = outgoing[os.write(self._stdin.fileno(), outgoing[:CHUNK_BYTES]) :]
                    except BrokenPipeError as error:
                        raise ProcessEnded("its process died") from error
                    if not outgoing:
                        selector.unregister(self._stdin)
                if self._stdout in ready:
                    chunk = os.read(self._stdout.fileno(), CHUNK_BYTES)
                    answer += chunk
                    if not chunk and time.monotonic() < deadline_s:
                        raise ProcessEnded("its process died")
                    if not chunk:  # its own alarm was quicker than this loop
                        raise TimeoutError
                elif not ready and self._has_ended():  # a child of its own may hold the pipe
                    raise ProcessEnded("its process died")
        return json.loads(answer)

    def _unready(self, what: str) -> UserError:
        return UserError(f"{self._field}: the process that loads it {what}; its output is above")


def serve(load: Callable[[JsonDict], tuple[JsonDict, Answer]]) -> None:
    """The life of such a process, until its stdin closes.

    `load` gets the owner's first request, and gives what the owner is told when it is ready and what answers each further one;
    UserError when it cannot.
    """
    requests, answers = _take_pipes()
    try:
        ready, answer = load(json.loads(requests.readline())["request"])
    except UserError as error:
        _send(answers, {"error": str(error)})
        return
    _send(answers, ready)
    for line in requests:
        asked = json.loads(line)
        # if the owner is gone too, the kernel ends code that never returns, even when it holds the GIL
        signal.setitimer(signal.ITIMER_REAL, asked["timeout_s"] + ORPHAN_GRACE_S)
        told = answer(asked["request"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, told)


def describe(error: Exception) -> str:
    """What was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    assert frames
    return f"{type(error).__name__}: {str(error)[:MESSAGE_CHARS_MAX]} ({frames[-1].filename}:{frames[-1].lineno})"


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes (from, to) the owner, out of reach of code that prints or reads: it gets stderr and an empty stdin."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return requests, answers


def _send(answers: BinaryIO, value: JsonDict) -> None:
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()
