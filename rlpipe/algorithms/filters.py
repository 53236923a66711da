"""Filters, which choose the groups to train on. A filter keeps a group (None) or drops it with a
reason, which becomes a metric. Pure.

A user's filter gets the group as a list of dicts with the columns of the scores (docs/filters.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.processes.user_code import CodeRaised, load_function, user_code
from rlpipe.records.kinds import Span
from rlpipe.records.rollout import SCORES, TRUNCATED, Group, Rollout

Filter = Callable[[Group, float], Any]
ResolvedFilter = tuple[str, Filter, float]  # name, function, threshold


def nonzero_std(group: Group, threshold: float) -> str | None:
    """Keeps a group whose rewards have a (population) standard deviation above the threshold: equal
    rewards have no gradient.

    The reason has the mean reward: "zero_std_1.0" is solved, "zero_std_0.0" is too hard, or has a
    broken reward.
    """
    rewards = _rewards(group)
    # pstdev is exactly zero for equal rewards; numpy's is not
    return None if statistics.pstdev(rewards) > threshold else f"zero_std_{round(statistics.fmean(rewards), 1) + 0.0}"


def min_reward(group: Group, threshold: float) -> str | None:
    """Keeps a group whose mean reward is at least the threshold."""
    return None if statistics.fmean(_rewards(group)) >= threshold else "low_reward"


def any_success(group: Group, threshold: float) -> str | None:
    """Keeps a group with at least one reward that is at least the threshold."""
    return None if max(_rewards(group)) >= threshold else "no_success"


def diversity(group: Group, threshold: float) -> str | None:
    """Keeps a group whose share of distinct completions, 1/group_size to 1, is at least the
    threshold.
    """
    completions = [rollout.completion for rollout in group]
    return None if len(set(completions)) / len(completions) >= threshold else "low_diversity"


def reasonable_length(group: Group, threshold: float) -> str | None:
    """Keeps a group whose mean completion length, in tokens, is at most the threshold; single
    rollouts may be longer.
    """
    lengths = [len(rollout.completion_tokens) for rollout in group]
    return None if statistics.fmean(lengths) <= threshold else "too_long"


def minimum_length(group: Group, threshold: float) -> str | None:
    """Keeps a group whose mean completion length, in tokens, is at least the threshold; single
    rollouts may be shorter.
    """
    lengths = [len(rollout.completion_tokens) for rollout in group]
    return None if statistics.fmean(lengths) >= threshold else "too_short"


def any_ended(group: Group, _threshold: float) -> str | None:
    """Keeps a group in which a completion ended by itself: with `rl.mask_truncated`, truncated ones
    have no token to train.
    """
    return None if any(rollout.finish_reason != TRUNCATED for rollout in group) else "all_truncated"


def enough_rollouts(group: Group, threshold: float) -> str | None:
    """Keeps a group of at least `threshold` rollouts: a single one cannot be compared with
    others.
    """
    return None if len(group) >= threshold else "too_few_rollouts"


# the reasons of dropped groups of which nothing could be trained
NOTHING_LEFT = ("too_few_rollouts", "all_truncated")
NAMED: dict[str, Filter] = {
    "nonzero_std": nonzero_std,
    "min_reward": min_reward,
    "any_success": any_success,
    "diversity": diversity,
    "reasonable_length": reasonable_length,
    "minimum_length": minimum_length,
}
# valid thresholds: lowest, highest, description
BOUNDS: dict[str, tuple[float, float, str]] = {
    "nonzero_std": (0.0, math.inf, "a standard deviation of rewards"),
    "diversity": (0.0, 1.0, "a share of the completions"),
    "reasonable_length": (1.0, math.inf, "a number of tokens"),
    "minimum_length": (0.0, math.inf, "a number of tokens"),
}


def resolve_filters(
    filters: dict[str, float], *, size_min: int = 0, mask_truncated: bool = False
) -> list[ResolvedFilter]:
    """Returns the filters (name or package.module:function -> threshold) in the config's order.
    UserError with the known names for an unknown one.

    A first filter is added that drops groups of fewer than `size_min` rollouts; with
    `mask_truncated`, also a last one that drops groups without a token to train.
    """
    resolved: list[ResolvedFilter] = [("enough_rollouts", enough_rollouts, size_min)] if size_min else []
    for name, threshold in filters.items():
        if ":" not in name and name not in NAMED:
            raise UserError(
                f"rl.filters: there is no filter {name!r}; use {', '.join(NAMED)}, or package.module:function"
            )
        resolved.append((name, _of_rows(load_function("rl.filters", name)) if ":" in name else NAMED[name], threshold))
    return [*resolved, ("any_ended", any_ended, 0.0)] if mask_truncated else resolved


def trial_group(size: int, parts: Iterable[str]) -> Group:
    """A made-up group of rollouts, with all columns that filters get; `parts`: the names of the
    reward's parts.
    """
    names = list(parts)  # `parts` may be an iterator, and every rollout needs it
    tokens, logprobs = np.array([3, 4], dtype=np.int32), np.full(2, -0.5, dtype=np.float32)
    return [
        Rollout(
            prompt_id="trial/0", group_index=0, rollout_index=index, prompt="What is 2 + 2?", prompt_tokens=tokens,
            completion=f"<answer>{index}</answer>", completion_tokens=tokens, loss_mask=np.ones(2, dtype=np.int8),
            rollout_logprobs=logprobs, weight_version=0, weight_versions=(Span(0, 2),),
            finish_reason="stop", seed=index,
            engine="trial", reward=float(index % 2), reward_parts=dict.fromkeys(names, float(index % 2)),
        )
        for index in range(size)
    ]  # fmt: skip


def apply_filters(groups: list[Group], filters: list[ResolvedFilter]) -> tuple[list[int], dict[int, str]]:
    """Returns the indices of the kept groups, in order, and the reason of each dropped group, from
    the first filter that drops it.
    """
    reasons: dict[int, str] = {}
    for position, group in enumerate(groups):
        answers = (_answer(resolved, group) for resolved in filters)
        reason = next((answer for answer in answers if answer is not None), None)
        if reason is not None:
            reasons[position] = reason
    return [position for position in range(len(groups)) if position not in reasons], reasons


def check_thresholds(filters: dict[str, float]) -> None:
    """Raises UserError for an invalid threshold, and for two that no group can pass."""
    for name, threshold in filters.items():
        low, high, meaning = BOUNDS.get(name, (-math.inf, math.inf, "a number"))
        if not (math.isfinite(threshold) and low <= threshold <= high):  # also for a nan
            bounds = f"{meaning}, at least {low:g}" if math.isfinite(low) else f"{meaning} that is finite"
            bounds += f" and at most {high:g}" if math.isfinite(high) else ""
            raise UserError(f"rl.filters.{name}={threshold:g}: the threshold is {bounds}")
    shortest, longest = filters.get("minimum_length", 0.0), filters.get("reasonable_length", math.inf)
    if shortest > longest:
        raise UserError(
            f"rl.filters.minimum_length={shortest:g}: is above rl.filters.reasonable_length={longest:g}, so no group"
            " passes both filters; lower rl.filters.minimum_length"
        )


def _answer(resolved: ResolvedFilter, group: Group) -> str | None:
    name, function, threshold = resolved
    try:
        with user_code():
            reason = function(group, threshold)
    except CodeRaised as error:
        raise UserError(
            f"rl.filters: {name!r} raised {error}; it is called as filter(group, threshold), group being a list of "
            "rollouts (docs/filters.md)"
        ) from error
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise UserError(
        f"rl.filters: {name!r} answered {reason!r}; it must answer None to keep a group, or the reason to drop it"
    )


def _of_rows(function: Callable[[list[JsonDict], float], Any]) -> Filter:
    """Wraps a user's filter, which gets dicts with the columns of the scores."""

    # imports Arrow, which the scoring processes do not need
    from rlpipe.records.columns import as_row

    def filtered(group: Group, threshold: float) -> Any:
        rows = [{name: value for name, value in as_row(rollout).items() if name in SCORES} for rollout in group]
        return function(rows, threshold)

    return filtered


def _rewards(group: Group) -> list[float]:
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    assert len(rewards) == len(group), "a rollout that could not be scored has its fallback by now"
    return rewards
