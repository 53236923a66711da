"""What a process of the sandbox does to itself before it runs a program. Every step is asked for by the plan; a refusal is an OSError."""

from __future__ import annotations

import os
import resource
import signal
import socket
from dataclasses import dataclass

from rlpipe.rewards.sandbox import linux, seccomp

MB = 1 << 20
OPEN_FILES = 64
STACK_MB = 64  # deep recursion
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
HELPERS = 6  # our own processes that count against the limit where they share the program's uid
TMPFS_INODES = 4096


@dataclass(frozen=True)
class Plan:
    """Which protections are used; `runner` finds the strongest that works here.

    namespaces: "full" (its own processes, network, file system), "partial" (without the file system) or "none".
    """

    drop: bool  # run as a uid that nobody else has (root only)
    user_namespace: bool
    namespaces: str
    landlock: int  # the ABI version used, 0 is off
    seccomp: bool

    @property
    def deny_signals(self) -> bool:
        return not self.drop and self.namespaces == "none" and self.landlock < 6


@dataclass(frozen=True)
class Limits:
    """Of one program, with all the processes it starts except `memory_mb`, which is for each."""

    time_s: float  # of one run
    total_s: float  # of all runs
    memory_mb: int
    processes: int  # threads count as processes
    files_mb: int


def enter_namespaces(plan: Plan, limits: Limits, readable: list[str]) -> None:
    """For the supervisor and all below it: a network without any device; "full": a file system of `readable` and an empty /tmp."""
    uid, gid = os.getuid(), os.getgid()
    if plan.user_namespace:
        linux.unshare(linux.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if plan.namespaces != "none":
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
    if plan.namespaces == "full":
        _own_files(limits, readable)


def _own_files(limits: Limits, readable: list[str]) -> None:
    """Makes a tmpfs the root of this process. It is built on /proc, a folder that is everywhere and shows no file of a user."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    room = f"size={limits.files_mb}m,nr_inodes={TMPFS_INODES},mode=755"
    linux.mount("tmpfs", "/proc", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, room)
    for path in [*readable, *DEVICES]:
        _show(path, "/proc" + path)
    os.makedirs("/proc/tmp", 0o755, exist_ok=True)  # an interpreter may lie below it
    os.chdir("/proc")
    linux.pivot_root(".", ".")
    linux.umount(".")
    os.chdir("/")


def confine(plan: Plan, limits: Limits, readable: list[str], uid: int, busy: int) -> None:
    """Limits this process for good; the working folder is the one it may write to. `busy`: processes of this uid before us."""
    others = 0 if plan.drop else HELPERS if plan.user_namespace else HELPERS + busy
    _limit(resource.RLIMIT_NPROC, limits.processes + others)
    _limit(resource.RLIMIT_AS, limits.memory_mb * MB)
    _limit(resource.RLIMIT_FSIZE, limits.files_mb * MB)
    _limit(resource.RLIMIT_CPU, int(limits.time_s) + 2)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _limit(resource.RLIMIT_STACK, STACK_MB * MB)
    _limit(resource.RLIMIT_CORE, 0)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if plan.landlock:
        linux.landlock(plan.landlock, [path for path in readable if os.path.exists(path)], [os.getcwd(), *DEVICES])
    if plan.drop:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif plan.user_namespace:
        linux.drop_capabilities()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # no process of the same user reads its memory
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of uid clears it, so last
    if plan.seccomp:
        linux.filter_syscalls(seccomp.filter_program(plan.deny_signals))


def claim_uid() -> tuple[int, socket.socket]:
    """A uid that no account and no other sandbox has, as long as the socket lives."""
    first, count = _free_uids()
    for _ in range(100):
        uid = first + int.from_bytes(os.urandom(4), "big") % count
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0rlpipe-sandbox-{uid}")
        except OSError:
            claim.close()
            continue
        return uid, claim
    raise OSError("no uid is free")


def can_have_uids() -> bool:
    """Whether this process is root over more than one uid."""
    return os.geteuid() == 0 and _free_uids()[1] > 0


def _free_uids() -> tuple[int, int]:
    """The first of the uids of sandboxes and their number: high ones where there are any, else 40000 to 59999."""
    with open("/proc/self/uid_map") as file:
        ends = [int(first) + int(count) for first, _, count in (line.split() for line in file)]
    highest = max(ends)
    if highest > 0x78000000:
        return 0x70000000, 0x08000000
    return 40000, 20000 if highest >= 60000 else 0


def own_uid_processes() -> int:
    """Processes and threads of this user: RLIMIT_NPROC counts them all where there is no user namespace."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return total


def readable_paths(prefixes: list[str]) -> list[str]:
    """What a program may read: the system's libraries and the interpreter's folders, no folder inside another of the list."""
    wanted = [path for path in SYSTEM if os.path.lexists(path)]
    real = sorted({os.path.realpath(path) for path in prefixes if os.path.isdir(path)} | set(prefixes))
    for path in real:
        if path != "/" and os.path.isdir(path) and not any(path == one or path.startswith(one + "/") for one in wanted):
            wanted.append(path)
    return wanted


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _show(path: str, target: str) -> None:
    """`path` of the outer file system at `target`, read-only; what does not exist is left out."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.makedirs(target, mode=0o755, exist_ok=True)
        linux.bind_read_only(path, target)
    elif os.path.exists(path):
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        with open(target, "x"):
            pass
        if path in DEVICES:
            linux.mount(path, target, None, linux.MS_BIND)
        else:
            linux.bind_read_only(path, target)
