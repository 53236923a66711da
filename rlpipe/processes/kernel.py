"""System calls of Linux that Python has no function for, and the restrictions that a process puts
on itself with them.

Imports only the standard library, and little of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
PR_CAPBSET_DROP, CAPABILITY_VERSION, CAP_SYS_ADMIN, CAP_PERFMON = 24, 0x20080522, 21, 38

# Landlock. Its system calls have the same numbers on every architecture
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_SIGNALS = 6  # the first version that can forbid signals to processes outside the domain
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # the rights that apply to files
SCOPED_SOCKETS, SCOPED_SIGNALS = 1, 2  # abstract sockets, and signals

# in the id of a clock, selects a thread's processor time: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
THREAD_CLOCK = 6
KILL_S = 5.0  # a process that is not dead after this time waits for a disk or a device

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 when it has none, or a container forbids it."""
    with suppress(OSError):
        return call("syscall", LANDLOCK_CREATE, None, 0, 1)
    return 0


def landlock(rights: int, ports: int, scoped: int, rules: dict[str, int]) -> None:
    """Restricts this process and its children for good. Of the `rights` on files they keep only
    those in `rules`; they can open no TCP port (version 4), and use what is `scoped` only among
    each other (version 6). They cannot trace outside processes, or read their memory or
    environment.
    """
    version = landlock_version()
    scoped = scoped if version >= LANDLOCK_SIGNALS else 0
    attributes = struct.pack("=3Q", rights, ports if version >= 4 else 0, scoped)
    ruleset = call("syscall", LANDLOCK_CREATE, attributes, len(attributes), 0)
    try:
        for path, allowed in rules.items():
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            kept = allowed & rights & (-1 if os.path.isdir(path) else OF_FILES)
            call("syscall", LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", kept, opened), 0)
            os.close(opened)
        call("syscall", LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def seclude() -> bool:
    """Forbids this process and its children, for good, to read the environment and memory of
    outside processes of the same user, and to signal them. Returns True from Linux 6.12 on;
    otherwise does nothing and returns False. For root see `leave_rights`.

    Trap: a process that is not root can then no longer become another user (sudo); the kernel
    requires that.
    """
    if landlock_version() < LANDLOCK_SIGNALS:
        return False
    try:
        landlock(0, 0, SCOPED_SIGNALS, {})
    except PermissionError:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        landlock(0, 0, SCOPED_SIGNALS, {})
    return True


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants, so that all of them stay below it.
    Linux only.
    """
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(root: int) -> None:
    """Kills all descendants of the process `root`, in any session, and, if it has ended, the rest
    of the process group that it leads. Returns when none is left, or after KILL_S.
    """
    deadline_s = time.monotonic() + KILL_S
    while (pids := _descendants(root)) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    """The descendants of `root` that have not ended."""
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for name in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent, group = file.read().rpartition(b")")[2].split()[:3]
            for above in {int(parent), int(group)} - {int(name)}:
                children.setdefault(above, []).append(int(name))
            alive |= {int(name)} if state not in (b"Z", b"X") else set()
    below, seen = [root], {root}
    for pid in below:
        new = [child for child in children.get(pid, []) if child not in seen]
        below += new
        seen |= {*new}
    return [pid for pid in below[1:] if pid in alive]


def leave_rights() -> None:
    """Drops, for good, the capabilities of root to read the memory map of any process, which
    Landlock does not take away, and with them the right to mount; for this process and its
    children.
    """
    if sys.platform != "linux":
        return
    header, sets = struct.pack("=Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    call("capget", header, sets)
    # effective, permitted, inheritable: the low 32 bits, then the high ones
    held = list(struct.unpack("=6I", sets.raw))
    for number in (CAP_SYS_ADMIN, CAP_PERFMON):
        half, bit = 3 * (number // 32), 1 << number % 32
        if held[half + 1] & bit:
            prctl(PR_CAPBSET_DROP, number)  # after an exec root has only those of the bounding set
        held[half : half + 3] = [word & ~bit for word in held[half : half + 3]]
    call("capset", header, struct.pack("=6I", *held))


def prctl(option: int, value: int, pointer: bytes | int = 0) -> None:
    """Calls prctl. OSError when it fails."""
    call("prctl", option, value, pointer, 0, 0)


def call(name: str, *arguments: int | bytes | str | ctypes.Array[ctypes.c_char] | None) -> int:
    """Calls the C library's function `name`. OSError when it fails."""
    encoded = [os.fsencode(value) if isinstance(value, str) else value for value in arguments]
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in encoded]
    result = int(getattr(_libc, name)(*words))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{arguments[:3]}: {os.strerror(error)}")
    return result


class ThreadWork(NamedTuple):
    """The work of threads: their processor time in seconds, and the ids of their child processes
    that still exist.
    """

    cpu_s: float
    children: set[int]


def thread_ids() -> set[int]:
    """The ids of the threads of this process; empty where the kernel does not list them."""
    with suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()


def work_of(threads: set[int]) -> ThreadWork:
    """The work of these threads of this process; for no threads the work of the whole process, as
    far as it is known.
    """
    cpu_s, children = 0.0 if threads else time.process_time(), set[int]()
    for thread in threads:
        with suppress(OSError):  # the thread has ended
            cpu_s += time.clock_gettime(~thread << 3 | THREAD_CLOCK)
            with open(f"/proc/self/task/{thread}/children") as file:
                children.update(map(int, file.read().split()))
    return ThreadWork(cpu_s, children)
