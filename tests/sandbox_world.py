"""Programs that try to do harm, and how each must end.

Run as a script in other worlds too: standard library and rlpipe only.

None can hurt the machine when the sandbox fails: forks stop at 100, memory is never touched,
writing stops at 1 GB, the killed process is one that the test has started for that.
"""

import json
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpipe.extras.code_sandbox import confinement, runner
from rlpipe.extras.code_sandbox.confinement import ProgramLimits
from tests.deadlines import DEADLINE_S, SHORT_S, until

SYSTEM_PYTHON = "/usr/bin/python3"
PATIENT = ProgramLimits(time_s=DEADLINE_S, total_s=DEADLINE_S, memory_mb=256, processes=4, files_mb=8)
LOOP_S = 0.3  # short: what loops is given up
HASTY = ProgramLimits(time_s=LOOP_S, total_s=DEADLINE_S, memory_mb=256, processes=4, files_mb=8)

# name: (limits, source, status, output). TARGET, SECRET, PORT, SOCKET and MARK are put in. An
# output of None: see `judge`.
HOSTILE: dict[str, tuple[ProgramLimits, str, str, str | None]] = {
    "forks": (
        PATIENT,
        """
import os, time
started = 0
for _ in range(100):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    started += 1
print(started)
""",
        "ok",
        None,
    ),
    "memory": (PATIENT, "try:\n    bytearray(10 << 30)\nexcept MemoryError:\n    print('refused')", "ok", "refused"),
    "loop": (HASTY, "while True: pass", "timeout", ""),
    "ignores signals": (
        HASTY,
        """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
        "timeout",
        "",
    ),
    "daemon": (
        PATIENT,
        """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.execv("/usr/bin/sleep", ["sleep", "MARK"])
    os._exit(0)
os.wait()
print("left")
""",
        "ok",
        "left",
    ),
    "files": (
        PATIENT,
        """
import os
for path in ["SECRET", f"/proc/{os.getppid()}/environ", "/proc/TARGET/environ", "/proc/TARGET/mem"]:
    try:
        print(open(path, "rb").read())
    except OSError:
        print("refused")
""",
        "ok",
        "refused\nrefused\nrefused\nrefused",
    ),
    "disk": (
        PATIENT,
        """
import os
written = 0
file = os.open("big", os.O_CREAT | os.O_WRONLY)
try:
    while written < 1 << 30:
        written += os.write(file, bytes(1 << 20))
except OSError:
    pass
print(written >> 20)
""",
        "ok",
        None,
    ),
    "output": (PATIENT, "while True: print('x' * 1000)", "output", ""),
    "network": (
        PATIENT,
        """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), 5)
    print("connected")
except OSError:
    print("refused")
""",
        "ok",
        "refused",
    ),
    "brackets": (PATIENT, "(" * 1_000_000, "error", ""),
    "unary": (PATIENT, "x = " + "-" * 1_000_000 + "1", "error", ""),
    "kills": (
        PATIENT,
        """
import os
for pid in [TARGET, os.getppid()]:
    try:
        os.kill(pid, 9)
    except OSError:
        pass
print("alive")
""",
        "ok",
        "alive",
    ),
    "deep folders": (
        PATIENT,
        "import os\nfor _ in range(300):\n    os.mkdir('d'); os.chdir('d')\nprint('deep')",
        "ok",
        "deep",
    ),
    "locked folder": (
        PATIENT,
        "import os\nos.mkdir('d'); open('d/f', 'w'); os.chmod('d', 0)\nprint(os.getcwd())",
        "ok",
        None,
    ),
}


TRY = """
import ctypes, errno, fcntl, os, resource, signal, socket, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def attempt(*acts):
    for act in acts:
        try:
            print("did it:", act())
        except (OSError, ValueError, MemoryError, RuntimeError):
            print("refused")
