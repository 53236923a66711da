"""Advantages from rewards, formulas in docs/algorithms.md.

Pure numpy: the flow process computes them without torch.

Legend: B rollouts (or rows, where a rollout has several: `rollout_B`), R rollouts then, G rollouts
of one group, T tokens, N scored tokens of a batch: rollout after rollout, masked tokens left out.
`lengths_B` are the scored tokens of each rollout (they add up to N). Masks are 1 (or True) where a
token counts. All float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

STD_MIN = 1e-6  # added to the standard deviation that grpo divides by
VARIANCE_MIN = 1e-8  # added to the variance that whitening divides by


def _grpo(rewards_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + STD_MIN)


def _dr_grpo(rewards_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    return rewards_G - rewards_G.mean()


def _rloo(rewards_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    return (rewards_G - rewards_G.mean()) * len(rewards_G) / (len(rewards_G) - 1)


def _maxrl(rewards_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > 0 else np.zeros_like(rewards_G)


def _opo(rewards_G: np.ndarray, lengths_G: np.ndarray) -> np.ndarray:
    tokens = lengths_G.sum()
    return rewards_G - (lengths_G * rewards_G).sum() / tokens if tokens else np.zeros_like(rewards_G)


# (rewards_G, lengths_G) -> advantages of one group whose rewards are not all equal
GROUP_ESTIMATORS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo, "maxrl": _maxrl, "opo": _opo,
}  # fmt: skip
ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def row_advantages(
    rewards_B: np.ndarray,
    group_index_B: np.ndarray,
    lengths_B: np.ndarray,
    *,
    estimator: str,
    gamma: float = 1.0,
    kl_N: np.ndarray | None = None,
    kl_coef: float = 0.0,
    rollout_B: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Advantages of the scored tokens of each row of a batch: what the trainer trains on.

    Where all tokens of a row have the same, they are one number in memory.

    `kl_N` is subtracted from the rewards: token by token for `reinforce_plus_plus`, for the others
    as its sum over the rollout. `gamma` is read by `reinforce_plus_plus` alone. ValueError on an
    unknown estimator.

    `rollout_B`: 0, 1, ... for the rows of the first rollout, the second, ...; none: each row is a
    rollout. Rows of a rollout have its reward, and count once: it is compared with other rollouts,
    and its length and its KL are those of all its rows. Only `reinforce_plus_plus`, which compares
    tokens, takes each row by itself.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: use one of {', '.join(ESTIMATORS)}")
    rewards_B, lengths_B = np.asarray(rewards_B, dtype=np.float64), np.asarray(lengths_B, dtype=np.int64)
    assert rewards_B.shape == lengths_B.shape and (kl_N is None or len(kl_N) == lengths_B.sum()), (
        "one KL a scored token"
    )
    if estimator == "reinforce_plus_plus":
        return _of_rows(_whitened(_returns(rewards_B, lengths_B, gamma, kl_N, kl_coef)), lengths_B)
    rollout_B = np.arange(len(lengths_B)) if rollout_B is None else rollout_B
    first_R, lengths_R = np.flatnonzero(np.diff(rollout_B, prepend=-1)), rollout_sums(lengths_B, rollout_B)
    rewards_R, group_index_R = rewards_B[first_R], np.asarray(group_index_B)[first_R]
    if kl_N is not None:
        rewards_R = rewards_R - kl_coef * np.bincount(_rows(lengths_R), weights=kl_N, minlength=len(lengths_R))
    if estimator == "reinforce_plus_plus_baseline":
        whitened_N = _whitened(np.repeat(group_advantages(rewards_R, group_index_R, estimator="dr_grpo"), lengths_R))
        return _of_rows(whitened_N, lengths_B)
    advantages_R = group_advantages(rewards_R, group_index_R, estimator=estimator, lengths_B=lengths_R)
    return [
        np.broadcast_to(advantages_R[rollout], length) for rollout, length in zip(rollout_B, lengths_B, strict=True)
    ]


def all_tokens(values_B: list[np.ndarray]) -> np.ndarray:
    """Values of all N scored tokens of a batch, of those of each row."""
    return np.concatenate([np.zeros(0), *values_B])


def _of_rows(values_N: np.ndarray, lengths_B: np.ndarray) -> list[np.ndarray]:
    """Values of all scored tokens, row by row."""
    return [values_N[end - length : end] for end, length in zip(np.cumsum(lengths_B), lengths_B, strict=True)]


def rollout_sums(lengths_B: np.ndarray, rollout_B: np.ndarray) -> np.ndarray:
    """The scored tokens of each of R rollouts: those of its rows together.

    `rollout_B` as in `row_advantages`.
    """
    return np.bincount(rollout_B, weights=lengths_B).astype(np.int64)


def rollout_means(advantages_N: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """The mean advantage of each rollout's scored tokens; 0 where it has none.

    That of equal ones is exactly theirs.
    """
    lengths_B = np.asarray(lengths_B, dtype=np.int64)
    first_B = np.zeros(len(lengths_B))
    first_B[lengths_B > 0] = advantages_N[_starts(lengths_B)[lengths_B > 0]]
    rows_N = _rows(lengths_B)
    above_B = np.bincount(rows_N, weights=advantages_N - first_B[rows_N], minlength=len(lengths_B))
    return first_B + above_B / np.maximum(lengths_B, 1)


def group_advantages(
    rewards_B: np.ndarray, group_index_B: np.ndarray, *, estimator: str, lengths_B: np.ndarray | None = None
) -> np.ndarray:
    """Advantages of B rollouts, each against its group.

    `grpo` (r - mean) / (std + STD_MIN) with ddof 1; `dr_grpo` r - mean; `rloo` (r - mean) * G / (G
    - 1); `maxrl` (r - mean) / mean, 0 where the mean is not positive; `opo` r - sum(length * r) /
    sum(length), which needs `lengths_B`. A group of one, a group of equal rewards, and for opo one
    without tokens, have advantage 0 exactly. ValueError on an unknown estimator.
    """
    if estimator not in GROUP_ESTIMATORS or (estimator == "opo" and lengths_B is None):
        raise ValueError(f"estimator={estimator!r}: use one of {', '.join(GROUP_ESTIMATORS)}; opo needs lengths_B")
    rewards_B = np.asarray(rewards_B, dtype=np.float64)
    assert rewards_B.ndim == 1 and rewards_B.shape == np.shape(group_index_B), (
        "one reward and one group index a rollout"
    )
    assert np.isfinite(rewards_B).all(), "a reward is not finite"
    lengths_B = np.ones_like(rewards_B) if lengths_B is None else np.asarray(lengths_B, dtype=np.float64)
    assert lengths_B.shape == rewards_B.shape, "one length a rollout"
    advantages_B = np.zeros_like(rewards_B)
    for group in np.unique(group_index_B):
        members = np.flatnonzero(group_index_B == group)
        rewards_G = rewards_B[members]
        # a mean of equal floats may differ from them in the last bit,
        # and grpo divides by the tiny std
        if rewards_G.min() < rewards_G.max():
            advantages_B[members] = GROUP_ESTIMATORS[estimator](rewards_G, lengths_B[members])
    assert np.isfinite(advantages_B).all(), "an advantage is not finite"
    return advantages_B


def _returns(
    rewards_B: np.ndarray, lengths_B: np.ndarray, gamma: float, kl_N: np.ndarray | None, kl_coef: float
) -> np.ndarray:
    """Discounted return-to-go of N tokens; the reward comes with the last token of a rollout, the
    KL with its own.
    """
    assert np.isfinite(rewards_B).all(), "a reward is not finite"
    returns_N = np.zeros(int(lengths_B.sum())) if kl_N is None else -kl_coef * np.asarray(kl_N, dtype=np.float64)
    returns_N[(np.cumsum(lengths_B) - 1)[lengths_B > 0]] += rewards_B[lengths_B > 0]
    order = np.argsort(-lengths_B, kind="stable")
    starts, lengths = _starts(lengths_B)[order], lengths_B[order]
    for token in range(int(lengths_B.max(initial=0)) - 2, -1, -1):
        at = starts[: np.searchsorted(-lengths, -(token + 1))] + token  # the rollouts with a token after this one
        returns_N[at] += gamma * returns_N[at + 1]
    return returns_N


def _whitened(values_N: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(variance + VARIANCE_MIN), ddof 1; exactly 0 where all are equal."""
    if not len(values_N) or values_N.min() == values_N.max():
        return np.zeros_like(values_N)
    return (values_N - values_N.mean()) / np.sqrt(values_N.var(ddof=1) + VARIANCE_MIN)


def _rows(lengths_B: np.ndarray) -> np.ndarray:
    """The rollout of each of the N tokens."""
    return np.repeat(np.arange(len(lengths_B)), lengths_B)


def _starts(lengths_B: np.ndarray) -> np.ndarray:
    """The place among the N tokens at which each rollout's tokens begin, [B]."""
    return np.cumsum(lengths_B) - lengths_B
