"""What a proxy does to requests for a while, from the first one on that a pattern fits."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass


@dataclass
class Fault:
    """`at`: a pattern of the method and the path with the query.

    `kind`: a status, `reset` or `hang` (tests/s3_world.py).
    """

    at: str
    kind: str
    seconds: float
    ends: float = 0.0

    @property
    def has_begun(self) -> bool:
        return self.ends > 0


class Faults:
    """Each begins once, in whatever order, and is done to all requests until it is over.

    None begins before a request that `after` fits.
    """

    def __init__(self, *faults: Fault, after: str = "") -> None:
        self.faults, self._after = faults, after

    def __call__(self, method: str, target: str) -> str:
        now, request = time.monotonic(), f"{method} {target}"
        if self._after:
            self._after = "" if re.search(self._after, request) else self._after
            return ""
        for fault in self.faults:
            if not fault.has_begun and re.search(fault.at, request):
                fault.ends = now + fault.seconds
        return next((fault.kind for fault in self.faults if now < fault.ends), "")
