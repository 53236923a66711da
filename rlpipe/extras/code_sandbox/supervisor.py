"""The supervisor: a process of its own for one program, trusted and out of the program's reach.

Starts the program once for each run.

Started by `runner` with a ProgramJob as JSON on stdin, answers on stdout: for each run a line
{"status", "output"}. The input of a run comes as a file descriptor: so the expected results in a
tests file never enter the memory that the program is forked from. It ends when its answers are not
read any more.

It is two processes: one that serves the runs, and above it one that waits. SIGKILL to either leaves
no process of a program: the upper one ends all that the lower one has left; the lower one ends with
the upper one, as process 1 of a namespace, or else runs to its end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import site
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from rlpipe.extras.code_sandbox import confinement, program

OUTPUT_MAX_BYTES = 8 << 20
CHUNK_BYTES = 1 << 16
SETUP_S = 20.0
SWEEP_S = 30.0  # the kernel of a busy machine may need a while to end what is killed
ANSWERS = 1  # the file descriptor
READY = b"+"
SHARING = 6  # the supervisor's own processes: they count where they share the program's uid


class ProgramJob(NamedTuple):
    """A program, its limits, and its runs: (kind, file descriptor of its stdin or its tests)."""

    limits: confinement.ProgramLimits
    source: str
    path: list[str]
    readable: list[str]
    uid: int
    runs: list[tuple[str, int]]


def main() -> None:
    """Serves the runs of one job, then ends."""
    job = ProgramJob(*json.load(sys.stdin))
    assert job.uid == os.getuid() or job.uid in confinement.free_uids(), (
        "a program would run under the uid of an account"
    )
    # the end of our reader ends us, and never without a sweep
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.umask(0o022)
    for add in (
        site.setquit,
        site.setcopyright,
        site.sethelper,
    ):  # exit() and others: we start without `site`, programs do not
        add()
    with suppress(BrokenPipeError):
        try:
            _serve(job._replace(limits=confinement.ProgramLimits(*job.limits)), f"/tmp/rlpipe-{os.urandom(8).hex()}")
        except OSError as error:
            _answer("sandbox", f"{type(error).__name__}: {error}")


def _serve(job: ProgramJob, folder: str) -> None:
    """Answers each run, until the answers are not read any more. Returns in both processes."""
    os.mkdir(folder, 0o711)
    try:
        confinement.enter_namespaces(folder, job.limits.files_mb, job.readable)
        confinement.enter_supervisor(os.getppid(), job.uid)
        upper = os.getpid()
        lower = os.fork()
        if lower:
            os.waitpid(lower, 0)
            _sweep(job.uid)
            return
        # a domain of its own: its kills do not reach the upper one
        confinement.enter_supervisor(upper, job.uid)
        if any(kind == "function" for kind, _ in job.runs):
            exec(program.PRELUDE, {})  # imported once, for all runs
        ends_s = time.monotonic() + job.limits.total_s
        for kind, given in job.runs:
            status, output = _run(job, folder, kind, given, ends_s)
            _answer(status, output.decode(errors="replace"))
    finally:
        confinement.leave_mounts(folder)
        _remove(folder)


def _answer(status: str, output: str) -> None:
    os.write(ANSWERS, json.dumps({"status": status, "output": output}, ensure_ascii=False).encode() + b"\n")


def _run(job: ProgramJob, folder: str, kind: str, given: int, ends_s: float) -> tuple[str, bytes]:
    """One run from start to the end of its last process: (status, output).

    Tests run beside the program, confined like it.
    """
    pipes = [os.pipe() for _ in range(4)]
    (reading, writing), (ready, readied), (calls_in, calls_out), (replies_in, replies_out) = pipes
    try:
        if kind == "stdin":
            main = _fork(job, folder, [given, writing], [readied], lambda: program.run_main(job.source))
        else:
            files, ends = [readied, given, replies_in, calls_out], [readied, calls_in, replies_out]
            prelude = program.PRELUDE if kind == "function" else ""
            main = _fork(job, folder, [-1, writing], files, lambda: program.run_tests(given, replies_in, calls_out))
            _fork(job, folder, [-1, -1], ends, lambda: program.serve(job.source, prelude, calls_in, replies_out))
        for fd in (writing, readied, calls_in, calls_out, replies_in, replies_out):
            os.close(fd)
        _wait_ready(ready, len(os.listdir(folder)))
        status, output = _watch(main, reading, min(ends_s, time.monotonic() + job.limits.time_s))
        return ("error" if status == "unsupported" and kind == "stdin" else status), output
    finally:
        _sweep(job.uid)
        os.close(reading)
        os.close(ready)
        for name in os.listdir(folder):
            _remove(f"{folder}/{name}")


def _fork(job: ProgramJob, folder: str, standard: list[int], keep: list[int], body: Callable[[], int | None]) -> int:
    """Starts a confined process that runs `body` in a folder of its own, with `standard` as its
    stdin and stdout, -1 for none.

    It writes READY to the first file of `keep` when all its limits hold, or else the error.
    """
    names = os.listdir(folder)
    num_others = len(names) if job.uid != os.getuid() else SHARING + _num_own_processes()
    work = f"{folder}/{len(names)}"
    os.mkdir(work, 0o700)
    os.chown(work, job.uid, -1)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _keep_files(standard, sorted(keep))
            os.chdir(work)
            os.environ.update(HOME=work, TMPDIR=work)
            sys.path[:] = job.path
            confinement.confine(job.limits, job.readable, job.uid, num_others)
            os.write(keep[0], READY)
            os.close(keep[0])
            program.leave(body)
        except Exception as error:
            os.write(keep[0], f"{type(error).__name__}: {error}".encode())
        finally:  # whatever it was: only the supervisor goes on below
            os._exit(1)
    return pid


def _keep_files(standard: list[int], keep: list[int]) -> None:
    """Makes `standard` files 0 and 1 and /dev/null file 2, and closes all others except those in
    `keep`.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for target, fd in enumerate([*standard, -1]):
        os.dup2(null if fd < 0 else fd, target)
    for before, after in zip([2, *keep], [*keep, 4096], strict=True):
        os.closerange(before + 1, after)


