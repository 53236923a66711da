"""The pool of processes that run a user's code: each is asked one request at a time, with a
deadline, and replaced when it ends.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.values import JsonDict
from rlpipe.config.secrecy import Secrets
from rlpipe.processes.kernel import kill_descendants
from rlpipe.processes.launch import signal_group
from rlpipe.processes.lines import LINE_BYTES_MAX, parsed_line
from rlpipe.processes.printed import Printed
from rlpipe.processes.user_code import Record

log = logging.getLogger(__name__)
# to start Python and to import what it runs, on a busy machine too: what hangs is given up
START_TIMEOUT_S = 300.0
# of a process that is killed while it loads the code: by the kernel for memory, or by somebody
LOADS_MAX = 2
CHUNK_BYTES = 1 << 16
POLL_S = 0.5
END_S, END_POLL_S = 2.0, 0.01
ONE_THREAD = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}  # many processes share the machine
LATE_S = 60.0  # that an answer may take to be read which was begun before the deadline

T = TypeVar("T")


class ProcessEnded(Exception):
    """The process died before it answered."""


class ChildPool:
    """`workers` processes, `python -m <module>`, which all load the same code, from here to
    `close`.
    """

    def __init__(
        self, field: str, module: str, hello: Record, *, workers: int = 1, start_timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`field` is what errors name.

        The module calls `serve`; `hello` is the first request, which says what to load.
        `environment`: the variables of the processes; none: those of `code_environment`.
        """
        assert workers > 0
        variables = code_environment() if environment is None else environment
        self.children = [Child(field, module, hello, start_timeout_s, variables) for _ in range(workers)]

    def on_all(self, function: Callable[[Child], T]) -> list[T]:
        """Calls the function with every child, each in the child's thread; the first error once all
        have ended.
        """
        calls = [child.thread.submit(function, child) for child in self.children]
        wait(calls)
        return [call.result() for call in calls]

    def close(self) -> None:
        """Kills the processes: whoever waits for one, or asks later, gets an EngineError."""
        for child in self.children:
            child.close()
        self.on_all(Child.end)


class Child:
    """One process of a pool, replaced by a new one when it has ended.

    Only its `thread` starts and asks it: one call after the other.
    """

    def __init__(
        self, field: str, module: str, hello: Record, start_timeout_s: float, environment: Mapping[str, str]
    ) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=field)
        self.num_started = 0  # processes so far, so that a new one can be told from the one before
        self._field = field
        self._module = module
        self._hello = hello
        self._start_timeout_s = start_timeout_s
        self._environment = environment
        self._ready: Any = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: Printed | None = None
        self._closed = False
        self._lock = threading.Lock()  # of the two above: `close` misses no process

    def start(self) -> Any:
        """Returns the message that the process sends when it is ready, as its module says; starts a
        new process where there is none. UserError when it cannot load the code."""
        if self._process is not None and not has_ended(self._process):
            return self._ready
        for tries_left in reversed(range(LOADS_MAX)):
            self.end()
            with self._lock:
                self._check_open()
                self._process, self._printed = spawned(self._field, self._module, self._environment)
            self.num_started += 1
            try:
                self._ready = self.ask(self._hello, self._start_timeout_s)
                break
            except TimeoutError as error:
                raise self._not_loaded(f"did not answer in {self._start_timeout_s:.0f} s") from error
            except ProcessEnded as error:
                code = self._process.returncode
                if code >= 0 or not tries_left:
                    raise self._not_loaded(f"ended with code {code}") from error
                log.warning("%s: the process that loads it was killed (code %d): once more", self._field, code)
        if "error" in self._ready:
            self.end()
            raise UserError(self._ready["error"])
        return self._ready

    def _not_loaded(self, what: str) -> UserError:
        return UserError(f"{self._field}: the process that loads it {what}; its output is above")

    def ask(self, request: Record, timeout_s: float) -> Any:
        """The answer, with the fields that its module says; ProcessEnded, or TimeoutError. The
        process is dead after either."""
        assert self._process is not None, "it was never started"
        answer = None
        try:
            answer = _exchange(self._process, {"request": request, "timeout_s": timeout_s}, timeout_s)
            return answer
        finally:
            if answer is None:
                self.end()  # what is left of this exchange would be read as the next answer
                self._check_open()

    def end(self) -> None:
        """Kills the process and its children; returns when it is gone."""
        if self._process is not None:
            with self._process:  # closes the pipes and waits
                self._kill()
            assert self._printed is not None
            self._printed.wait()

    def close(self) -> None:
        """Kills the process, from any thread, and lets no other start."""
        with self._lock:
            self._closed = True
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            kill(self._process)

    def _check_open(self) -> None:
        if self._closed:  # what is at work may outlive the run's session: it must record no fault
            raise EngineError(f"{self._field}: its processes were closed")