"""
# more of them, in short: the acts that must all be refused
REFUSED: dict[str, list[str]] = {
    "sockets of daemons": [
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'forged', 'SOCKET')",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'forged', chr(0) + 'MARK')",
        "socket.socketpair()[0].connect('SOCKET')",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    ],
    "system calls behind the filter": [
        "call('syscall', 425, 8, bytes(120))",  # io_uring
        "call('syscall', 0x40000000 + 41, 2, 1, 0)",  # socket of the x32 ABI
        "call('syscall', 435, struct.pack('=11Q', 0x10000000, *[0] * 10), 88)",  # clone3, user namespace
        "call('unshare', 0x10000000)", "call('setns', 0, 0)", "call('mount', b'none', b'/', b'tmpfs', 0, None)",
        "os.chroot('.')",
    ],
    "memory that outlives, or is not counted": [
        "call('shmget', 0, 1 << 20, 0o1600)", "call('shmctl', 0, 0, None)", "call('msgget', 0, 0o1600)",
        "call('semget', 0, 1, 0o1600)",
        "os.memfd_create('memory')",
    ],
    "other processes": [
        "call('ptrace', 16, TARGET, 0, 0)", "resource.prlimit(TARGET, resource.RLIMIT_CPU, (0, 0))",
        "os.pidfd_open(TARGET)",
        "open('/proc/TARGET/maps').read()", "open('/proc/self/mem')", "os.listdir('/proc')",
        "os.readlink('/proc/TARGET/exe')",
        "os.kill(-1, 9) or os.kill(TARGET, 0)", "call('syscall', 424, 0, 9, None, 0)",
    ],
    "folders of others": [
        "open('/tmp/MARK', 'w')", "os.symlink('SECRET', '/tmp/MARK')", "os.link('SECRET', 'copy')",
        "os.rename('SECRET', 'copy')",
        "os.unlink('SECRET')", "os.truncate('SECRET', 0)", "os.open('SECRET', os.O_RDONLY | os.O_TRUNC)",
        "os.listdir('/tmp')",
        "os.symlink('SECRET', 's') or open('s').read()", "open('/dev/shm/MARK', 'w')",
        "os.mknod('disk', 0o60600, 0x800)", "open('/etc/passwd').read()",
        "open(os.__file__, 'a')", "open('/dev/tty')",
    ],
    "rights": ["os.setuid(0)", "os.setgroups([0])", "os.setresuid(0, 0, 0)",
               "call('capset', struct.pack('=Ii', 0x20080522, 0), b'\\xff' * 24)"],
    "limits": [
        "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "[os.dup(0) for _ in range(100)]",
        "[threading.Thread(target=time.sleep, args=(1,)).start() for _ in range(200)]",
    ],
}  # fmt: skip
for name, acts in REFUSED.items():
    attempts = ", ".join(f"lambda: {act}" for act in acts)
    HOSTILE[name] = (PATIENT, f"{TRY}attempt({attempts})", "ok", "\n".join(["refused"] * len(acts)))
# and what may seem to work, as long as nothing of others has changed: `attack` looks
HOSTILE |= {
    "what belongs to the same user": (
        PATIENT,
        TRY
        + """
for act in [lambda: os.chmod("SECRET", 0o777), lambda: os.utime("SECRET", (0, 0)), lambda: os.setxattr("SECRET", "user.a", b"b"),
            lambda: os.setpriority(os.PRIO_PROCESS, TARGET, 19), lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
            lambda: os.sched_setscheduler(TARGET, os.SCHED_IDLE, os.sched_param(0))]:
    try:
        act()
    except OSError:
        pass
print("tried")
""",  # noqa: E501
        "ok",
        "tried",
    ),
    "a signal by way of a file": (
        PATIENT,
        TRY
        + """
try:
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, 10, int(signal.SIGKILL))
    fcntl.fcntl(ours, fcntl.F_SETOWN, TARGET)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
    theirs.send(b"now")
except OSError:
    pass
print("tried")
""",
        "ok",
        "tried",
    ),
    "hydra": (  # a process that is never the same for long
        PATIENT,
        """
import os, sys, time
print("left", flush=True)
if os.fork() == 0:
    ends = time.time() + 20
    os.setsid()
    while time.time() < ends:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            pass
    os._exit(0)
""",
        "ok",
        "left",
    ),
    "stops its watchers": (
        HASTY,
        (
            "import os, signal\nfor pid in (0, -1, os.getppid()):\n    try:\n        os.kill(pid, signal.SIGSTOP)\n"
            "    except OSError:\n        pass"
        ),
        "timeout",
        "",
    ),
    "writes on and on": (
        PATIENT,
        "import os, time\nif os.fork() == 0:\n    while True:\n        os.write(1, b'x')\ntime.sleep(60)",
        "output",
        "",
    ),
    "many files": (
        PATIENT,
        """
import os
written = 0
try:
    for name in range(16):
        with open(str(name), "wb") as file:
            written += file.write(bytes(4 << 20))
except OSError:
    pass
