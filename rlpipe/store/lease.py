"""One holder per run. A lease is created exclusively; a dead holder's is succeeded by the next number. Beside it lies what announces a
run that is only being prepared.

Whether a holder is dead: on this host its pid and start time say so; on another host its heartbeat must stand still for
`STALE_S` of *our* clock, so clocks need not agree. Artifacts commit exclusively, so even two holders could not tear a run.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass, replace

import psutil
from pydantic import StrictBool

from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.types import StoreError, UserError

HEARTBEAT_S = 10.0
STALE_S = 35.0
TAKEOVERS_MAX = 5
NAME, ANNOUNCED = re.compile(r"\d{6,}\.json"), re.compile(r"announced-[0-9a-f]+\.json")


class RunHeld(UserError):
    """Another process works on the run. `flow_run`: what it works for, as it said when it took the run."""

    def __init__(self, message: str, flow_run: str = "") -> None:
        super().__init__(message)
        self.flow_run = flow_run


@dataclass(frozen=True)
class Holder:
    """What a lease says of the process that holds it. `flow_run`: the id of Prefect's flow run that it works for; empty without one."""

    host: str
    pid: int
    process_started: float | None
    beats: int = 0
    released: StrictBool = False
    flow_run: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host that lives."""
        return self.host == socket.gethostname() and _start_time(self.pid) == self.process_started


class Lease:
    """A held lease, or an announcement; its heartbeat runs in a thread until `release` or `vanish`, the first after HEARTBEAT_S."""

    def __init__(self, store: Store, key: str, holder: Holder) -> None:
        self._store, self._key, self._holder = store, key, holder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease-heartbeat")
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._holder = replace(self._holder, beats=self._holder.beats + 1)
            try:
                self._store.put(self._key, sealed(self._holder))
            except OSError:
                continue  # a passing store fault costs a beat, not the run; the next beat tries again

    def _end(self) -> None:
        assert not self._stop.is_set(), f"{self._key} is released already"
        self._stop.set()
        self._thread.join(timeout=HEARTBEAT_S)

    def release(self) -> None:
        """Says that nobody holds the run any more."""
        self._end()
        self._store.put(self._key, sealed(replace(self._holder, released=True)))

    def vanish(self) -> None:
        """Leaves nothing; of an announcement."""
        self._end()
        if self._holder.beats:
            with contextlib.suppress(OSError):  # then it stays, and says nothing without a beat
                self._store.delete(self._key)


_announcements: dict[tuple[str, str], Lease] = {}  # of this process, by store and run


def acquire(store: Store, run_root: str, flow_run: str = "") -> Lease:
    """The lease of a run, for a flow run; RunHeld naming host and pid of a holder that lives."""
    for _ in range(TAKEOVERS_MAX):
        key = _key(run_root, check_free(store, run_root) + 1)
        own = replace(_this_process(), flow_run=flow_run)
        if store.create(key, sealed(own)):
            withdraw(store, run_root)
            return Lease(store, key, own)
    raise RunHeld(f"{run_root}: {TAKEOVERS_MAX} others took the run first; is a scheduler starting it in a loop?")


def announce(store: Store, run_root: str) -> None:
    """Says, from HEARTBEAT_S on, that this process prepares a run: until it has the run's lease, withdraws, or ends. The services of the
    run see that by `pulse`, and wait. Any number of processes may do so at once."""
    key = f"{run_root}/lease/announced-{secrets.token_hex(4)}.json"
    withdraw(store, run_root)
    _announcements[store.url, run_root] = Lease(store, key, _this_process())


def withdraw(store: Store, run_root: str) -> None:
    """Takes the announcement of this process away; nothing is left of it, and one that was never seen wrote nothing."""
    if announcement := _announcements.pop((store.url, run_root), None):
        announcement.vanish()


@atexit.register
def _withdraw_all() -> None:
    for announcement in _announcements.values():
        announcement.vanish()


def pulse(store: Store, run_root: str) -> str:
    """What a run's newest lease and its announcements say, by one look: another answer after HEARTBEAT_S where a process, of any host,
    works on the run or prepares it; the same one where none does."""
    names = {key.rsplit("/", 1)[-1] for key in store.list(f"{run_root}/lease")}
    held = sorted((name for name in names if NAME.fullmatch(name)), key=lambda name: (len(name), name))[-1:]
    said = hashlib.sha256()
    for name in [*held, *sorted(filter(ANNOUNCED.fullmatch, names))]:
        with contextlib.suppress(StoreError):  # gone since the listing
            said.update(store.read(f"{run_root}/lease/{name}"))
    return said.hexdigest()


def check_free(store: Store, run_root: str) -> int:
    """The number of the newest lease (-1: none); RunHeld when its holder lives. Writes nothing."""
    newest, holder = _newest(store, run_root)
    if holder and _lives(store, _key(run_root, newest), holder):
        raise RunHeld(
            f"run {run_root.removeprefix('runs/')} is held by pid {holder.pid} on host {holder.host}; "
            "wait for it, stop it, or start under another name (--run)",
            holder.flow_run,
        )
    return newest


def held_by(store: Store, run_root: str) -> str:
    """Who works on a run, by one look: `working`, for another host `held on HOST` (which may be dead), or nothing."""
    _, holder = _newest(store, run_root)
    if holder is None:
        return ""
    if holder.host != socket.gethostname():
        return f"held on {holder.host}"
    return "working" if holder.is_here else ""


def _this_process() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), _start_time(os.getpid()))


def _newest(store: Store, run_root: str) -> tuple[int, Holder | None]:
    """Number and holder of the newest lease; -1 where there is none, None where nobody holds it."""
    names = [key.rsplit("/", 1)[-1] for key in store.list(f"{run_root}/lease")]
    newest = max((int(name.removesuffix(".json")) for name in names if NAME.fullmatch(name)), default=-1)
    return newest, _read(store, _key(run_root, newest)) if newest >= 0 else None


def _read(store: Store, key: str) -> Holder | None:
    try:
        holder = read_document(store, key, Holder)
    except StoreError as error:
        raise StoreError(f"{error}, or remove it if no process works on the run") from error
    return None if holder.released else holder


def _key(run_root: str, number: int) -> str:
    return f"{run_root}/lease/{number:06d}.json"


def _lives(store: Store, key: str, holder: Holder) -> bool:
    if holder.host == socket.gethostname():
        return holder.is_here
    deadline = time.monotonic() + STALE_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = _read(store, key)
        if now is None or now.beats != holder.beats:
            return now is not None
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