def code_environment(secrets: Secrets = Secrets()) -> dict[str, str]:  # noqa: B008 (it cannot be changed)
    """The environment of a process that runs a user's code, where a policy may have it printed:
    ours without secrets but those passed.

    UserError where one of these is not set.
    """
    unset = next((name for name in secrets.passed if name not in os.environ), None)
    if unset is not None:
        raise UserError(f"rl.pass_environment: {unset} is not set in the environment; set it, or leave it out")
    return {**secrets.without(os.environ), **ONE_THREAD}


def spawned(name: str, module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Printed]:
    """A new process with this environment, `python -m <module>` below a keeper, whose the pid is,
    with pipes to it and from it; and what it prints, under this name.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "rlpipe.processes.keeper", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,  # a kill takes the code's own children too
    )
    assert process.stderr is not None
    printed, process.stderr = Printed(name, process.stderr), None  # whose thread alone reads and closes it
    return process, printed


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, its keeper, and all that it started, in whatever session; also where
    somebody else killed one of the two.
    """
    if process.returncode is None:  # once reaped, the pid may be someone else's
        signal_group(process, signal.SIGSTOP)  # it starts no other meanwhile
        kill_descendants(process.pid)
        signal_group(process, signal.SIGKILL)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Does not reap it: until then its process group is its own, so that a kill reaches its
    children.
    """
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Returns when a process has ended that closed its pipes, or after END_S: its keeper knows a
    moment later how.
    """
    deadline_s = time.monotonic() + END_S
    while not has_ended(process) and time.monotonic() < deadline_s:
        time.sleep(END_POLL_S)


def _exchange(process: subprocess.Popen[bytes], line: Record, timeout_s: float) -> JsonDict:
    """Writes a line and reads one; ProcessEnded or TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    outgoing = memoryview(json.dumps(line).encode() + b"\n")
    answer = bytearray()
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    os.set_blocking(stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        selector.register(stdin, selectors.EVENT_WRITE)
        while not answer.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            ready = {key.fileobj for key, _ in selector.select(max(0.0, min(left_s, POLL_S)))}
            # an answer that is here is in time, when it is this process that
            # was stopped or had no processor
            if left_s <= 0 and (stdout not in ready or left_s < -LATE_S):
                raise TimeoutError
            if stdin in ready:
                try:
                    outgoing = outgoing[os.write(stdin.fileno(), outgoing[:CHUNK_BYTES]) :]
                except BrokenPipeError as error:
                    raise ProcessEnded("its process died") from error
                if not outgoing:
                    selector.unregister(stdin)
            if stdout in ready:
                chunk = os.read(stdout.fileno(), CHUNK_BYTES)
                answer += chunk
                if len(answer) > LINE_BYTES_MAX:
                    raise ProcessEnded(f"its answer has more than {LINE_BYTES_MAX} bytes")
                if not chunk:
                    wait_for_end(process)
                    # at the deadline its own alarm was quicker than this loop
                    raise ProcessEnded("its process died") if time.monotonic() < deadline_s else TimeoutError
            elif not ready and has_ended(process):  # a child of its own may hold the pipe
                raise ProcessEnded("its process died")
    try:
        return parsed_line(answer)
    except ValueError as error:
        raise ProcessEnded(str(error)) from error
