"""A pool of processes that run a user's code: each gets one request at a time, with a deadline, and
is replaced when it ends.
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
# to start Python and import the code, also on a busy machine; a process that hangs is given up
START_TIMEOUT_S = 300.0
# tries of a process that is killed while it loads the code (by the kernel, for memory, or from
# outside)
LOADS_MAX = 2
CHUNK_BYTES = 1 << 16
POLL_S = 0.5
END_S, END_POLL_S = 2.0, 0.01
ONE_THREAD = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}  # many processes share the machine
LATE_S = 60.0  # to read an answer that began before the deadline

T = TypeVar("T")


class ProcessEnded(Exception):
    """The process died before it answered."""


class ChildPool:
    """`workers` processes, `python -m <module>`, which all load the same code and run until
    `close`.
    """

    def __init__(
        self, field: str, module: str, hello: Record, *, workers: int = 1, start_timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Prepares the pool. `field`: the config field that errors name.

        The module must call `serve`; `hello`: the first request, which names the code to load.
        `environment`: the variables of the processes; None: those of `code_environment`.
        """
        assert workers > 0
        variables = code_environment() if environment is None else environment
        self.children = [Child(field, module, hello, start_timeout_s, variables) for _ in range(workers)]

    def on_all(self, function: Callable[[Child], T]) -> list[T]:
        """Calls the function with every child, each in the child's thread; raises the first error
        once all calls have ended.
        """
        calls = [child.thread.submit(function, child) for child in self.children]
        wait(calls)
        return [call.result() for call in calls]

    def close(self) -> None:
        """Kills the processes: waiting and later requests get an EngineError."""
        for child in self.children:
            child.close()
        self.on_all(Child.end)


class Child:
    """One process of a pool, which is replaced by a new one when it has ended.

    Only its `thread` starts it and sends requests: one call after the other.
    """

    def __init__(
        self, field: str, module: str, hello: Record, start_timeout_s: float, environment: Mapping[str, str]
    ) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=field)
        self.num_started = 0  # processes so far: tells a new process from the one before
        self._field = field
        self._module = module
        self._hello = hello
        self._start_timeout_s = start_timeout_s
        self._environment = environment
        self._ready: Any = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: Printed | None = None
        self._closed = False
        # guards `_process` and `_closed`, so that `close` misses no process
        self._lock = threading.Lock()

    def start(self) -> Any:
        """Starts a new process if there is none; returns the message that it sends when it is
        ready. UserError when it cannot load the code.
        """
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
        """Sends a request; returns the answer, whose fields its module defines. ProcessEnded or
        TimeoutError; after either the process is dead.
        """
        assert self._process is not None, "it was never started"
        answer = None
        try:
            answer = _exchange(self._process, {"request": request, "timeout_s": timeout_s}, timeout_s)
            return answer
        finally:
            if answer is None:
                self.end()  # the rest of this exchange would be read as the next answer
                self._check_open()

    def end(self) -> None:
        """Kills the process and its children; returns when it has ended."""
        if self._process is not None:
            with self._process:  # closes the pipes and waits for the process
                self._kill()
            assert self._printed is not None
            self._printed.wait()

    def close(self) -> None:
        """Kills the process, from any thread, and prevents a new one."""
        with self._lock:
            self._closed = True
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            kill(self._process)

    def _check_open(self) -> None:
        if self._closed:  # a call may outlive the run's session: it must not record a fault
            raise EngineError(f"{self._field}: its processes were closed")


def code_environment(secrets: Secrets = Secrets()) -> dict[str, str]:  # noqa: B008 (it cannot be changed)
    """The environment of a process that runs a user's code: ours, without secrets other than those
    that are passed, as a policy may get it printed.

    UserError when a passed one is not set.
    """
    unset = next((name for name in secrets.passed if name not in os.environ), None)
    if unset is not None:
        raise UserError(f"rl.pass_environment: {unset} is not set in the environment; set it, or leave it out")
    return {**secrets.without(os.environ), **ONE_THREAD}


def spawned(name: str, module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Printed]:
    """Starts `python -m <module>` with this environment, as a child of a keeper. Returns the
    keeper's process, with pipes to and from the module, and its output, which is logged under
    `name`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "rlpipe.processes.keeper", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,  # so a kill reaches children of the code, too
    )
    assert process.stderr is not None
    # only the thread of Printed reads and closes it
    printed, process.stderr = Printed(name, process.stderr), None
    return process, printed


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, its keeper and all their descendants, in any session, also if one of the
    two was killed from outside.
    """
    if process.returncode is None:  # once it is reaped, another process may have the pid
        signal_group(process, signal.SIGSTOP)  # so that it starts no other process meanwhile
        kill_descendants(process.pid)
        signal_group(process, signal.SIGKILL)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True when the process has ended. Does not reap it: until then its process group stays its
    own, so that a kill reaches its children.
    """
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Waits until a process that closed its pipes has ended, END_S at most: its keeper gets the
    exit status a moment later.
    """
    deadline_s = time.monotonic() + END_S
    while not has_ended(process) and time.monotonic() < deadline_s:
        time.sleep(END_POLL_S)


def _exchange(process: subprocess.Popen[bytes], line: Record, timeout_s: float) -> JsonDict:
    """Writes a line and reads one. ProcessEnded or TimeoutError."""
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
            # an answer that has arrived counts as in time: this process may have been stopped, or
            # had no processor
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
                    # at the deadline the process's own alarm may be faster than this loop
                    raise ProcessEnded("its process died") if time.monotonic() < deadline_s else TimeoutError
            elif not ready and has_ended(process):  # one of its children may hold the pipe open
                raise ProcessEnded("its process died")
    try:
        return parsed_line(answer)
    except ValueError as error:
        raise ProcessEnded(str(error)) from error
