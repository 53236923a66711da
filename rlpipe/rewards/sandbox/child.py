"""The supervisor: a process of its own for one program, trusted and out of the program's reach. Starts it once for each run.

Started by `runner` with a file of JSON as its argument (a file descriptor), answers on stdout: for each run a line
{"status", "output"}. A run is {"stdin": fd} or {"tests": fd}: file descriptors, so that the expected
results in a tests file never enter the memory that the program is forked from.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlpipe.rewards.sandbox import jail, linux, processes, program
from rlpipe.rewards.sandbox.jail import Limits, Plan

OUTPUT_MAX_BYTES = 8 << 20
CHUNK_BYTES = 1 << 16
SETUP_S = 20.0
SWEEP_S = 5.0
TICK_S = 0.5
READY = b"+"


@dataclass
class Supervisor:
    """What stays the same for all runs of a program, and what is running now."""

    plan: Plan
    limits: Limits
    readable: list[str]
    source: str
    path: list[str]
    uids: list[int]  # of the program, and of the tests beside it
    wakeup: int  # readable when a child has ended or somebody wants us to stop
    ends_s: float = 0.0  # when all runs together are out of time; set by the first one
    stopping: bool = False
    started: set[int] = field(default_factory=set)  # children that nobody has waited for

    def run(self, what: dict[str, Any]) -> tuple[str, bytes]:
        """One run from start to the end of its last process: (status, output)."""
        folder = tempfile.mkdtemp(prefix="rlpipe-")
        pipes = [os.pipe(), os.pipe()]
        (reading, writing), (ready, readied) = pipes
        try:
            if "stdin" in what:
                main = self._fork(folder, [what["stdin"], writing], [], readied, lambda: program.run_main(self.source))
            else:
                main = self._fork_tests(folder, what, writing, readied)
            os.close(writing)
            os.close(readied)
            self._wait_ready(ready, 1 if "stdin" in what else 2)
            code, output = self._watch(main, reading)
        finally:
            self._sweep()
            os.close(reading)
            os.close(ready)
            processes.remove(folder)
        if isinstance(code, str):
            return code, output
        unsupported = "tests" in what and code == program.UNSUPPORTED
        return "ok" if code == 0 else "unsupported" if unsupported else "error", output

    def _fork_tests(self, folder: str, what: dict[str, Any], writing: int, readied: int) -> int:
        """The program, and beside it the tests that call it, in two sandboxes with two pipes between; the tests' process."""
        calls_in, calls_out = os.pipe()
        replies_in, replies_out = os.pipe()
        served = [calls_in, replies_out]
        self._fork(folder, [-1, -1], served, readied, lambda: program.serve(self.source, what["prelude"], *served))
        tests = [what["tests"], replies_in, calls_out]
        main = self._fork(folder, [-1, writing], tests, readied, lambda: program.run_tests(*tests))
        for fd in (calls_in, calls_out, replies_in, replies_out):
            os.close(fd)
        return main

    def _fork(self, folder: str, standard: list[int], keep: list[int], readied: int, body: Callable[[], int]) -> int:
        """A confined process that runs `body`, below its own process 1 where the plan has process namespaces.

        `standard`: its stdin and stdout, -1 for none. It writes READY to `readied` when all its limits hold, or what went wrong.
        """
        uid = self.uids[len(self.started)]
        busy = 0 if self.plan.drop or self.plan.user_namespace else jail.own_uid_processes()
        us = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                processes.as_child(us)
                self._confine(folder, standard, [*keep, readied], uid, busy)
                os.write(readied, READY)
                os.close(readied)
            except BaseException as error:
                with suppress(OSError):
                    os.write(readied, f"{type(error).__name__}: {error}".encode())
                os._exit(1)
            program.leave(body)
        self.started.add(pid)
        return pid

    def _confine(self, folder: str, standard: list[int], keep: list[int], uid: int, busy: int) -> None:
        """From here on this process is as weak as the program."""
        processes.standard_files(standard, keep)
        if self.plan.namespaces != "none":
            processes.as_process_1()
        work = self._own_folder(folder, uid)
        os.chdir(work)
        os.environ.update(HOME=work, TMPDIR=work)
        sys.path[:] = self.path
        jail.confine(self.plan, self.limits, self.readable, uid, busy)

    def _own_folder(self, folder: str, uid: int) -> str:
        """A folder below the run's for one process, which with a uid of its own cannot look beside it."""
        work = tempfile.mkdtemp(dir=folder)
        if self.plan.drop:
            os.chown(work, uid, uid)
            os.chmod(folder, 0o711)
        return work

    def _wait_ready(self, ready: int, count: int) -> None:
        """Returns when `count` processes are confined; OSError with what one of them says."""
        said = b""
        deadline_s = time.monotonic() + SETUP_S
        while len(said) < count:
            open_fds, _, _ = select.select([ready], [], [], max(0.0, deadline_s - time.monotonic()))
            chunk = os.read(ready, CHUNK_BYTES) if open_fds else b""
            said += chunk
            if not chunk or said.strip(READY):
                raise OSError(said.strip(READY).decode(errors="replace") or "a process of the sandbox did not start")

    def _watch(self, main: int, reading: int) -> tuple[int | str, bytes]:
        """Collects output until `main` ends: its exit code, or which limit it exceeded."""
        self.ends_s = self.ends_s or time.monotonic() + self.limits.total_s
        deadline_s = min(self.ends_s, time.monotonic() + self.limits.time_s)
        output = bytearray()
        open_fds = [reading, self.wakeup]
        os.set_blocking(reading, False)
        while True:
            left_s = deadline_s - time.monotonic()
            if self.stopping or left_s <= 0:
                return "timeout", bytes(output)
            ready, _, _ = select.select(open_fds, [], [], min(left_s, TICK_S))
            if self.wakeup in ready:
                os.read(self.wakeup, CHUNK_BYTES)
            ended, status = os.waitpid(main, os.WNOHANG)
            if reading in open_fds and not _read(reading, output):
                open_fds.remove(reading)
            if len(output) > OUTPUT_MAX_BYTES:
                return "output", b""
            if ended:
                self.started.discard(main)
                return os.waitstatus_to_exitcode(status), bytes(output)

    def _sweep(self) -> None:
        """Ends every process that the run has left. We adopt all orphans, so none is left when we have no child."""
        deadline_s = time.monotonic() + SWEEP_S
        while self._reap():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"processes of a program outlived {SWEEP_S:g} s of killing")
            if self.plan.namespaces != "none":
                for pid in self.started:  # with its group, and so its process 1, which takes the namespace along
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            elif self.plan.drop:
                for uid in self.uids:
                    processes.kill_user(uid)
            else:
                processes.kill_descendants()
            time.sleep(0.0005)

    def _reap(self) -> bool:
        """Takes leave of every child that has ended; whether there are others."""
        try:
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self.started.discard(pid)
        except ChildProcessError:
            return False
        return True


