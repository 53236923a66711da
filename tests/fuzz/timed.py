"""What holds for every case of every kind: it ends in time, and what refuses it is a line for each
fault. Counts them by kind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlpipe.base.errors import UserError

# seconds of the processor: how busy the machine is does not matter
CASE_S, LINE_CHARS_MAX = 10.0, 1500
counted: Counter[str] = Counter()
slowest: dict[str, tuple[float, str]] = {}


@contextmanager
def case(kind: str, name: str) -> Iterator[None]:
    """The time of one case."""
    began = time.process_time()
    yield
    ended(kind, name, time.process_time() - began)


def ended(kind: str, name: str, took_s: float) -> None:
    counted[kind] += 1
    slowest[kind] = max(slowest.get(kind, (0.0, "")), (took_s, name))
    assert took_s < CASE_S, f"{kind}: {name[:200]} took {took_s:.1f} s"


def refused(kind: str, name: str, act: Callable[[], object]) -> str:
    """What a case is refused with: a line for each fault, three at most."""
    with case(kind, name):
        try:
            act()
        except UserError as error:
            message = str(error)
            assert message.count("\n") < 3 and len(message) < LINE_CHARS_MAX, (name, message[:500])
            return message
        raise AssertionError(f"{kind}: {name[:200]} was taken")


def lines() -> Iterator[str]:
    """The count of each kind and its slowest case, then the sum."""
    for kind, number in counted.items():
        took_s, name = slowest[kind]
        yield f"{number:5} {kind}; the slowest took {took_s:.2f} s: {name[:80]}"
    yield f"{counted.total():5} in all"
