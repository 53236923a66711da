"""One sampling round in progress: its finished groups are scored, the groups that survive the
filters are counted, and each shard reports whether the environment has answered it.

All of it is a cache. Stages score what it lacks, and a process that takes over a round counts the
committed shards again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

from rlpipe.base.futures import settle
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Group, Rollout, is_finished
from rlpipe.rewards.score import Score

# prompt id, completion, facts as JSON: a reward is a pure function of the three
ScoreKey: TypeAlias = tuple[str, str, str]
Scores: TypeAlias = dict[ScoreKey, Score]
# adds what it computes to the scores
Scorer: TypeAlias = Callable[[dict[str, Prompt], list[Rollout], Scores], list[Rollout]]


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A group that waits for its scores. `scored`: its rollouts with them."""

    prompt: Prompt
    group: Group
    scored: Future[Group] = field(default_factory=Future)


class SamplingRound:
    """The state of one round, shared by its shards.

    `score`: adds rewards to rollouts; called in one thread, since the scorers are shared.
    `survives`: True when the filters keep a scored group; called in threads. `wanted`: the number
    of surviving groups that ends an over-sampled round. Example: `enough =
    sampling_round.begin(range(4))`, then `await sampling_round.judge(...)` until it is set.
    """

    def __init__(self, key: tuple[int, int], score: Scorer, survives: Callable[[Group], bool], wanted: int) -> None:
        self.key = key  # iteration, round
        # of each shard that was sampled: True when the environment answered one of its rollouts
        self.answers: dict[tuple[str, int, str], bool] = {}
        self._score, self._survives, self._wanted = score, survives, wanted
        self._scores: Scores = {}
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        self._scoring = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
        self._counting, self._counted = asyncio.Lock(), False  # of shards that an earlier process committed
        self._surviving: set[int] = set()
        self._events: list[asyncio.Event] = []

    def add(self, prompt: Prompt, group: Group) -> Future[Group]:
        """Returns at once the future of a finished group with its scores.

        Groups that finish while others are scored are scored together, next.
        """
        waiting = _Waiting(prompt, group)
        self._waiting.put(waiting)
        self._scoring.submit(self._score_waiting)
        return waiting.scored

    def scores(self) -> Scores:
        """Returns the scores of all groups that were added so far; waits for them."""
        return self._scoring.submit(self._scores.copy).result()

    def forget_scores(self) -> None:
        """Drops all scores, so that the next attempt computes them again."""
        self._scores = {}

    def begin(self, group_indices: Iterable[int]) -> asyncio.Event:
        """Starts a shard, perhaps for the second time: its groups do not count until they are
        judged again.

        The event is set when enough groups of the round have survived.
        """
        assert self._wanted > 0, "a round that needs no groups is not sampled"
        self._surviving.difference_update(group_indices)
        # each attempt has its own event: a previous attempt that still ends must not see it cleared
        enough = asyncio.Event()
        self._events.append(enough)
        self._set_events()
        return enough

    async def judge(self, prompt: Prompt, group: Group) -> None:
        """Scores and filters one group while others are still sampled, and counts it once if it
        survives.
        """
        if not is_finished(group):
            return
        scored = await asyncio.wrap_future(self.add(prompt, group))
        if await asyncio.to_thread(self._survives, scored):
            self._surviving.add(group[0].group_index)
            self._set_events()

    async def count_committed(self, committed: Callable[[], Iterator[tuple[Prompt, Group]]]) -> None:
        """Judges, once, the groups of the round that an earlier process committed; callers that
        come meanwhile wait for it.
        """
        async with self._counting:
            if not self._counted:
                for prompt, group in await asyncio.to_thread(lambda: list(committed())):
                    await self.judge(prompt, group)
                self._counted = True

    def _score_waiting(self) -> None:
        ready = [self._waiting.get() for _ in range(self._waiting.qsize())]
        if not ready:  # the previous call has scored them already
            return
        prompts = {entry.prompt.prompt_id: entry.prompt for entry in ready}
        rollouts = [rollout for entry in ready for rollout in entry.group]
        together: Future[list[Rollout]] = Future()

        def scored() -> list[Rollout]:
            answered = self._score(prompts, rollouts, self._scores)
            assert len(answered) == len(rollouts), "a score for every rollout"
            return answered

        settle(together, scored)
        start = 0
        for entry in ready:  # not `grouped`: a group may be there twice, after a retry
            part = slice(start, start + len(entry.group))
            settle(entry.scored, lambda part=part: together.result()[part])
            start = part.stop

    def _set_events(self) -> None:
        if len(self._surviving) >= self._wanted:
            for enough in self._events:
                enough.set()