def _num_own_processes() -> int:
    """Processes and threads of this user: RLIMIT_NPROC counts them all."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def _wait_ready(ready: int, count: int) -> None:
    """Returns when `count` processes are confined; OSError with the message of one that failed."""
    words = b""
    while len(words) < count and select.select([ready], [], [], SETUP_S)[0] and (chunk := os.read(ready, CHUNK_BYTES)):
        words += chunk
    if words != READY * count:
        raise OSError(words.strip(READY).decode(errors="replace") or "a process of the sandbox did not start")


def _watch(main: int, reading: int, deadline_s: float) -> tuple[str, bytes]:
    """Collects output until `main` ends; returns how it ended, or the limit that it exceeded."""
    output = bytearray()
    ended = os.pidfd_open(main)
    watched = [ANSWERS, ended, reading]
    status = "timeout"
    while status == "timeout" and (left_s := deadline_s - time.monotonic()) > 0:
        files = select.select(watched, [], [], left_s)[0]
        # the write end of a pipe is reported only when its reader is gone
        if ANSWERS in files:
            break
        if reading in files:
            chunk = os.read(reading, CHUNK_BYTES)
            output += chunk
            if not chunk:
                watched.remove(reading)
            if len(output) > OUTPUT_MAX_BYTES:
                status, output = "output", bytearray()
        elif ended in files:  # and all that it has written is read
            code = os.waitstatus_to_exitcode(os.waitpid(main, 0)[1])
            status = {0: "ok", program.UNSUPPORTED: "unsupported"}.get(code, "error")
    os.close(ended)
    return status, bytes(output)


def _sweep(uid: int) -> None:
    """Ends every process that the run has left.

    The supervisor adopts all orphans, so none is left when it has no child.
    """
    deadline_s = time.monotonic() + SWEEP_S
    with suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"processes of a program outlived {SWEEP_S:g} s of killing")
            _kill(uid)
            time.sleep(0.0005)


def _kill(uid: int) -> None:
    """Sends SIGKILL to every process of the program, in one call, which no fork can outrun."""
    if uid == os.getuid():
        with suppress(OSError):
            # Landlock lets us reach those below us only: `enter_supervisor` has tried it
            os.kill(-1, signal.SIGKILL)
    elif os.fork() == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)


def _remove(folder: str) -> None:
    """Removes a folder and its content, at depths beyond Python's recursion limit too."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return  # the other process was first
    except OSError:  # not empty
        os.waitpid(os.posix_spawnp("rm", ["rm", "-rf", "--", folder], os.environ), 0)
