"""The order in which prompts are drawn: a weighted mixture of sets, each shuffled once per epoch.

Pure; resumes in O(1).

The mixture is Pfair scheduling in integers: the k-th row of a set with weight w out of W is
released at draw floor(k*W/w) and due by draw ceil((k+1)*W/w); of the released sets, the one that is
due first is drawn next. After n draws every set is less than one row away from its share n*w/W. The
next set depends only on the counts, so a resume replays nothing.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import TypedDict

from rlpipe.base.seeds import first_bits

Draw = tuple[int, int]  # set_index, row_index


class SetPosition(TypedDict):
    """The number of full passes over a set, and the number of rows drawn since."""

    epoch: int
    offset: int


class CursorPosition(TypedDict):
    """The number of draws so far, in total and per set.

    Example: {"drawn": 3, "sets": [{"epoch": 0, "offset": 3}]}.
    """

    drawn: int
    sets: list[SetPosition]


class PromptCursor:
    """Draws (set_index, row_index); a position is JSON."""

    def __init__(self, sizes: list[int], weights: list[float], seed: int) -> None:
        assert len(sizes) == len(weights) > 0, "a weight for every set, and at least one set"
        assert all(size > 0 for size in sizes), sizes
        assert all(weight > 0 for weight in weights), weights
        self.sizes = sizes
        self.seed = seed
        fractions = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        self._weights = [int(fraction * scale) for fraction in fractions]
        self._total = sum(self._weights)
        # set_index -> (epoch, row indices): one epoch per set is cached
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def start(self) -> CursorPosition:
        """The position before the first draw."""
        return self._position([0] * len(self.sizes))

    def take(self, position: CursorPosition, count: int) -> tuple[list[Draw], CursorPosition]:
        """Returns the `count` draws after `position`, and the position after them; does not change
        `position`.
        """
        sets = position["sets"]
        assert len(sets) == len(self.sizes), "the position is of another mixture"
        counts = [entry["epoch"] * size + entry["offset"] for entry, size in zip(sets, self.sizes, strict=True)]
        assert sum(counts) == position["drawn"], "the position contradicts itself"
        draws: list[Draw] = []
        for drawn in range(position["drawn"], position["drawn"] + count):
            set_index = self._next_set(drawn, counts)
            epoch, offset = divmod(counts[set_index], self.sizes[set_index])
            draws.append((set_index, self._order(set_index, epoch)[offset]))
            counts[set_index] += 1
        return draws, self._position(counts)

    def _position(self, counts: list[int]) -> CursorPosition:
        """The position after `counts` draws from each set."""
        pairs = [divmod(count, size) for count, size in zip(counts, self.sizes, strict=True)]
        return {"drawn": sum(counts), "sets": [{"epoch": epoch, "offset": offset} for epoch, offset in pairs]}

    def _next_set(self, drawn: int, counts: list[int]) -> int:
        released = [
            index for index, weight in enumerate(self._weights) if counts[index] * self._total // weight <= drawn
        ]
        assert released, "some set is always at or behind its share"
        return min(released, key=lambda index: (-(-(counts[index] + 1) * self._total // self._weights[index]), index))

    def _order(self, set_index: int, epoch: int) -> list[int]:
        cached = self._orders.get(set_index)
        if cached is None or cached[0] != epoch:
            rows = list(range(self.sizes[set_index]))
            random.Random(first_bits(f"{self.seed}/{set_index}/{epoch}", 256)).shuffle(rows)
            cached = self._orders[set_index] = (epoch, rows)
        return cached[1]
