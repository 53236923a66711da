"""The confinement of a program: the limits that a process sets on itself before it runs one, by
Linux' own means (Landlock, seccomp, limits).

A step that fails is never skipped: a refusal is an OSError. Imports only the standard library, and
little of it: a supervisor starts with each rollout.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from contextlib import suppress
from typing import NamedTuple

from rlpipe.processes.kernel import (
    LANDLOCK_SIGNALS,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    SCOPED_SIGNALS,
    SCOPED_SOCKETS,
    call,
    landlock,
    landlock_version,
    prctl,
)

MB = 1 << 20
OPEN_FILES = 64
STACK_MB = 64  # deep recursion
TMPFS_INODES = 4096
SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2

# how many rights on files a version knows; 16 from version 5 on
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a folder
TCP = 3

# seccomp. name: (x86_64, aarch64) from the kernel's tables of system calls, -1 where there is none
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH
DENIED = {
    "socket": (41, 198),  # network, and the sockets of local daemons
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),  # these and the ones above outlive their makers
    "memfd_create": (319, 279),  # memory that RLIMIT_AS does not count
    "truncate": (76, 45),  # by path, which Landlock sees from version 3 on; ftruncate stays
    "unshare": (272, 97), "open_by_handle_at": (304, 265), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "inotify_add_watch": (254, 27),
}  # fmt: skip
# What acts on everything that the same user has, and Landlock does not see: without a uid of its
# own it answers 0 and does nothing
PRETENDED = {
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1),
    "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
}  # fmt: skip
# (number, argument, mask, value): denied unless the argument's low half, masked, has the value
RESTRICTED = [
    ((56, 220), 0, CLONE_NEWUSER, 0),  # clone
    ((53, 199), 0, 0xFFFFFFFF, 1),  # socketpair of AF_UNIX
    ((53, 199), 1, 0xF, 1),  # and of SOCK_STREAM: a pair of datagram sockets sends to any daemon's
    ((302, 261), 0, 0xFFFFFFFF, 0),  # prlimit64 of itself
]
# newer calls, and those of the x32 ABI, do not exist here: Python and libc fall back
FIRST_UNKNOWN = 424
EPERM, ENOSYS = 1, 38
FILTER_MAX = 4096  # instructions
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data


class ProgramLimits(NamedTuple):
    """Limits of one program, with all the processes it starts except `memory_mb`, which is for
    each."""

    time_s: float  # of one run
    total_s: float  # of all runs
    memory_mb: int
    processes: int  # threads count as processes
    files_mb: int


TRIAL_LIMITS = ProgramLimits(time_s=10.0, total_s=10.0, memory_mb=512, processes=4, files_mb=16)
# tries what no program may do, with a module that only the interpreter's folder has
TRIAL = """
import colorsys, contextlib, os, socket
tried = {"open a socket": socket.socket, "read other files": lambda: os.listdir("/proc"), \
"signal others": lambda: os.kill(os.getppid(), 0)}
for name, act in tried.items():
    with contextlib.suppress(OSError):
        act()
        print("a program can", name)
