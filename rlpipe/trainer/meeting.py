"""Messages between the ranks over a TCPStore, beside their collectives: heartbeats, and the results
of uploads.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from torch._C._distributed_c10d import TCPStore

from rlpipe.base.errors import StoreError
from rlpipe.trainer.launcher import LISTENER_VARIABLE
from rlpipe.trainer.ranks import DATA_TIMEOUT, Ranks

log = logging.getLogger(__name__)
BEAT_S = 1.0
SILENT_S = 5.0  # after a failure a rank that is silent for longer counts as lost
# a rank stays so long after its collective failed: by then rank 0 knows which rank is silent
LAST_WORDS_S = 10.0
START_TIMEOUT = timedelta(minutes=10)  # between the starts of two nodes
LOOK_S = 0.2  # how often node 0 checks for another node's upload


def _meeting_point(timeout: timedelta = DATA_TIMEOUT, listener: int | None = None) -> TCPStore:
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def come_to_meet() -> TCPStore:
    """Returns the TCPStore at which the ranks meet; to be called before anything else. The first
    rank serves it, on the socket that its launcher bound, for as long as it keeps this object.
    """
    if (listener := os.environ.pop(LISTENER_VARIABLE, None)) is not None:
        return _meeting_point(listener=int(listener))
    meeting = _meeting_point(START_TIMEOUT)
    meeting.set_timeout(DATA_TIMEOUT)
    return meeting


class Sent:
    """Tells the first node how the upload of each save ended on every node, so that it knows when
    the store has all files. Called once per save, on each node.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._nodes, self._node, self._saves = ranks.nodes, ranks.node, 0
        self._store = _meeting_point()

    def __call__(self, fault: BaseException | None) -> None:
        """Reports how the upload ended on this node; the first node waits for the others, and
        raises their faults. A lost node ends the trainer, and so this wait.
        """
        self._saves += 1
        if self._node:
            ended = None if fault is None else [isinstance(fault, OSError), str(fault)]
            self._store.set(self._key(self._node), json.dumps(ended))
        elif fault is None:
            for node in range(1, self._nodes):
                self._wait_for(node)

    def _wait_for(self, node: int) -> None:
        while not self._store.check([self._key(node)]):
            time.sleep(LOOK_S)
        ended = json.loads(self._store.get(self._key(node)))
        if ended is not None:
            is_away, why = ended
            message = f"node {node}: {why}"
            raise OSError(errno.EIO, message) if is_away else StoreError(message)

    def _key(self, node: int) -> str:
        return f"rlpipe/sent/{self._saves}/{node}"


class Pulse:
    """Heartbeats: every rank writes one to the TCPStore, in a thread of its own, and rank 0 reads
    them, as a collective that fails does not say which rank is lost.

    `lost`: called with the reason why the trainer cannot go on; it ends this process.
    """

    def __init__(self, ranks: Ranks, meeting: TCPStore, lost: Callable[[str], None]) -> None:
        self._ranks, self._store, self._lost, self._beats = ranks, meeting, lost, 0
        self._beat()
        self._places = ranks.gather([int(os.environ["GROUP_RANK"]), socket.gethostname()])
        self._heard = [(b"", time.monotonic())] * ranks.size

    def nodes(self) -> list[dict[str, object]]:
        """All nodes, with their ranks and the most seconds for which one of these has been
        silent.
        """
        ranks: dict[tuple[int, str], list[int]] = {}
        for rank, (node, host) in enumerate(self._places):
            ranks.setdefault((node, host), []).append(rank)
        return [
            {"node": node, "host": host, "ranks": own, "silent_s": max(map(self._silent_s, own))}
            for (node, host), own in ranks.items()
        ]

    def silent(self, seconds: float) -> str:
        """The nodes with a rank that has been silent for longer than `seconds`, as text; empty
        without one.
        """
        silent = {rank: self._silent_s(rank) for rank in range(self._ranks.size) if self._silent_s(rank) > seconds}
        names = [
            f"node {self._places[rank][0]} ({self._places[rank][1]}): rank {rank} has been silent for"
            f" {silent[rank]:.0f} s"
            for rank in silent
        ]
        return "; ".join(names)

    def __enter__(self) -> Pulse:
        threading.Thread(target=self._run, daemon=True, name="pulse").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            log.error("rank %d failed", self._ranks.rank, exc_info=error)
            # rank 0 ends first: when one rank ends, the launcher ends the other ranks of its node
            time.sleep(LAST_WORDS_S * (1 if self._ranks.rank == 0 else 2) if self._ranks.size > 1 else 0)
            self._lost(self.silent(SILENT_S) or f"rank {self._ranks.rank} failed: {error!r:.300}")

    def _run(self) -> None:
        try:
            while True:
                self._beat()
                if self._ranks.rank == 0:
                    self._listen()
                time.sleep(BEAT_S)
        except RuntimeError as error:
            self._lost(f"node 0 is lost, and with it the address at which all trainer processes meet ({error!s:.300})")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"rlpipe/beat/{self._ranks.rank}", str(self._beats))

    def _listen(self) -> None:
        beats = self._store.multi_get([f"rlpipe/beat/{rank}" for rank in range(self._ranks.size)])
        for rank, beat in enumerate(beats):
            if beat != self._heard[rank][0]:
                self._heard[rank] = (beat, time.monotonic())
        if silent := self.silent(self._ranks.options.silent_s_max):
            self._lost(silent)

    def _silent_s(self, rank: int) -> float:
        return round(time.monotonic() - self._heard[rank][1], 1)
