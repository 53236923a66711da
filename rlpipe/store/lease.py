"""One holder per run.

Leases are numbered. The process that takes the run creates the next number exclusively, and each
number is a fence: a holder is superseded exactly when the next number exists. It checks that before
each commit and each deletion. Announcements of runs that are only being prepared lie beside the
leases. The rule, why nothing is lost by it, and a table of what may still come late: docs/store.md.

A holder on this machine (boot, pid namespace) is dead by its pid and start time; a holder on
another is dead when its heartbeat stands still for `STALE_S` of *our* clock, so clocks need not
agree.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rlpipe.base.errors import StoreError, UserError
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.heartbeat import Heartbeat, Look
from rlpipe.store.holder import Holder, this_process
from rlpipe.store.patience import hurrying

HEARTBEAT_S = 10.0
STALE_S = 35.0
TAKEOVERS_MAX = 5
# a lease whose deeds take longer is not released: others wait until its heartbeat is old
DEEDS_S = 60.0
READERS = 16  # of leases, at the same time
NAME, ANNOUNCED = re.compile(r"\d{6,}\.json"), re.compile(r"announced-[0-9a-f]+\.json")


class RunHeld(UserError):
    """Raised when another process works on the run.

    `flow_run`: the flow run that it works for, as recorded when it took the run.
    """

    def __init__(self, message: str, flow_run: str = "") -> None:
        super().__init__(message)
        self.flow_run = flow_run


class TakenOver(UserError):
    """Raised when another process has taken the run, because it took this one for dead.

    `flow_run`: the flow run that the other process works for.
    """

    def __init__(self, message: str, flow_run: str = "") -> None:
        super().__init__(message)
        self.flow_run = flow_run


class Lease:
    """A held lease.

    Each commit and each deletion of its holder is a `deed`; a holder that was taken over does no
    more of them.
    """

    def __init__(self, store: Store, run_root: str, number: int, holder: Holder) -> None:
        self.number = number
        self._store, self._run_root = store, run_root
        self._over: TakenOver | None = None
        self._listener: Callable[[], object] | None = None
        self._changed = threading.Condition()
        self._deeds, self._released = 0, False
        self._looked_at = time.monotonic()
        fence = _key(run_root, number + 1)
        self._heartbeat = Heartbeat(store, _key(run_root, number), holder, HEARTBEAT_S, fence, self._on_look)

    def _on_look(self, look: Look) -> None:
        """Takes a report of the heartbeat, and calls the listener when the run was taken over."""
        self._looked_at = max(self._looked_at, look.at)
        if look.is_fenced and self._over is None:
            self._tell()

    def check(self) -> None:
        """Reads the store once; TakenOver, naming the new holder, when another process has taken
        the run.
        """
        if self._over is None and self._store.exists(_key(self._run_root, self.number + 1)):
            self._tell()
        self._looked_at = time.monotonic()
        if self._over is not None:
            raise TakenOver(str(self._over), self._over.flow_run)

    def check_unless_fresh(self) -> None:
        """As `check`; reads nothing where the heartbeat has looked a moment ago."""
        if self.is_over or time.monotonic() - self._looked_at > 2 * HEARTBEAT_S:
            self.check()

    @property
    def is_over(self) -> bool:
        """True when it is known already that the run was taken over. Does not read the store."""
        return self._over is not None

    def on_taken_over(self, act: Callable[[], object] | None) -> None:
        """Sets the listener: `act` is called once, in the thread that finds the run taken over;
        None removes it.
        """
        self._listener = act
        if self._over is not None and act is not None:
            act()

    def _tell(self) -> None:
        name, by, since, flow_run = self._run_root.removeprefix("runs/"), "another process", "", ""
        with contextlib.suppress(StoreError, OSError), hurrying():
            successor = read_document(self._store, _key(self._run_root, self.number + 1), Holder)
            by, since, flow_run = (
                f"host {successor.host} (pid {successor.pid})",
                f" at {successor.since}",
                successor.flow_run,
            )
        lost = f"run {name} was taken over by {by}{since}: this process ends, and nothing that it committed is lost"
        self._over = TakenOver(lost, flow_run)
        if self._listener is not None:
            self._listener()

    @contextlib.contextmanager
    def deed(self) -> Iterator[None]:
        """Checks the lease before the body, which writes or deletes one thing of the run: TakenOver
        when the run was taken over, StoreError once the lease was released.
        """
        with self._changed:
            if self._released:
                raise StoreError(
                    f"{_key(self._run_root, self.number)} was released: nothing more can be committed under this lease"
                )
            self._deeds += 1
        try:
            self.check()
            yield
        finally:
            with self._changed:
                self._deeds -= 1
                self._changed.notify_all()

    def release(self) -> None:
        """Records that nobody holds the run any more, and that this holder writes nothing more."""
        self._heartbeat.end()
        with self._changed:
            self._released = True
            if not self._changed.wait_for(lambda: not self._deeds, DEEDS_S):
                return
        self._store.put(_key(self._run_root, self.number), sealed(replace(self._heartbeat.holder, released=True)))


@contextlib.contextmanager
def fenced(held: Lease | None) -> Iterator[None]:
    """As `Lease.deed`; only the body where nobody holds the run (tools, tests)."""
    with held.deed() if held else contextlib.nullcontext():
        yield


class Announcement:
    """The announcement that this process prepares a run.

    `vanish` deletes its key; the folder of a store that had none stays.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self.of_process = store, key, os.getpid()
        self._heartbeat = Heartbeat(store, key, this_process(), HEARTBEAT_S, fence="", on_look=lambda _: None)

    def vanish(self) -> None:
        self._heartbeat.end()
        if self._heartbeat.holder.beats:
            with contextlib.suppress(OSError):  # then the key stays; without a beat it has no effect
                self._store.delete(self._key)


