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
from rlpipe.report.show import text_line
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
    with RewardPool(
        {reward: 1.0}, args, workers=rl.reward_workers, timeout_s=rl.reward_timeout_s, secrets=rl.secrets
    ) as pool:
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


def parts_ways(widest: Shift) -> bool:
    return widest.p < ALPHA


def second_lines(both: Rescored, reward: str) -> list[str]:
    """A line an iteration; then the iteration from which they differ, and rollouts that the first
    reward scores much higher.
    """
    lines = [f"iteration  rollouts  reward  {reward}  r within groups"]
    for number in both.iterations():
        chosen = (both.iteration_R() == number) & np.isfinite(both.second_R)
        if chosen.any():
            means = (float(column[chosen].mean()) for column in (both.first_R, both.second_R))
            first, second = means
            correlation = within_correlation(both.first_R, both.second_R, both.group_R, len(both.groups), chosen)
            lines.append(
                f"{number:9d}  {int(chosen.sum()):8d}  {first:6.3f}  {second:{max(6, len(reward))}.3f} "
                f" {correlation:+.2f}"
            )
    if unscored := int((~np.isfinite(both.second_R)).sum()):
        lines.append(f"{unscored} rollouts could not be scored by {reward}")
    at, widest = parting(both)
    if not parts_ways(widest):
        return [*lines, "", f"reward and {reward} go together: no iteration parts them (p = {widest.p:.2g})"]
    late = both.iteration_R() >= at
    known = np.isfinite(both.second_R)
    first, second = (
        from_to(float(column[known & ~late].mean()), float(column[known & late].mean()))
        for column in (both.first_R, both.second_R)
    )
    lines += ["", f"they part at iteration {at}: reward {first}, {reward} {second} (p = {widest.p:.1g})"]
    difference = np.where(known & late, _difference(both) * np.sign(widest.size), -np.inf)
    shown: dict[int, str] = {}
    for row in np.argsort(-difference, kind="stable"):
        shown.setdefault(int(both.group_R[row]), f"  rollout {_described(both, int(row), reward)}")
        if len(shown) == SHOWN:
            break
    return [*lines, *shown.values()]


def _difference(both: Rescored) -> np.ndarray:
    """The first reward minus the second, each less its mean and in units of its own spread, [R]."""
    known = np.isfinite(both.second_R)
    columns = [
        (column - column[known].mean()) / (column[known].std() or 1.0) for column in (both.first_R, both.second_R)
    ]
    return columns[0] - columns[1]


def _described(both: Rescored, row: int, reward: str) -> str:
    group = both.groups[both.group_R[row]]
    rollout = group.rollouts[row - int(np.searchsorted(both.group_R, both.group_R[row]))]
    return (
        f"{group.iteration}/{rollout.group_index}/{rollout.rollout_index} {rollout.prompt_id}: reward"
        f" {rollout.reward:g}, {reward} {both.second_R[row]:g}: {text_line(rollout.prompt)!r} ->"
        f" {text_line(rollout.completion)!r}"
    )
