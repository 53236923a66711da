"""Calls of Linux that Python has no function for, and what a process does to itself with them.

Standard library only, and little of it.
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
LANDLOCK_SIGNALS = 6  # the first version in which a process signals nobody outside its domain
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # the few rights that a file has
SCOPED_SOCKETS, SCOPED_SIGNALS = 1, 2  # abstract sockets, and signals

# of the id of a thread's clock, whose processor time is meant:
# CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
THREAD_CLOCK = 6
KILL_S = 5.0  # what cannot be killed in this time waits for a disk or a device

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 when it has none or a container refuses it."""
    with suppress(OSError):
        return call("syscall", LANDLOCK_CREATE, None, 0, 1)
    return 0


def landlock(rights: int, ports: int, scoped: int, rules: dict[str, int]) -> None:
    """From now on this process and its children have of `rights` on files only those of `rules`,
    open no TCP port (version 4), and reach only each other by what is `scoped` (version 6). No
    process outside can be traced, or its memory and environment read.
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
    """Bars this process, and all that it starts, from now on from the processes outside, of the
    same user: from reading their environment and memory, and from signalling them. Returns True
    from Linux 6.12 on; elsewhere nothing changes, and it returns False. For root see
    `leave_rights`.

    A process that is not root can no longer become another user (sudo): the kernel wants that.
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
    """Keeps all descendants of this process below it in the tree of processes, whichever of them
    ends. Linux only."""
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(root: int) -> None:
    """Kills all that the process `root` has started, and what that has, in whatever session, and
    the others of the group that it leads, should it have ended; returns when none is left, or after
    KILL_S.
    """
    deadline_s = time.monotonic() + KILL_S
    while (pids := _descendants(root)) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    """The processes below `root` that have not ended."""
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
    """Root's rights to read the memory map of any process, which Landlock does not take: this
    process, and all that it starts, loses them for good, and with them the right to mount.
    """
    if sys.platform != "linux":
        return
    header, sets = struct.pack("=Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    call("capget", header, sets)
    # effective, permitted, inheritable: the low halves, then the high ones
    held = list(struct.unpack("=6I", sets.raw))
    for number in (CAP_SYS_ADMIN, CAP_PERFMON):
        half, bit = 3 * (number // 32), 1 << number % 32
        if held[half + 1] & bit:
            prctl(PR_CAPBSET_DROP, number)  # root has no other after an exec
        held[half : half + 3] = [word & ~bit for word in held[half : half + 3]]
    call("capset", header, struct.pack("=6I", *held))


def prctl(option: int, value: int, pointer: bytes | int = 0) -> None:
    """OSError when it fails."""
    call("prctl", option, value, pointer, 0, 0)


def call(name: str, *arguments: int | bytes | str | ctypes.Array[ctypes.c_char] | None) -> int:
    """The C library's function `name`; OSError when it fails."""
    encoded = [os.fsencode(value) if isinstance(value, str) else value for value in arguments]
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in encoded]
    result = int(getattr(_libc, name)(*words))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{arguments[:3]}: {os.strerror(error)}")
    return result


class ThreadWork(NamedTuple):
    """The work of threads: their seconds of processor time, and the ids of their child processes
    that are still there."""

    cpu_s: float
    children: set[int]


def thread_ids() -> set[int]:
    """The threads of this process; none where the kernel does not say."""
    with suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()


def work_of(threads: set[int]) -> ThreadWork:
    """The work of these threads of this process; of no threads, the work of the whole process, as
    far as it is known."""
    cpu_s, children = 0.0 if threads else time.process_time(), set[int]()
    for thread in threads:
        with suppress(OSError):  # it has ended
            cpu_s += time.clock_gettime(~thread << 3 | THREAD_CLOCK)
            with open(f"/proc/self/task/{thread}/children") as file:
                children.update(map(int, file.read().split()))
    return ThreadWork(cpu_s, children)
