"""Stored completions scored again by today's code: the same code gives the same text the same
reward, so where the reward differs, the code has changed.

Nothing is written. Rewards run where they always run, in child processes; services and models are
not called.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeAlias

from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.training import RlConfig
from rlpipe.extras.why.changes import evenly
from rlpipe.extras.why.scored_group import ScoredGroup
from rlpipe.records.rollout import Rollout
from rlpipe.report.stored_turns import Turns, turns_reader
from rlpipe.rewards.pool import RewardPool
from rlpipe.rewards.process import RewardLost
from rlpipe.rewards.registry import RewardArgs, is_service
from rlpipe.rewards.score import Item, facts_of
from rlpipe.store.run import Run

ROLLOUTS_MAX = 128  # of an iteration
SECONDS_MAX = 60.0  # of a report: no scoring begins after it
# a reward that repeats recorded numbers: it says nothing about the code that made them
RECORDED = "environment"

# (group_index, rollout_index) -> the parts of its reward
PartsToday: TypeAlias = "dict[tuple[int, int], dict[str, float]]"


def items_of(pairs: list[tuple[ScoredGroup, Rollout]], turns: Turns) -> list[Item]:
    """The items that rewards get for stored rollouts; StoreError where their turns cannot be
    read.
    """
    return [
        {
            "prompt": group.prompt.for_reward(),
            "completion": rollout.completion,
            "rollout": facts_of(rollout, turns(rollout)),
        }
        for group, rollout in pairs
    ]


class Today:
    """The reward functions of a run by today's code; a context manager, which ends their
    processes.
    """

    def __init__(self, run: Run) -> None:
        self.why_not = ""  # why functions could not be called, the first reason
        self._turns = turns_reader(run)
        self._pools: dict[str, RewardPool | None] = {}
        self._known: dict[tuple[str, int], PartsToday] = {}
        self._processes = ExitStack()
        self._end: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.close()

    def parts(self, rl: RlConfig, iteration: int, groups: list[ScoredGroup]) -> PartsToday:
        """The parts by the functions of `rl.rewards`, with the arguments of `rl`, for completions
        of an iteration: at most ROLLOUTS_MAX rollouts, in whole groups, evenly over the iteration.
        Without rollouts that have a fault, then or today.
        """
        names = sorted(name for name in rl.rewards if not is_service(name) and name != RECORDED)
        args = {name: rl.reward_args[name] for name in names if name in rl.reward_args}
        key = json.dumps([names, args], sort_keys=True)
        if (key, iteration) not in self._known:
            pool = self._pool(key, names, args, rl) if names and groups else None
            self._known[key, iteration] = self._scored(pool, groups) if pool else {}
        return self._known[key, iteration]

    def _pool(self, key: str, names: list[str], args: RewardArgs, rl: RlConfig) -> RewardPool | None:
        """The processes that have these functions; None where one cannot be loaded, or the time is
        over.
        """
        self._end = self._end or time.monotonic() + SECONDS_MAX
        if time.monotonic() > self._end:
            self.why_not = self.why_not or f"{SECONDS_MAX:g} s were not enough for all iterations"
            return None
        if key not in self._pools:
            try:
                pool = RewardPool.of(rl, dict.fromkeys(names, 1.0), args)
                self._pools[key] = self._processes.enter_context(pool)
            except UserError as error:
                self._pools[key] = None
                self.why_not = self.why_not or f"{error!s:.200}"
        return self._pools[key]

    def _scored(self, pool: RewardPool, groups: list[ScoredGroup]) -> PartsToday:
        chosen = [groups[place] for place in evenly(len(groups), max(1, ROLLOUTS_MAX // len(groups[0].rollouts)))]
        pairs = [(group, rollout) for group in chosen for rollout in group.rollouts if not rollout.reward_fault]
        try:
            scores = pool.score(items_of(pairs, self._turns), quiet=True)
        except (StoreError, RewardLost) as error:  # without the tokenizer the turns are not known
            self.why_not = self.why_not or f"{error!s:.200}"
            return {}
        if (failed := next((score for score in scores if score.reason), None)) is not None:
            self.why_not = self.why_not or f"{failed.message:.200}"
        return {
            (rollout.group_index, rollout.rollout_index): score.parts
            for (_, rollout), score in zip(pairs, scores, strict=True)
            if score.reason is None
        }
