"""The heartbeat of a process that holds or prepares a run: a second process, which beats for as
long as the first lives and is not stopped. So the first does not look dead while its threads cannot
run, as when a library holds the interpreter's lock for a minute.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import psutil

from rlpipe.base.errors import StoreError
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import sealed
from rlpipe.store.holder import Holder
from rlpipe.store.patience import hurrying

log = logging.getLogger(__name__)
STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
END_S = 10.0  # how long `end` waits for a beat in progress


@dataclass(frozen=True)
class Look:
    """A report of the heartbeat: when it last read the store, and if the fence existed.

    `at`: by the monotonic clock, which no process sets.
    """

    at: float
    beats: int
    is_fenced: bool


class Heartbeat:
    """Writes a beat to `key` every `every_s`, the first time after `every_s`, until `end` or until
    the key `fence` exists; it looks for the fence before each beat.
    """

    def __init__(
        self, store: Store, key: str, holder: Holder, every_s: float, fence: str, on_look: Callable[[Look], object]
    ) -> None:
        """`fence`: empty for none; `on_look`: called in a thread of this process after each
        look.
        """
        self.holder = holder
        self._store, self._key, self._every_s, self._fence, self._on_look = store, key, every_s, fence, on_look
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_fenced, self._is_missed, self._looks = False, False, 0
        self._thread = threading.Thread(target=self._attend, daemon=True, name="heartbeat")
        self._thread.start()

    def _attend(self) -> None:
        """Starts the process after a moment, since many leases are released by then.

        Starts it again when it ended or could not be started, and warns once when it sent no
        report.
        """
        while not self._is_fenced and not self._stop.wait(self._every_s / 5):
            why, looks = "", self._looks
            try:
                self._listen()
            except (OSError, ValueError) as error:
                # no process could be started, or it ended before it got its order
                why = f" ({error})"
            if looks == self._looks and not self._is_missed and not self._stop.is_set():
                self._is_missed = True
                log.warning(
                    "%s: its heartbeat cannot work%s, and is tried again: until it does, "
                    "other hosts may take this process for dead",
                    self._key, why,
                )  # fmt: skip

    def _listen(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "rlpipe.store.heartbeat"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL if self._is_missed else None,  # its traceback is shown once, too
                start_new_session=True,  # Ctrl-C must not end it
            )  # fmt: skip
        with process:
            assert process.stdin is not None and process.stdout is not None
            order = {"store": self._store.url, "key": self._key,
                     "holder": asdict(self.holder), "every_s": self._every_s,
                     "fence": self._fence, "parent": os.getpid()}  # fmt: skip
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            for look in _said(process.stdout):
                self._looks += 1
                self.holder, self._is_fenced = replace(self.holder, beats=look.beats), look.is_fenced
                self._on_look(look)

    def end(self) -> None:
        """Ends the heartbeat: no beat comes after this."""
        assert not self._stop.is_set(), f"{self._key} is released already"
        self._stop.set()
        with self._lock:
            process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                process.stdin.write("end\n")
                process.stdin.flush()
        self._thread.join(END_S)
        if process is not None and self._thread.is_alive():  # the store does not answer
            process.kill()
            self._thread.join(END_S)


def _said(lines: Iterable[str]) -> Iterator[Look]:
    """Yields the reports of a heartbeat. Skips other lines, which a `sitecustomize` has printed."""
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            yield Look(**json.loads(line))


def beat(orders: io.FileIO, store: Store, key: str, holder: Holder, every_s: float, fence: str, parent: int) -> None:
    """Beats until the process `parent` ends, until a line or the end of `orders`, or until `fence`
    exists.
    """
    while not select.select([orders], [], [], every_s)[0] and os.getppid() == parent:
        if psutil.Process(parent).status() in STOPPED:
            continue  # it works on nothing: another may take its run
        # a fault of the store costs a beat; the next one tries again
        with contextlib.suppress(OSError, StoreError), hurrying():
            look = Look(time.monotonic(), holder.beats, is_fenced=bool(fence) and store.exists(fence))
            if not look.is_fenced:
                holder = replace(holder, beats=holder.beats + 1)
            print(json.dumps(asdict(replace(look, beats=holder.beats))), flush=True)
            if look.is_fenced:
                return
            store.put(key, sealed(holder))


def main() -> None:
    logging.disable()  # the process that it beats for says itself that the store does not answer
    ended = psutil.NoSuchProcess, BrokenPipeError, ValueError  # the last: before it gave its order
    # without a buffer, whose content `select` does not see
    with contextlib.suppress(*ended), io.FileIO(0, closefd=False) as orders:
        order = json.loads(orders.readline())
        store, holder = open_store(order.pop("store")), Holder(**order.pop("holder"))
        beat(orders, store, holder=holder, **order)


if __name__ == "__main__":
    main()