print(written >> 20)
""",
        "ok",
        None,
    ),
    "crash": (PATIENT, "import ctypes\nctypes.string_at(0)", "error", ""),
    "no stack": (PATIENT, "import sys\nsys.setrecursionlimit(10**9)\nf = lambda *_: max([0], key=f)\nf()", "error", ""),
    "no end": (HASTY, "import atexit, time\natexit.register(time.sleep, 60)", "timeout", ""),
}


def attack(python: str, name: str, folder: Path) -> dict[str, Any]:
    """What came of a hostile program: status, output, and what it did to the world."""
    limits, source, _, _ = HOSTILE[name]
    mark = f"{int.from_bytes(os.urandom(4), 'big') + 100000}"
    secret, place = folder / "secret", folder / f"socket-{mark}"
    secret.touch(mode=0o600)
    secret.write_text("the secret")
    before = secret.stat()
    target = subprocess.Popen(["sleep", "300"])
    limits_of_target = _limits_of(target.pid)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        daemon.bind(str(place))
        place.chmod(0o777)
        abstract.bind(f"\0{mark}")
        words = {"TARGET": target.pid, "SECRET": secret, "PORT": server.getsockname()[1], "MARK": mark, "SOCKET": place}
        for word, value in words.items():
            source = source.replace(word, str(value))
        (outcome,) = runner.run(python, limits, source, [("stdin", "")])
        connected = any(_has_visitor(listener) for listener in (server, daemon, abstract))
    survived = target.poll() is None
    unchanged = survived and _limits_of(target.pid) == limits_of_target and secret.read_text() == "the secret"
    after = secret.stat()
    target.kill()
    target.wait()
    place.unlink()
    return {
        "status": outcome.status,
        "output": outcome.output.strip(),
        "connected": connected,
        "target survived": survived,
        "others unchanged": unchanged and (before.st_mode, before.st_mtime_ns) == (after.st_mode, after.st_mtime_ns),
        "left": marked(mark),
    }


def _has_visitor(server: socket.socket) -> bool:
    server.settimeout(0.0)
    try:
        return bool(server.accept() if server.type == socket.SOCK_STREAM else server.recv(1))
    except BlockingIOError:
        return False


def _limits_of(pid: int) -> list[Any]:
    """What a program could change of another process of the same user."""
    cpu = resource.prlimit(pid, resource.RLIMIT_CPU)
    return [cpu, os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, 0)]


def marked(mark: str) -> list[int]:
    """Processes with `mark` in their command line."""
    pids: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


# leaves a daemon, and waits
DAEMON = HOSTILE["daemon"][1].replace('print("left")', "import time\ntime.sleep(60)")
STARTER = """
import json, sys
from rlpipe.extras.code_sandbox.confinement import ProgramLimits
from rlpipe.extras.code_sandbox.runner import run
python, source, time_s = json.load(sys.stdin)
list(run(python, ProgramLimits(time_s, time_s, 256, 4, 8), source, [("stdin", "")]))
"""
KILLED = ("starter", "upper supervisor", "lower supervisor")


def kill_above_a_daemon(python: str, killed: str, time_s: float) -> None:
    """SIGKILL to one of the processes above a program that has made a daemon;
    returns when the daemon has ended."""
    mark = f"{int.from_bytes(os.urandom(4), 'big') + 100000}"
    pipe = subprocess.PIPE
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=pipe, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert starter.stdin is not None
    starter.stdin.write(json.dumps([python, DAEMON.replace("MARK", mark), time_s]).encode())
    starter.stdin.close()
    until(lambda: len(marked(mark)) == 1, "the daemon did not start")
    (upper,) = _children(starter.pid)
    (lower,) = _children(upper)
    if killed == "starter":
        os.killpg(starter.pid, 9)  # as the pool does
    else:
        os.kill(upper if killed.startswith("upper") else lower, 9)
    try:
        until(lambda: marked(mark) == [], "the daemon stays")
    finally:
        starter.kill()
        starter.wait()
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def _children(parent: int) -> list[int]:
    pids: list[int] = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and f"PPid:\t{parent}\n" in (folder / "status").read_text():
                pids.append(int(folder.name))
    return pids


def judge(name: str, world: str, got: dict[str, Any]) -> None:
    """Asserts that a hostile program ended as documented.

    `world`: "root", "container" (root who cannot mount) or "user".
    """
    _, _, status, output = HOSTILE[name]
    assert got["status"] == status, got
    if name == "forks":
        assert int(got["output"]) < (50 if world == "user" else PATIENT.processes), got
    elif name == "disk":
        assert int(got["output"]) <= PATIENT.files_mb, got
    elif name == "many files":
        assert int(got["output"]) <= (PATIENT.files_mb if world == "root" else 64), got
    elif output is None:
        assert got["output"].startswith("/tmp/rlpipe-"), got
        assert not os.path.exists(got["output"]), "it left its folder"
    else:
        assert got["output"] == output, got
    assert not got["connected"]
    assert got["target survived"]
    assert got["others unchanged"]
    assert got["left"] == []


DOCKER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)  # of a container's root, by default


def enter_container() -> None:
    """From here on this process has no more rights than in a usual
    container: no mounts, no namespaces."""
    words = struct.pack("=2I", sum(1 << bit for bit in DOCKER_CAPABILITIES), 0)
    kept = (words[:4] * 2 + bytes(4)) + (words[4:] * 2 + bytes(4))
    for bit in set(range(41)) - set(DOCKER_CAPABILITIES):
        confinement.prctl(24, bit)  # PR_CAPBSET_DROP
    confinement.call("capset", struct.pack("=Ii", 0x20080522, 0), kept)
    try:
        confinement.call("unshare", confinement.CLONE_NEWNS)
    except PermissionError:
        return
    raise AssertionError("this is no container")


def main() -> None:
    """Every hostile program, as JSON; in a container when an argument says so."""
    if sys.argv[1:] == ["container"]:
        enter_container()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: attack(sys.executable, name, Path(folder)) for name in HOSTILE}
    for killed in KILLED:
        kill_above_a_daemon(sys.executable, killed, SHORT_S if killed.startswith("upper") else DEADLINE_S)
    print(json.dumps([runner.check_interpreter(sys.executable), results]))


if __name__ == "__main__":
    main()
