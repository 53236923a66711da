"""How much of the time trainer and engines had nothing to do, from one commit of an iteration to the next."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from rlpipe.types import Metrics

# the service that a stage keeps busy
USES = {
    "train": "trainer",
    "checkpoint": "trainer",
    "generate": "engines",
    "reload_engines": "engines",
    "evaluate": "engines",
}


class Idleness:
    """The time in which a stage used a service, whichever iteration the stage is of: what is sampled ahead is sampled now."""

    def __init__(self) -> None:
        self._active: Counter[str] = Counter()
        self._restart(-1)

    def _restart(self, iteration: int) -> None:
        """From now on counts what this iteration takes; a stage that runs on goes on counting."""
        self._iteration, self._began = iteration, time.monotonic()
        self._busy_s: dict[str, float] = defaultdict(float)
        self._since = {service: self._began for service, count in self._active.items() if count}

    @contextlib.contextmanager
    def during(self, verb: str) -> Iterator[None]:
        """Counts the body, a stage, once where several run at a time."""
        service = USES.get(verb)
        if service is None:
            yield
            return
        self._active[service] += 1
        if self._active[service] == 1:
            self._since[service] = time.monotonic()
        try:
            yield
        finally:
            self._active[service] -= 1
            if self._active[service] == 0:
                self._busy_s[service] += time.monotonic() - self._since.pop(service)

    def begin(self, iteration: int) -> None:
        """An iteration counts from the commit before it, where this process made that, else from here on."""
        if iteration != self._iteration:
            self._restart(iteration)

    def at_commit(self, iteration: int) -> Metrics:
        """What the iteration came to; what comes next counts for the one after it. Nothing of a service that no stage used."""
        now = time.monotonic()
        for service, since in self._since.items():
            self._busy_s[service] += now - since
        whole_s = max(now - self._began, 1e-9)
        idle = {service: 1 - busy_s / whole_s for service, busy_s in self._busy_s.items()}
        self._restart(iteration + 1)
        return {f"time/{service}_idle_fraction": round(max(share, 0.0), 4) for service, share in idle.items()}
