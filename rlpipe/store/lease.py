"""One holder per run. A lease is created exclusively; a dead holder's is succeeded by the next number.

Whether a holder is dead: on this host its pid and start time say so; on another host its heartbeat must stand still for
`STALE_S` of *our* clock, so clocks need not agree. Artifacts commit exclusively, so even two holders could not tear a run.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field

import psutil

from rlpipe.store.backend import Store
from rlpipe.types import JsonDict, UserError, canonical_json

HEARTBEAT_S = 10.0
STALE_S = 35.0
TAKEOVERS_MAX = 5


class RunHeld(UserError):
    """Another process works on the run."""


@dataclass
class Lease:
    """A held lease; its heartbeat runs in a thread until `release`."""

    store: Store
    key: str
    record: JsonDict
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start_heartbeat(self) -> None:
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease-heartbeat")
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self.record = {**self.record, "beats": self.record["beats"] + 1}
            try:
                self.store.put(self.key, canonical_json(self.record))
            except OSError:
                continue  # a passing store fault costs a beat, not the run; the next beat tries again

    def release(self) -> None:
        """Says that nobody holds the run any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=HEARTBEAT_S)
        self.store.put(self.key, canonical_json({**self.record, "released": True}))


def acquire(store: Store, run_root: str) -> Lease:
    """The lease of a run; RunHeld naming host and pid of a holder that lives."""
    for _ in range(TAKEOVERS_MAX):
        newest = check_free(store, run_root)
        key = f"{run_root}/lease/{newest + 1:06d}.json"
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": _start_time(os.getpid()),
            "beats": 0,
            "released": False,
        }
        if store.create(key, canonical_json(record)):
            lease = Lease(store, key, record)
            lease.start_heartbeat()
            return lease
    raise RunHeld(f"{run_root}: {TAKEOVERS_MAX} others took the run first; is a scheduler starting it in a loop?")


def check_free(store: Store, run_root: str) -> int:
    """The number of the newest lease (-1: none); RunHeld when its holder lives. Writes nothing."""
    names = [key.rsplit("/", 1)[-1] for key in store.list(f"{run_root}/lease")]
    newest = max((int(name.removesuffix(".json")) for name in names if not name.startswith(".")), default=-1)
    if newest < 0:
        return newest
    key = f"{run_root}/lease/{newest:06d}.json"
    record = json.loads(store.read(key))
    if not record["released"] and _lives(store, key, record):
        raise RunHeld(
            f"run {run_root.removeprefix('runs/')} is held by pid {record['pid']} on host {record['host']}; "
            "wait for it, stop it, or start under another name (--run)"
        )
    return newest


def _lives(store: Store, key: str, record: JsonDict) -> bool:
    if record["host"] == socket.gethostname():
        return _start_time(record["pid"]) == record["process_started"]
    deadline = time.monotonic() + STALE_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = json.loads(store.read(key))
        if now["released"]:
            return False
        if now["beats"] != record["beats"]:
            return True
    return False


def _start_time(pid: int) -> float | None:
    """When a process of this host started; None when it is gone or a zombie. Guards against reused pids."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        # since boot: the wall-clock time of a start moves when the clock is set
        return round(process.create_time() - psutil.boot_time(), 1)
    except psutil.NoSuchProcess:
        return None