def main() -> None:
    """Serves the runs of one config, then ends; SIGTERM, or the end of its parent, ends the runs first."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        config = json.load(file)
    os.umask(0o022)
    plan, limits = Plan(**config["plan"]), Limits(**config["limits"])
    wakeup, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    claims = [jail.claim_uid(), jail.claim_uid()] if plan.drop else []  # held until we end
    uids = [uid for uid, _ in claims] or [os.getuid()] * 2
    supervisor = Supervisor(plan, limits, config["readable"], config["source"], config["path"], uids, wakeup)

    def stop(*_: object) -> None:
        supervisor.stopping = True

    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    try:
        jail.enter_namespaces(plan, limits, config["readable"])
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # no process of the same user reads its memory or its files
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)  # after the change of credentials, which clears it
        supervisor.stopping = supervisor.stopping or os.getppid() != config["parent"]
        if any(what.get("prelude") for what in config["runs"]):
            exec(program.PRELUDE, {})  # imported once, for all runs
        for what in config["runs"]:
            if supervisor.stopping:
                break
            _answer(*supervisor.run(what))
    except OSError as error:
        _answer("sandbox", f"{type(error).__name__}: {error}".encode())


def _answer(status: str, output: bytes) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps({"status": status, "output": base64.b64encode(output).decode()}), flush=True)


def _read(fd: int, output: bytearray) -> bool:
    """Adds what is there to `output`; whether there may be more."""
    with suppress(BlockingIOError):
        while len(output) <= OUTPUT_MAX_BYTES:
            chunk = os.read(fd, CHUNK_BYTES)
            if not chunk:
                return False
            output += chunk
    return True