print(os.getppid() == 1)
"""


def free_uids() -> range:
    """The uids of sandboxes, high ones that no account has; empty where this process cannot change
    its uid.
    """
    with open("/proc/self/uid_map") as file:
        highest = max(int(first) + int(count) for first, _, count in map(str.split, file))
    first = min(0x70000000, highest * 5 // 8)
    return range(first, first + highest // 32) if os.geteuid() == 0 else range(0)


def missing() -> str:
    """The first thing that this system lacks for the confinement, and the way out; empty when it
    lacks none.
    """
    system = os.uname()
    if system.sysname != "Linux" or system.machine not in ARCHITECTURES:
        return f"it is {system.sysname} on {system.machine}, and has to be Linux on {' or '.join(ARCHITECTURES)}"
    version = landlock_version()
    if not version:
        return (
            "the kernel has no Landlock, or the container refuses it (Linux 5.13 or newer, `landlock` among its lsm=)"
        )
    if version < LANDLOCK_SIGNALS and not free_uids():
        return (
            f"Landlock has version {version}, and an ordinary user needs {LANDLOCK_SIGNALS} (Linux 6.12); or be root,"
            " in a container too"
        )
    return ""


def enter_supervisor(parent: int, uid: int) -> None:
    """For the supervisor: it adopts orphans, and from Landlock version 6 on it and all processes
    below it can signal no other process.

    OSError where programs run under the user's own `uid` and that does not hold: the supervisor
    kills all that it can signal. As process 1 of a namespace it ends with its `parent`, and the
    kernel ends the namespace with it.
    """
    if os.getpid() == 1:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)  # no process of the same user reads its memory or its files
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if landlock_version() >= LANDLOCK_SIGNALS:
        landlock(0, 0, SCOPED_SOCKETS | SCOPED_SIGNALS, {})
    if uid == os.getuid():
        with suppress(PermissionError, ProcessLookupError):  # in a namespace it is not even seen
            os.kill(parent, 0)
            raise OSError("Landlock does not keep signals from processes outside its domain")


def enter_namespaces(folder: str, files_mb: int, readable: list[str]) -> None:
    """Mounts, where this process may: `folder` becomes a disk of `files_mb`, and a folder that only
    its owner may enter (an interpreter below /root) looks empty, except for the `readable` paths in
    it. The next child is process 1 of a process namespace. Where it may not mount, nothing is
    changed.
    """
    try:
        call("unshare", CLONE_NEWNS)
        call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
        call(
            "mount",
            "tmpfs",
            folder,
            "tmpfs",
            MS_NOSUID | MS_NODEV,
            f"mode=711,size={files_mb}m,nr_inodes={TMPFS_INODES}",
        )
    except PermissionError:
        # a container's root, a user: the limits of each process bound each file
        return
    closed = {path: parent for path in readable if (parent := _closed_parent(path))}
    opened = [(path, os.open(path, os.O_PATH)) for path in sorted(closed)]
    for parent in sorted(set(closed.values())):
        call("mount", "tmpfs", parent, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for path, fd in opened:
        if not os.path.exists(path):  # else a folder above it is seen already
            os.makedirs(path)
            call("mount", f"/proc/self/fd/{fd}", path, None, MS_BIND | MS_REC, None)
        os.close(fd)
    call("unshare", CLONE_NEWPID)


def leave_mounts(folder: str) -> None:
    """Unmounts the disk of `folder`, if it has one."""
    with suppress(OSError):
        call("umount2", folder, MNT_DETACH)


def confine(limits: ProgramLimits, readable: list[str], uid: int, num_others: int) -> None:
    """Limits this process for good; it may write only to the working folder.

    `num_others`: processes that `uid` has already.
    """
    for what, value in (
        (resource.RLIMIT_NPROC, limits.processes + num_others),
        (resource.RLIMIT_AS, limits.memory_mb * MB),
        (resource.RLIMIT_FSIZE, limits.files_mb * MB),
        (resource.RLIMIT_CPU, int(limits.time_s) + 2),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_STACK, STACK_MB * MB),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # programs raise their stack before they recurse; RLIMIT_AS counts it
        resource.setrlimit(what, (value, hard if what == resource.RLIMIT_STACK else value))
    rules = {path: READ for path in readable if os.path.exists(path)} | dict.fromkeys([os.getcwd(), *DEVICES], -1)
    landlock((1 << FILE_RIGHTS.get(landlock_version(), 16)) - 1, TCP, SCOPED_SOCKETS | SCOPED_SIGNALS, rules)
    has_own_uid = uid != os.getuid()
    if has_own_uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    assert os.getresuid() == (uid, uid, uid), "a program would run under a uid that is not its own"
    call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))  # no capability; with no_new_privs, for good
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of uid clears it, so last
    code = _filter_program(has_own_uid)
    address = ctypes.create_string_buffer(code, len(code))
    prctl(PR_SET_SECCOMP, 2, struct.pack("=H6xQ", len(code) // 8, ctypes.addressof(address)))


def _filter_program(has_own_uid: bool) -> bytes:
    """The filter of system calls as an array of struct sock_filter.

    A jump is (op, value, skip if true, skip if false).
    """
    column, architecture = ARCHITECTURES[os.uname().machine]
    code = [
        (LOAD, ARCHITECTURE_AT, 0, 0),
        (JUMP_EQUAL, architecture, 1, 0),
        (RETURN, KILL, 0, 0),  # another ABI has other numbers
        (LOAD, NUMBER_AT, 0, 0),
        (JUMP_AT_LEAST, FIRST_UNKNOWN, 0, 1),
        (RETURN, ERRNO | ENOSYS, 0, 0),
    ]
    for calls, error in ((DENIED, EPERM), ({} if has_own_uid else PRETENDED, 0)):
        for numbers in calls.values():
            code += [(JUMP_EQUAL, numbers[column] & 0xFFFFFFFF, 0, 1), (RETURN, ERRNO | error, 0, 0)]
    for numbers, argument, mask, value in RESTRICTED:
        code += [
            (JUMP_EQUAL, numbers[column], 0, 5),
            (LOAD, ARGUMENTS_AT + 8 * argument, 0, 0),
            (AND, mask, 0, 0),
            (JUMP_EQUAL, value, 1, 0),
            (RETURN, ERRNO | EPERM, 0, 0),
            (LOAD, NUMBER_AT, 0, 0),
        ]
    code.append((RETURN, ALLOW, 0, 0))
    assert len(code) <= FILTER_MAX, "the kernel takes no longer filter"
    return b"".join(struct.pack("=HBBI", op, yes, no, value) for op, value, yes, no in code)


def _closed_parent(path: str) -> str | None:
    """The outermost folder above `path` that others may not enter."""
    parents = [path[:end] for end in range(1, len(path)) if path[end] == "/"]
    return next((parent for parent in parents if not os.stat(parent).st_mode & 0o001), None)
