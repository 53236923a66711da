"""Checks that a process still works on the run of a service: a service that is not started again
stays for as long as one does, busy or not.

A process that works on a run renews its lease, one that prepares it renews its announcement
(`rlpipe.store.lease`). Clocks of different machines are not compared.
"""

from __future__ import annotations

import asyncio
import logging
import time

from rlpipe.base.errors import StoreError
from rlpipe.store.backend import Store
from rlpipe.store.lease import HEARTBEAT_S, STALE_S, pulse

log = logging.getLogger(__name__)
LOOK_S = 50.0  # a look is one listing and one small read of the store
SAY_S = 60.0


class RunWatch:
    """Looks at one run in the store about once a minute, more often if `idle_timeout_s` is short.

    `idle_timeout_s`: the time for which a service without work stays; 0: for ever.
    """

    def __init__(self, store: Store, run: str, idle_timeout_s: float) -> None:
        self.store, self.run, self.idle_timeout_s = store, run, idle_timeout_s
        self._look_s = min(LOOK_S, max(idle_timeout_s / 2, HEARTBEAT_S)) if idle_timeout_s else LOOK_S
        self._pulse, self._has_beaten = "", False
        self._beat_at = self._said_at = time.monotonic()
        self._looked_at = float("-inf")

    async def gone_s(self) -> float:
        """The seconds, at the last look, for which no process has worked on the run or prepared it;
        0 until its last renewal is STALE_S old.

        Time in which the store cannot be read does not count.
        """
        if time.monotonic() - self._looked_at >= self._look_s:
            try:
                now = await asyncio.to_thread(pulse, self.store, f"runs/{self.run}")
                beats = now != self._pulse
                self._has_beaten |= beats and bool(self._pulse)
                self._pulse = now
            except (OSError, StoreError) as error:
                log.warning(
                    "cannot read from the store whether a process works on run %s, and tries again: %s", self.run, error
                )
                beats = True
            self._looked_at = time.monotonic()
            self._beat_at = self._looked_at if beats else self._beat_at
        return max(0.0, self._looked_at - self._beat_at - STALE_S)

    async def is_over(self, idle_s: float) -> bool:
        """True when a service that has had no work for `idle_s` is to end; False while a process
        works on the run.

        A service that waits logs a line every minute.
        """
        gone_s = await self.gone_s()
        if 0 < self.idle_timeout_s < min(idle_s, gone_s):
            return True
        if min(time.monotonic() - self._said_at, idle_s) >= SAY_S:
            self._said_at = time.monotonic()
            log.info("no work for %.0f s: %s", idle_s, self._state(gone_s))
        return False

    def _state(self, gone_s: float) -> str:
        if not gone_s and self._has_beaten:
            return f"run {self.run} is worked on, or being prepared, and asks when it needs this service"
        leaves = (
            f"after {self.idle_timeout_s + STALE_S:g} s of that it ends"
            if self.idle_timeout_s
            else "it waits until it is stopped"
        )
        return f"nobody has worked on run {self.run} for {self._looked_at - self._beat_at:.0f} s; {leaves}"
