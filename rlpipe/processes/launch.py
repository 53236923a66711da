"""Child processes that die with their parent, are restarted within a budget, and leave no
orphans.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlpipe.base.errors import UserError

log = logging.getLogger(__name__)
PARENT_POLL_S = 0.5
STOP_GRACE_S = 5.0
KILL_TIMEOUT_S = 60.0  # the kernel may need some time to free the memory of a process
READY_TIMEOUT_S = 600.0  # for compilers, and for loading weights
SAY_S = 30.0  # how often it is logged that a process is not ready yet
LOG_LINES = 15
OPEN_FILES_MAX = 1 << 20
# the ports to choose from; above them are those of Kubernetes' services, which it forwards to their
# pods on every address of a node, even if another process listens
PORTS = range(10_000, 30_000)
# the first and the last ephemeral port, which the kernel assigns to connections
CONNECTION_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# A random start in each process, so that two seldom choose the same port. Steps of eleven: an
# SGLang with data-parallel attention (--attn-dp-size) also takes seven ports from its own + 233, so
# two with neighbouring ports would collide there, and one would not start.
_turns = itertools.count(random.randrange(len(PORTS)), 11)
PARENT_VARIABLE = "RLPIPE_PARENT_PID"
# The time for which an idle thread spins before it sleeps. Some microseconds bridge the gaps
# between the operations of a forward pass (two threads train 1.35 times faster on idle cores); with
# more, threads take busy cores from each other.
THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def raise_file_limit() -> None:
    """Raises the limit of open files of this process and its children to the system's maximum: each
    rollout in flight is a socket.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard, "the hard limit could not be had again"


def free_port() -> int:
    """Returns a TCP port for a process that will listen on it: it was free a moment ago on every
    address, and was not returned just before.

    OSError when none is free. It is below the ephemeral ports: a connection could take one of these
    before a server has loaded its model and listens.
    """
    below = PORTS.stop
    with contextlib.suppress(OSError, ValueError):  # on systems other than Linux
        below = int(CONNECTION_PORTS.read_text().split()[0])
    ports = range(PORTS.start, below) if PORTS.start < below < PORTS.stop else PORTS
    for _ in ports:
        port = ports[next(_turns) % len(ports)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no TCP port from {ports.start} to {ports.stop - 1} is free")


def check_port_free(field_name: str, port: int) -> None:
    """Raises UserError naming the config field when another process listens on 127.0.0.1:`port`."""
    with socket.socket() as probe:
        # with SO_REUSEADDR a port in TIME_WAIT, after our own last server, is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"{field_name}={port}: the port is taken ({error.strerror}); choose a free one, or 0"
            ) from error


def answers(url: str, key: str = "", timeout_s: float = 2.0) -> bool:
    """True when a GET with this bearer key is answered with 200."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status == 200
    except OSError:  # URLError is a subclass
        return False


def _parent() -> int:
    """The id of the process to die with: as given by the one that started us, since it may end
    before we can ask; else our parent.
    """
    return int(os.environ.get(PARENT_VARIABLE) or os.getppid())


def die_with_parent() -> None:
    """Makes this process die (SIGKILL) within a second after its parent ends in any way.

    It polls getppid, which is portable and, unlike PR_SET_PDEATHSIG, not bound to the thread that
    forked. Children of this process that call it die with this process.
    """
    parent = _parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()


def run_and_die_with_parent(argv: list[str]) -> int:
    """Runs a program that does not watch its parent (Prefect's server, SGLang), and kills its
    process group when we end.

    Passes SIGTERM on; kills the remaining processes, grandchildren too, shortly before our own
    SIGKILL would come.
    """
    parent, deadline = _parent(), float("inf")
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + STOP_GRACE_S - 2 * PARENT_POLL_S)
        signal_group(child, signal.SIGTERM)

    # before the child starts: a SIGTERM in between must not orphan it
    signal.signal(signal.SIGTERM, stop)
    child = subprocess.Popen(argv, start_new_session=True)
    while True:
        try:
            code = child.wait(timeout=PARENT_POLL_S)
            signal_group(child, signal.SIGKILL)
            return code
        except subprocess.TimeoutExpired:
            if os.getppid() != parent or time.monotonic() > deadline:
                signal_group(child, signal.SIGKILL)


def signal_group(process: subprocess.Popen[bytes] | None, number: int) -> None:
    """Sends a signal to a process that was started in a session of its own, and to its process
    group.
    """
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def wrapped(argv: list[str]) -> list[str]:
    """The command that runs `argv` under `run_and_die_with_parent`."""
    return [sys.executable, "-m", "rlpipe.processes.launch", *argv]


@dataclass
class Service:
    """A child process that can be started, watched, restarted (at most `restarts_max` times) and
    stopped.

    `ready` returns False until the process can serve; it is called every 0.1 s for at most
    `ready_timeout_s`.
    """

    name: str
    argv: list[str]
    log_path: Path
    ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    restarts_max: int = 5
    ready_timeout_s: float = READY_TIMEOUT_S
    restarts: int = 0
    descriptors: tuple[int, ...] = ()  # which a process that is started inherits
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process (without waiting until it is ready)."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} already runs"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **THREADS,
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            PARENT_VARIABLE: str(os.getpid()),
            **self.environment,
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=self.descriptors,
            )

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ensure(self) -> bool:
        """Restarts the process if it has ended; returns True if it did.

        RuntimeError once the restart budget is spent.
        """
        if self.alive():
            return False
        if self.process is not None:
            if self.restarts >= self.restarts_max:
                raise self._fault(f"ended {self.restarts + 1} times")
            self.restarts += 1
        self.start()
        return True

    def wait_ready(self) -> None:
        """Waits until `ready` returns True, and logs a line every SAY_S. RuntimeError with the end
        of the log when the process ends or takes too long.
        """
        began_at, say_s = time.monotonic(), SAY_S
        while (waited_s := time.monotonic() - began_at) < self.ready_timeout_s:
            if not self.alive():
                raise self._fault("ended while starting")
            if self.ready():
                return
            if waited_s >= say_s:
                say_s += SAY_S
                log.warning(
                    "%s has been starting for %.0f s (limit %g s); its log: %s",
                    self.name,
                    waited_s,
                    self.ready_timeout_s,
                    self.log_path,
                )
            time.sleep(0.1)
        raise self._fault(f"was not ready after {self.ready_timeout_s:g} s")

    def stop(self) -> None:
        """Ends the process group: SIGTERM, then SIGKILL after a grace period."""
        if self.process is None or self.process.poll() is not None:
            return
        signal_group(self.process, signal.SIGTERM)
        try:
            self.process.wait(timeout=STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            signal_group(self.process, signal.SIGKILL)
            self.process.wait(timeout=KILL_TIMEOUT_S)

    def _fault(self, what: str) -> RuntimeError:
        """An error that describes `what` happened, with the end of the log."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        tail = "\n".join(text.splitlines()[-LOG_LINES:])
        return RuntimeError(f"{self.name} {what}; its log: {self.log_path}\n{tail}")


if __name__ == "__main__":
    sys.exit(run_and_die_with_parent(sys.argv[1:]))
