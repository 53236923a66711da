"""Advantages of rollouts from the rewards of their group. Pure numpy: the flow process computes them without torch.

Legend: B rollouts, G rollouts of one group.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Estimator = Literal["grpo", "dr_grpo", "rloo"]
ESTIMATORS: tuple[Estimator, ...] = ("grpo", "dr_grpo", "rloo")


def group_advantages(
    rewards_B: np.ndarray, group_index_B: np.ndarray, *, estimator: Estimator, eps: float = 1e-6
) -> np.ndarray:
    """Advantages of B rollouts, float64.

    `grpo` (r - mean) / (std + eps) with ddof 1; `dr_grpo` r - mean; `rloo` (r - mean) * G / (G - 1), each over the group.
    A group of one, and a group of equal rewards, have advantage 0 exactly. ValueError on an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: use one of {', '.join(ESTIMATORS)}")
    rewards_B = np.asarray(rewards_B, dtype=np.float64)
    assert rewards_B.ndim == 1 and rewards_B.shape == np.shape(group_index_B), "one reward and one group index a rollout"
    assert np.isfinite(rewards_B).all(), "a reward is not finite"
    advantages_B = np.zeros_like(rewards_B)
    for group in np.unique(group_index_B):
        members = np.flatnonzero(group_index_B == group)
        rewards_G = rewards_B[members]
        # a mean of equal floats may differ from them in the last bit, and grpo divides by the tiny std
        if rewards_G.min() < rewards_G.max():
            advantages_B[members] = _of_group(rewards_G, estimator, eps)
    assert np.isfinite(advantages_B).all(), "an advantage is not finite"
    return advantages_B


def _of_group(rewards_G: np.ndarray, estimator: Estimator, eps: float) -> np.ndarray:
    centred_G = rewards_G - rewards_G.mean()
    if estimator == "grpo":
        return centred_G / (rewards_G.std(ddof=1) + eps)
    if estimator == "rloo":
        return centred_G * len(rewards_G) / (len(rewards_G) - 1)
    return centred_G
