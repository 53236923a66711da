"""Stored rollouts scored by a second reward, and the iteration from which the two differ: the sign
of a policy that learns to exploit a reward.

Nothing is written to the run. The second reward runs where rewards run: in child processes, or over
HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.extras.why.around import History
from rlpipe.extras.why.changes import NO_SHIFT, Shift, evenly, group_means, shift, within_correlation
from rlpipe.extras.why.scored_group import ScoredGroup
from rlpipe.extras.why.suspects.finding import SHOWN, from_to
from rlpipe.extras.why.today import items_of
from rlpipe.report.show import row_of, text_line
from rlpipe.report.stored_turns import turns_reader
from rlpipe.rewards.pool import RewardPool

ITERATIONS_MAX = 40  # that are scored, evenly over the run
ALPHA = 0.01


@dataclass(frozen=True)
class Rescored:
    """Rollouts with both rewards, columns of R rollouts; nan where the second reward could not
    score one.
    """

    groups: list[ScoredGroup]
    group_R: np.ndarray
    first_R: np.ndarray
    second_R: np.ndarray

    def iterations(self) -> list[int]:
        return sorted({group.iteration for group in self.groups})

    def iteration_R(self) -> np.ndarray:
        return np.array([group.iteration for group in self.groups])[self.group_R]


def rescored(history: History, reward: str) -> Rescored:
    """The rollouts of the run, of at most ITERATIONS_MAX iterations, with a second reward: by name,
    or package.module:function.
    """
    if not history.num_iterations:
        raise UserError(f"run {history.run.name} has no committed iteration: there is nothing to score")
    groups = [group for number in evenly(history.num_iterations, ITERATIONS_MAX) for group in history.groups(number)]
    rl = history.run.config.rl
    args = {reward: rl.reward_args[reward]} if reward in rl.reward_args else {}
    items = items_of([(group, rollout) for group in groups for rollout in group.rollouts], turns_reader(history.run))
    with RewardPool.of(rl, {reward: 1.0}, args) as pool:
        scores = pool.score(items)
        if all(score.reward is None for score in scores):
            raise UserError(
                f"--second {reward}: it scored none of {len(items)} rollouts; the first error: {pool.last_error}"
            )
    return Rescored(
        groups,
        np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups]),
        np.array([rollout.reward for group in groups for rollout in group.rollouts], dtype=float),
        np.array([np.nan if score.reward is None else score.reward for score in scores]),
    )


def parting(both: Rescored) -> tuple[int, Shift]:
    """The iteration from which the two rewards, each in units of its own spread, differ most from
    their earlier difference, and by how much; its p-value is corrected for all iterations.
    """
    difference_G = group_means(_difference(both), both.group_R, len(both.groups))
    iteration_G = np.array([group.iteration for group in both.groups])
    numbers = both.iterations()[1:]
    shifts = [(number, shift(difference_G, iteration_G, number)) for number in numbers]
    at, widest = max(shifts, key=lambda entry: abs(entry[1].z), default=(0, NO_SHIFT))
    return at, replace(widest, p=min(1.0, widest.p * len(numbers)))


@dataclass(frozen=True)
class SecondRow:
    """The mean rewards of one iteration. `correlation`: of both within groups; nan where one of
    them does not vary.
    """

    iteration: int
    rollouts: int
    reward: float
    second: float
    correlation: float


@dataclass(frozen=True)
class SecondRollout:
    """A rollout that the first reward scores much higher than the second."""

    iteration: int
    group_index: int
    rollout_index: int
    prompt_id: str
    reward: float
    second: float
    prompt: str
    completion: str


@dataclass(frozen=True)
class MeanChange:
    """The means of a reward before an iteration, and from it on."""

    before: float
    after: float


@dataclass(frozen=True)
class SecondReport:
    """The reward of a run beside a second one, called `name`. `iteration`: from which they differ,
    with the means of both sides and some rollouts; None where they go together. `p`: the chance of
    so large a difference where nothing changed.
    """

    run: str
    name: str
    iterations: list[SecondRow]
    unscored: int  # rollouts that the second reward could not score
    iteration: int | None
    p: float
    reward: MeanChange | None
    second: MeanChange | None
    rollouts: list[SecondRollout]

    def lines(self) -> list[str]:
        """A line an iteration; then the iteration from which they differ."""
        lines = [f"iteration  rollouts  reward  {self.name}  r within groups"]
        lines += [
            f"{row.iteration:9d}  {row.rollouts:8d}  {row.reward:6.3f}  {row.second:{max(6, len(self.name))}.3f} "
            f" {row.correlation:+.2f}"
            for row in self.iterations
        ]
        if self.unscored:
            lines.append(f"{self.unscored} rollouts could not be scored by {self.name}")
        if self.iteration is None or self.reward is None or self.second is None:
            return [*lines, "", f"reward and {self.name} go together: no iteration parts them (p = {self.p:.2g})"]
        first, second = (from_to(means.before, means.after) for means in (self.reward, self.second))
        parts = f"they part at iteration {self.iteration}: reward {first}, {self.name} {second} (p = {self.p:.1g})"
        return [*lines, "", parts] + [
            f"  rollout {rollout.iteration}/{rollout.group_index}/{rollout.rollout_index} {rollout.prompt_id}: reward"
            f" {rollout.reward:g}, {self.name} {rollout.second:g}: {text_line(rollout.prompt)!r} ->"
            f" {text_line(rollout.completion)!r}"
            for rollout in self.rollouts
        ]


def second_report(both: Rescored, run: str, name: str) -> SecondReport:
    """The report on rollouts with both rewards; `name`: of the second."""
    known = np.isfinite(both.second_R)
    rows = [row for number in both.iterations() if (row := _row(both, number)) is not None]
    at, widest = parting(both)
    if widest.p >= ALPHA:
        return SecondReport(run, name, rows, int((~known).sum()), None, widest.p, None, None, [])
    late = both.iteration_R() >= at
    first, second = (
        MeanChange(float(column[known & ~late].mean()), float(column[known & late].mean()))
        for column in (both.first_R, both.second_R)
    )
    difference = np.where(known & late, _difference(both) * np.sign(widest.size), -np.inf)
    shown: dict[int, SecondRollout] = {}
    for row in np.argsort(-difference, kind="stable"):
        shown.setdefault(int(both.group_R[row]), _rollout(both, int(row)))
        if len(shown) == SHOWN:
            break
    return SecondReport(run, name, rows, int((~known).sum()), at, widest.p, first, second, [*shown.values()])


def _row(both: Rescored, number: int) -> SecondRow | None:
    """The means of an iteration; None where the second reward scored nothing of it."""
    chosen = (both.iteration_R() == number) & np.isfinite(both.second_R)
    if not chosen.any():
        return None
    first, second = (float(column[chosen].mean()) for column in (both.first_R, both.second_R))
    correlation = within_correlation(both.first_R, both.second_R, both.group_R, len(both.groups), chosen)
    return SecondRow(number, int(chosen.sum()), first, second, correlation)


def _difference(both: Rescored) -> np.ndarray:
    """The first reward minus the second, each less its mean and in units of its own spread, [R]."""
    known = np.isfinite(both.second_R)
    columns = [
        (column - column[known].mean()) / (column[known].std() or 1.0) for column in (both.first_R, both.second_R)
    ]
    return columns[0] - columns[1]


def _rollout(both: Rescored, row: int) -> SecondRollout:
    group = both.groups[both.group_R[row]]
    rollout = group.rollouts[row - int(np.searchsorted(both.group_R, both.group_R[row]))]
    first, second = float(both.first_R[row]), float(both.second_R[row])
    return row_of(SecondRollout, rollout, iteration=group.iteration, reward=first, second=second)
