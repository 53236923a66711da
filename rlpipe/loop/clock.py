"""The times of an iteration's stages, and the part of its time in which each service was idle.

The services are trainer and engines. `time/orchestration_s` is the time in which no stage ran.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from rlpipe.base.values import Metrics

ANY_STAGE, TRAINER, ENGINES = "any stage", "trainer", "engines"  # what is busy
USES = {"train": TRAINER, "checkpoint": TRAINER, "generate": ENGINES, "reload_engines": ENGINES, "evaluate": ENGINES}
Hand = tuple[int, str] | str  # (iteration, stage verb), or what is busy


class Clock:
    """The seconds that each stage ran; while several overlap (shards), time counts once.

    A stage counts for its own iteration, also when it runs ahead of it. The busy time of trainer
    and engines counts from one commit to the next.
    """

    def __init__(self) -> None:
        self.seconds: dict[Hand, float] = defaultdict(float)
        self._running: Counter[Hand] = Counter()
        self._since: dict[Hand, float] = {}
        self._restart(-1)

    def begin(self, iteration: int) -> None:
        """Starts to count an iteration: from the commit before it where this process made that
        commit, else from now.
        """
        if iteration != self._iteration:
            self._restart(iteration)

    @contextlib.contextmanager
    def during(self, verb: str, iteration: int | None = None) -> Iterator[None]:
        """Counts the body as a stage of an iteration (default: the current one), and as busy time
        of the service that it uses.
        """
        hands: list[Hand] = [(self._iteration if iteration is None else iteration, verb), ANY_STAGE]
        hands += [USES[verb]] if verb in USES else []
        for hand in hands:
            self._running[hand] += 1
            if self._running[hand] == 1:
                self._since[hand] = time.monotonic()
        try:
            yield
        finally:
            for hand in hands:
                self._running[hand] -= 1
                assert self._running[hand] >= 0, f"{hand} ended more often than it began"
                if self._running[hand] == 0:
                    self.seconds[hand] += time.monotonic() - self._since.pop(hand)

    def at_commit(self, iteration: int) -> Metrics:
        """Returns the times of an iteration in seconds, and the idle fraction of each service that
        it used.

        Starts to count the next iteration.
        """
        now = time.monotonic()
        for hand in (hand for hand in self._since if isinstance(hand, str)):
            self.seconds[hand] += now - self._since[hand]
        whole_s = now - self._began
        times = {
            f"time/{hand[1]}_s": spent
            for hand, spent in self.seconds.items()
            if isinstance(hand, tuple) and hand[0] == iteration
        }
        times |= {"time/iteration_s": whole_s, "time/orchestration_s": whole_s - self.seconds[ANY_STAGE]}
        used = [service for service in (TRAINER, ENGINES) if service in self.seconds]
        times |= {
            f"time/{service}_idle_fraction": max(0.0, 1 - self.seconds[service] / max(whole_s, 1e-9))
            for service in used
        }
        self._restart(iteration + 1)
        return {name: round(value, 4) for name, value in times.items()}

    def _restart(self, iteration: int) -> None:
        """Counts from now on for this iteration; a stage that still runs goes on counting."""
        self._iteration, self._began = iteration, time.monotonic()
        for hand in [*self.seconds]:
            if isinstance(hand, str) or hand[0] < iteration:
                del self.seconds[hand]
        self._since |= {hand: self._began for hand in self._since if isinstance(hand, str)}
