"""The process that holds a run, as its lease names it, and whether that process lives."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
PID_MAX = 2**31 - 1

Pid = Annotated[StrictInt, Field(ge=1, le=PID_MAX)]
Seconds = Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease, as the lease records it.

    `flow_run`: the id of the Prefect flow run that it works for; empty without one. `machine`: boot
    and pid namespace, within which the pid is valid; older leases have none. `since`: when it took
    the run.
    """

    host: StrictStr
    pid: Pid
    process_started: Seconds | None
    beats: Annotated[StrictInt, Field(ge=0)] = 0
    released: StrictBool = False
    flow_run: StrictStr = ""
    machine: StrictStr = ""
    since: StrictStr = ""

    @property
    def is_of_here(self) -> bool:
        """True when the holder is, or was, a process that this process can see: of this host since
        its last boot, and in this pid namespace.
        """
        return self.host == socket.gethostname() and self.machine in ("", this_machine())

    @property
    def is_here(self) -> bool:
        """True when this process can see the holder, and the holder lives, even if it is
        stopped.
        """
        return self.is_of_here and _start_time(self.pid) == self.process_started

    @property
    def is_gone(self) -> bool:
        """True when the holder is known to write nothing any more: it has released the run, or was
        a process on this machine that has ended.
        """
        return self.released or (self.is_of_here and not self.is_here)

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


def this_process(flow_run: str = "") -> Holder:
    """This process as a Holder."""
    pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(socket.gethostname(), pid, _start_time(pid), flow_run=flow_run, machine=this_machine(), since=now)


@cache
def this_machine() -> str:
    """The boot of this host and the pid namespace of this process: two containers with one host
    name have different pids.
    """
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink(PID_NAMESPACE)}"
    except OSError:  # not Linux
        return f"{psutil.boot_time():.0f}"


def _start_time(pid: int) -> float | None:
    """The start time of a process on this host; None when it has ended or is a zombie.

    Guards against reused pids.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        # since boot: the wall-clock time of a start moves when the clock is set
        return round(process.create_time() - psutil.boot_time(), 1)
    except psutil.NoSuchProcess:
        return None