_announcements: dict[tuple[str, str], Announcement] = {}  # of this process, by store and run


def acquire(store: Store, run_root: str, flow_run: str = "") -> Lease:
    """Takes the lease of a run, for a flow run; RunHeld naming host and pid of a holder that
    lives.
    """
    for _ in range(TAKEOVERS_MAX):
        number, own = check_free(store, run_root) + 1, this_process(flow_run)
        if store.create(_key(run_root, number), sealed(own)):
            withdraw(store, run_root)
            return Lease(store, run_root, number, own)
    raise RunHeld(f"{run_root}: {TAKEOVERS_MAX} others took the run first; is a scheduler starting it in a loop?")


def announce(store: Store, run_root: str) -> None:
    """Announces, from HEARTBEAT_S on, that this process prepares a run, until it has the run's
    lease, withdraws, or ends. The run's services see it by `pulse`, and wait.

    Any number of processes may announce at once.
    """
    key = f"{run_root}/lease/announced-{secrets.token_hex(4)}.json"
    withdraw(store, run_root)
    _announcements[store.url, run_root] = Announcement(store, key)


def withdraw(store: Store, run_root: str) -> None:
    """Deletes the announcement of this process; one that was withdrawn before its first beat has
    written nothing.
    """
    if announcement := _announcements.pop((store.url, run_root), None):
        announcement.vanish()


@atexit.register
def _withdraw_all() -> None:
    for announcement in _announcements.values():
        if announcement.of_process == os.getpid():  # not those of a process that this one was forked from
            announcement.vanish()


def pulse(store: Store, run_root: str) -> str:
    """A hash of a run's newest lease and its announcements, read once.

    It changes within HEARTBEAT_S while a process, on any host, works on the run or prepares it.
    """
    names = {key.rsplit("/", 1)[-1] for key in store.list(f"{run_root}/lease")}
    held = [_key(run_root, number) for number in _numbers(names)[-1:]]
    said = hashlib.sha256()
    for key in [*held, *(f"{run_root}/lease/{name}" for name in sorted(filter(ANNOUNCED.fullmatch, names)))]:
        with contextlib.suppress(StoreError):  # gone since the listing
            said.update(store.read(key))
    return said.hexdigest()


