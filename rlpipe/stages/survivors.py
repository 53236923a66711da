"""Who has survived of a sampling round that is over-sampled: the shards of the round share it, and it says when there is enough.

A cache: a process that takes over a round recounts the shards that are committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from rlpipe.rewards.score import Score
from rlpipe.types import JsonDict

RoundKey = tuple[int, int]  # iteration, round
ScoreKey = tuple[str, str, str]  # prompt id, completion, facts as JSON: a reward is a pure function of the three


@dataclass(eq=False)
class Finished:
    """A group that waits to be scored, its stored prompt, and whether it survives, once that is told."""

    prompt: JsonDict
    group: list[JsonDict]
    survives: asyncio.Future[bool]


class Survivors:
    """The groups that finished and outlived the filters, and the scores that told.

    `wanted` of them end the round. Example: `enough = survivors.begin(range(4))`, then `survivors.add(2)` until it is set.
    """

    def __init__(self, wanted: int) -> None:
        assert wanted > 0, "a round that needs no groups is not sampled"
        self.wanted = wanted
        self.scores: dict[ScoreKey, Score] = {}
        self.judging = asyncio.Lock()  # the scorers are shared: what finishes meanwhile is scored together, next
        self.waiting: list[Finished] = []
        self.recounting = asyncio.Lock()
        self.recounted = False  # the shards that were committed before this process are in
        self._groups: set[int] = set()
        self._told: list[asyncio.Event] = []

    def begin(self, group_indices: Iterable[int]) -> asyncio.Event:
        """A shard starts, perhaps once more: its groups are not counted yet. The event is set when there is enough."""
        self._groups.difference_update(group_indices)
        # each attempt has its own: one that is winding down must not see its event cleared
        enough = asyncio.Event()
        self._told.append(enough)
        self._tell()
        return enough

    def add(self, group_index: int) -> None:
        """A group has survived; told twice it counts once."""
        self._groups.add(group_index)
        self._tell()

    def _tell(self) -> None:
        if len(self._groups) >= self.wanted:
            for enough in self._told:
                enough.set()
