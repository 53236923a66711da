"""The stored data of a run around one of its iterations, as columns, for the suspects of `rlpipe
why`. Reads the store only.

Legend of the shapes: R rollouts, G groups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rlpipe.algorithms.answers import answer_text
from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.extras.why.changes import Shift, drift, group_means, shift
from rlpipe.extras.why.scored_group import ScoredGroup
from rlpipe.extras.why.today import Today
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import SCORES, TRUNCATED, Rollout, TokenGaps, grouped
from rlpipe.rewards.score import gives, label
from rlpipe.store.artifacts import read_records
from rlpipe.store.forks import differences
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run

WINDOW = 8  # iterations on each side that are compared


@dataclass
class History:
    """The iterations of a run, each read when it is first needed."""

    run: Run
    today: Today | None = None  # None: nothing is scored again
    num_iterations: int = field(init=False)
    _groups: dict[int, list[ScoredGroup]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_iterations = Progress(self.run).num_iterations

    @cached_property
    def metrics(self) -> list[Metrics]:
        """The metrics of each iteration."""
        return [record.metrics for record in Progress(self.run).iterations(self.num_iterations)]

    def groups(self, iteration: int) -> list[ScoredGroup]:
        """The groups of all sampling rounds of an iteration, without unfinished ones."""
        if iteration not in self._groups:
            self._groups[iteration] = list(_read_groups(self.run, iteration))
        return self._groups[iteration]

    def config(self, iteration: int) -> PipelineConfig:
        """The config that an iteration was computed with."""
        return self.run.owner("rl", iteration).config

    def around(self, at: int) -> Around:
        """The groups and metrics before iteration `at` and from it on: at most WINDOW iterations a
        side, and none beyond another fork point.
        """
        first = max([0, at - WINDOW, *(point for point in self.fork_points if point < at)])
        last = min([self.num_iterations, at + WINDOW, *(point for point in self.fork_points if point > at)])
        groups = [group for iteration in range(first, last) for group in self.groups(iteration)]
        metrics = {iteration: self.metrics[iteration] for iteration in range(first, last)}
        changed = differences(self.config(at), self.config(at - 1)) if at in self.fork_points else []
        return Around(self.run, at, groups, metrics, self.config(at), self.config(at - 1), changed, self.today)

    @cached_property
    def fork_points(self) -> list[int]:
        """The first iterations of this run, and of its ancestors, whose previous iteration is
        another run's.
        """
        owners = [self.run.owner("rl", iteration).name for iteration in range(self.num_iterations)]
        return [index for index in range(1, len(owners)) if owners[index] != owners[index - 1]]


def _read_groups(run: Run, iteration: int) -> list[ScoredGroup]:
    read: list[ScoredGroup] = []
    for index in range(run.record(iteration).last_round + 1):
        prompts_ref, _ = run.committed("rl", iteration, f"prompts/round-{index}")
        scores_ref, _ = run.committed("rl", iteration, f"scores/round-{index}")
        prompts = {
            prompt.prompt_id: prompt for prompt in read_records(run.store, prompts_ref, "prompts.parquet", Prompt)
        }
        rollouts = read_records(run.store, scores_ref, "scores.parquet", Rollout, SCORES)
        for group in grouped(rollouts):
            if all(rollout.reward is not None for rollout in group):
                read.append(ScoredGroup(iteration, prompts[group[0].prompt_id], group))
    return read


def _read_gaps(run: Run, iteration: int) -> dict[tuple[int, int], np.ndarray]:
    """(group_index, rollout_index) -> the known gaps of a trained rollout; empty where older code
    trained the iteration.
    """
    stored = run.artifact("rl", iteration, "gap")
    rows = read_records(run.store, stored[0], "gap.parquet", TokenGaps) if stored else []
    return {(row.group_index, row.rollout_index): row.gap[np.isfinite(row.gap)].astype(float) for row in rows}


@dataclass(frozen=True)
class Around:
    """The groups on both sides of iteration `at`, and the settings that each side was computed
    with.
    """

    run: Run
    at: int
    groups: list[ScoredGroup]
    metrics: dict[int, Metrics]
    config: PipelineConfig  # of iteration `at`
    config_before: PipelineConfig
    changed: list[str]  # the settings that differ, "rl.learning_rate: 0.0002 -> 0.005"
    rewards_today: Today | None = None

    @cached_property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @cached_property
    def group_R(self) -> np.ndarray:
        """The position of each rollout's group."""
        return np.repeat(np.arange(len(self.groups)), [len(group.rollouts) for group in self.groups])

    @cached_property
    def iteration_G(self) -> np.ndarray:
        return np.array([group.iteration for group in self.groups])

    @cached_property
    def after_G(self) -> np.ndarray:
        return self.iteration_G >= self.at

    @cached_property
    def after_R(self) -> np.ndarray:
        return self.after_G[self.group_R]

    @cached_property
    def reward_R(self) -> np.ndarray:
        return np.array([rollout.reward for rollout in self.rollouts], dtype=float)

    @cached_property
    def fault_R(self) -> np.ndarray:
        return np.array([bool(rollout.reward_fault) for rollout in self.rollouts])

    @cached_property
    def tokens_R(self) -> np.ndarray:
        """The length of each completion."""
        return np.array([len(rollout.completion_tokens) for rollout in self.rollouts], dtype=float)

    @cached_property
    def truncated_R(self) -> np.ndarray:
        return np.array([rollout.finish_reason == TRUNCATED for rollout in self.rollouts])

    @cached_property
    def staleness_R(self) -> np.ndarray:
        """Weight versions from the one that sampled a rollout's first token to the one that samples
        its iteration.
        """
        lags = [
            self.run.sampled_by(self.groups[group].iteration)
            - min((span.version for span in rollout.weight_versions), default=rollout.weight_version)
            for group, rollout in zip(self.group_R, self.rollouts, strict=True)
        ]  # fmt: skip
        return np.array(lags, dtype=float)

    @cached_property
    def gaps(self) -> list[np.ndarray]:
        """The engine-trainer gap of each token of every rollout that was trained, where it is
        stored.
        """
        stored = {iteration: _read_gaps(self.run, iteration) for iteration in self.metrics}
        nothing = np.zeros(0)
        return [
            stored[self.groups[group].iteration].get((rollout.group_index, rollout.rollout_index), nothing)
            for group, rollout in zip(self.group_R, self.rollouts, strict=True)
        ]

    @cached_property
    def answer_R(self) -> list[str]:
        """The answer in each completion, as text that can be compared."""
        return [answer_text(rollout.completion).lower() for rollout in self.rollouts]

    @cached_property
    def label_G(self) -> list[str | None]:
        """The answer of each group's prompt, as text that can be compared; None where it has
        none.
        """
        return [
            None if group.prompt.answer is None else str(group.prompt.answer).strip().lower() for group in self.groups
        ]

    @cached_property
    def matched_R(self) -> np.ndarray:
        """1 where the completion's answer is the prompt's, by its text; nan where the prompt has
        none.

        It does not depend on any reward.
        """
        pairs = zip(self.group_R, self.answer_R, strict=True)
        return np.array(
            [np.nan if (text := self.label_G[group]) is None else float(answer == text) for group, answer in pairs]
        )

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """The parts of the reward by name, [R]; nan in a rollout without one."""
        names = sorted({name for rollout in self.rollouts for name in rollout.reward_parts})
        return {name: np.array([rollout.reward_parts.get(name, np.nan) for rollout in self.rollouts]) for name in names}

    @cached_property
    def today(self) -> dict[str, np.ndarray]:
        """The parts of the reward by today's code, with each side's own arguments, [R]; nan where
        they are not known.
        """
        before, after = (self.parts_today(config) for config in (self.config_before, self.config))
        nothing = np.full(len(self.rollouts), np.nan)
        return {
            name: np.where(self.after_R, after.get(name, nothing), before.get(name, nothing))
            for name in {*before, *after}
        }

    def parts_today(self, config: PipelineConfig) -> dict[str, np.ndarray]:
        """As `today`, with the arguments of one config for both sides."""
        known: dict[tuple[int, int, int], dict[str, float]] = {}
        for iteration in sorted({group.iteration for group in self.groups}) if self.rewards_today else []:
            assert self.rewards_today is not None
            groups = [group for group in self.groups if group.iteration == iteration]
            known |= {
                (iteration, *place): parts
                for place, parts in self.rewards_today.parts(config.rl, iteration, groups).items()
            }
        rows = [
            known.get((self.groups[group].iteration, rollout.group_index, rollout.rollout_index), {})
            for group, rollout in zip(self.group_R, self.rollouts, strict=True)
        ]
        names = {name for parts in known.values() for name in parts}
        return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}

    @property
    def why_not_today(self) -> str:
        """The reason why today's code could not score everything that it should; empty where it
        could.
        """
        return self.rewards_today.why_not if self.rewards_today else ""

    def weight(self, part: str) -> float:
        """The weight of a part in the reward of iteration `at`; 0 where no reward of its config has
        it."""
        named = [name for name in self.config.rl.rewards if gives(name, part)]
        return self.config.rl.rewards[max(named, key=lambda name: len(label(name)))] if named else 0.0

    def per_group(self, values_R: np.ndarray) -> np.ndarray:
        """The mean of each group's rollouts, [G]; nan where none has a value."""
        return group_means(values_R, self.group_R, len(self.groups))

    def shift_of(self, values_R: np.ndarray, *, trend: bool = False) -> Shift:
        """The shift of the groups' means of a column of rollouts."""
        return shift(self.per_group(values_R.astype(float)), self.iteration_G, self.at, trend=trend)

    @cached_property
    def reward_change(self) -> Shift:
        """The change of the reward: a jump from its trend, or a fall below its earlier level,
        whichever is clearer.
        """
        return self.reward_change_at(self.at)

    def reward_change_at(self, at: int) -> Shift:
        """As `reward_change`, at another iteration of the two sides."""
        rewards_G = self.per_group(self.reward_R)
        jump, level = (shift(rewards_G, self.iteration_G, at, trend=trend) for trend in (True, False))
        clearer = level if level.size < 0 and level.p < jump.p else jump
        return replace(clearer, p=min(1.0, 2 * clearer.p))

    @cached_property
    def reward_drift(self) -> Shift:
        """The change of the reward from the first iteration of both sides to the last, by a
        straight line.
        """
        return drift(self.per_group(self.reward_R), self.iteration_G)

    def means(self, values_R: np.ndarray) -> tuple[float, float]:
        """The means over rollouts before `at`, and from `at` on."""
        return _mean(values_R[~self.after_R]), _mean(values_R[self.after_R])

    def texts(self) -> list[tuple[int, ...]]:
        """The tokens of each group's prompt: the same for the same prompt, whatever its id."""
        return [tuple(group.prompt.prompt_tokens.tolist()) for group in self.groups]

    def repeats_G(self) -> np.ndarray:
        """True for each group whose prompt another group of the same iteration has too, [G]."""
        pairs = list(zip(self.iteration_G.tolist(), self.texts(), strict=True))
        counts = Counter(pairs)
        return np.array([counts[pair] > 1 for pair in pairs])


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