def check_free(store: Store, run_root: str) -> int:
    """The number of the newest lease (-1: none). Writes nothing.

    RunHeld when its holder lives, or when the holder of an older lease that was not released is a
    process on this machine, even a stopped one. The holder of an older lease elsewhere may still do
    one late deed at most (docs/store.md).
    """
    leases = numbers(store, run_root)
    newest = leases[-1] if leases else -1
    for number, holder in unreleased(store, run_root, leases).items():
        if holder.is_here or (number == newest and _lives(store, _key(run_root, number), holder)):
            raise RunHeld(
                f"run {run_root.removeprefix('runs/')} is held by {holder}; wait for it, stop it, or start under"
                " another name (--run)",
                holder.flow_run,
            )
    return newest


def numbers(store: Store, run_root: str) -> list[int]:
    """The numbers of all leases of a run, in order.

    StoreError where a folder has the name of a lease: no process could take the run.
    """
    folder = f"{run_root}/lease"
    if wrong := [name for name in (store.folders(folder) if store.local else ()) if NAME.fullmatch(name)]:
        raise StoreError(
            f"{store.address(folder)}/{wrong[0]} is a folder, and no lease; remove it if no process works on the run"
        )
    return _numbers({key.rsplit("/", 1)[-1] for key in store.list(folder)})


def unreleased(store: Store, run_root: str, leases: list[int]) -> dict[int, Holder]:
    """The holders of those of these leases that were not released; StoreError for a damaged
    lease.
    """
    with ThreadPoolExecutor(READERS) as readers:
        holders = [*readers.map(lambda number: _read(store, _key(run_root, number)), leases)]
    return {number: holder for number, holder in zip(leases, holders, strict=True) if holder is not None}


def write_off(store: Store, run_root: str, number: int) -> None:
    """Releases the lease of a holder that a person declares lost; UserError where it was released
    already, or its process lives on this machine.
    """
    holder = unreleased(store, run_root, [number]).get(number) if number in numbers(store, run_root) else None
    if holder is None:
        raise UserError(f"--lost {number}: the run has no such lease, or it was released")
    if holder.is_here:
        raise UserError(f"--lost {number}: {holder} lives")
    store.put(_key(run_root, number), sealed(replace(holder, released=True)))


def held_by(store: Store, run_root: str) -> str:
    """Says which process works on a run, read once: `working`, `held on HOST`, or nothing.

    `held on HOST` is for a holder on another host; its process may be dead.
    """
    leases = numbers(store, run_root)[-1:]
    holder = unreleased(store, run_root, leases).get(leases[0]) if leases else None
    if holder is None:
        return ""
    if not holder.is_of_here:
        return f"held on {holder.host}"
    return "working" if holder.is_here else ""


def _numbers(names: set[str]) -> list[int]:
    return sorted(number for name in names if NAME.fullmatch(name) and name == f"{(number := int(name[:-5])):06d}.json")


def _read(store: Store, key: str) -> Holder | None:
    """The holder of a lease; None when the lease was released."""
    try:
        holder = read_document(store, key, Holder)
    except StoreError as error:
        raise type(error)(f"{error}, or remove it if no process works on the run") from error
    return None if holder.released else holder


def _key(run_root: str, number: int) -> str:
    return f"{run_root}/lease/{number:06d}.json"


def _lives(store: Store, key: str, holder: Holder) -> bool:
    if holder.is_of_here:
        return holder.is_here
    deadline = time.monotonic() + STALE_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = _read(store, key)
        if now is None or now.beats != holder.beats:
            return now is not None
    return False
