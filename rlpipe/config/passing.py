"""The rule by which a rollout passes: for pass@k, greedy, majority votes and the curriculum."""

from __future__ import annotations

import math

from rlpipe.config.pipeline import PipelineConfig

NEVER_POSITIVE = {"overlong"}  # rewards that are never positive
ROUNDING = 1e-9  # relative: weights are summed in another order than rewards


def best_reward(rewards: dict[str, float]) -> float:
    """The largest reward that the weights allow: the sum of the positive weights.

    Assumes that 1 is the best value of each reward, as for all built-in ones except `overlong` (0).
    With other scales (a reward model, an environment, functions) set `evaluation.pass_threshold`.
    """
    return sum(weight for name, weight in rewards.items() if weight > 0 and name not in NEVER_POSITIVE)


def passing_reward(config: PipelineConfig, use: str) -> float:
    """The smallest reward with which a rollout of use rl or evaluation passes; inf where no reward
    has a weight: then none passes.
    """
    given, rewards = config.evaluation.pass_threshold, config.rewards(use)
    if not any(rewards.values()):
        return math.inf
    return best_reward(rewards) * (1 - ROUNDING) if given is None else given


def why_none_passes(config: PipelineConfig, use: str, best_tried: float | None) -> str:
    """Explains why no rollout can pass, with advice; empty if one can.

    `best_tried`: the best reward of the trial rollouts; None: unknown.
    """
    wanted, best = passing_reward(config, use), best_reward(config.rewards(use))
    if wanted == math.inf:
        return ""
    given = config.evaluation.pass_threshold
    field = (
        f"evaluation.pass_threshold={wanted:g}"
        if given is not None
        else f"evaluation.pass_threshold is not given, so it is {wanted:.6g}"
    )
    if wanted > best and (best_tried is None or wanted > best_tried):
        return (
            f"{field}: is above {best:g}, the best reward that the weights of the rewards allow, so no rollout passes"
            " (pass@k, greedy and the curriculum see 0); lower it, or remove it"
        )
    if best_tried is not None and best_tried < wanted:
        return (
            f"{field}: no trial rollout passes, the best one has the reward {best_tried:g}. When no rollout of the run"
            " passes, pass@k, greedy and the curriculum see 0. Set the smallest reward of a right rollout"
        )
    return ""
