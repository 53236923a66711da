"""Computes advantages from rewards; formulas in docs/algorithms.md.

Pure numpy, so that the flow process needs no torch.

Legend: B rollouts (where a rollout has several rows, `rollout_B`: B rows of R rollouts), G rollouts
of one group, T tokens, N scored tokens of a batch, rollout after rollout, without masked tokens.
`lengths_B`: the number of scored tokens of each rollout; the sum is N. Masks are 1 (or True) where
a token counts. All values are float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

STD_MIN = 1e-6  # added to grpo's divisor, the standard deviation
VARIANCE_MIN = 1e-8  # added to the variance in whitening


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


# (rewards_G, lengths_G) -> advantages_G of one group, whose rewards are not all equal
GROUP_ESTIMATORS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo, "maxrl": _maxrl, "opo": _opo,
}  # fmt: skip
ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce_plus_plus", "reinforce_plus_plus_baseline")  # of one reward a rollout


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
    """Computes the advantages of the scored tokens of each row of a batch, on which the trainer
    trains.

    Where all tokens of a row have the same advantage, it is stored once.

    ValueError for an unknown estimator.

    `kl_N` is subtracted from the rewards: per token for `reinforce_plus_plus`, as the sum over the
    rollout for all others. Only `reinforce_plus_plus` uses `gamma`.

    `rollout_B`: 0, 1, ... for the rows of the first rollout, the second, ...; None: each row is a
    rollout. The rows of a rollout have its reward and count once: length and KL of a rollout are
    summed over its rows. Only `reinforce_plus_plus`, which compares tokens, treats each row alone.
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
    """Concatenates the values of each row to those of all N scored tokens of a batch."""
    return np.concatenate([np.zeros(0), *values_B])


def _of_rows(values_N: np.ndarray, lengths_B: np.ndarray) -> list[np.ndarray]:
    """Splits the values of all scored tokens by row."""
    return [values_N[end - length : end] for end, length in zip(np.cumsum(lengths_B), lengths_B, strict=True)]


def rollout_sums(lengths_B: np.ndarray, rollout_B: np.ndarray) -> np.ndarray:
    """The number of scored tokens of each of R rollouts, summed over its rows.

    `rollout_B` as in `row_advantages`.
    """
    return np.bincount(rollout_B, weights=lengths_B).astype(np.int64)


def rollout_means(advantages_N: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """The mean advantage of each rollout's scored tokens; 0 where it has none.

    The mean of equal values is exactly that value.
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
    """Computes the advantages of B rollouts, each relative to its group.

    `grpo` (r - mean) / (std + STD_MIN) with ddof 1; `dr_grpo` r - mean; `rloo` (r - mean) * G / (G
    - 1); `maxrl` (r - mean) / mean, 0 where the mean is not positive; `opo` r - sum(length * r) /
    sum(length), which needs `lengths_B`. Exactly 0 for a group of one rollout, for equal rewards,
    and in opo for a group without tokens. ValueError for an unknown estimator.
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
        # the mean of equal floats may differ from them in the last bit, which grpo would divide by
        # a tiny std
        if rewards_G.min() < rewards_G.max():
            advantages_B[members] = GROUP_ESTIMATORS[estimator](rewards_G, lengths_B[members])
    assert np.isfinite(advantages_B).all(), "an advantage is not finite"
    return advantages_B


def gdpo_advantages(parts_RK: np.ndarray, weights_K: np.ndarray, group_index_R: np.ndarray) -> np.ndarray:
    """Computes the advantages of R rollouts from K parts of their rewards (GDPO, arXiv 2601.05242):
    each part relative to its group as in `grpo`, their weighted sum whitened over the rollouts.

    A part that is equal in a group adds 0 there.
    """
    assert parts_RK.shape == (len(group_index_R), len(weights_K)), "a value for each part, a weight a part"
    total_R = np.zeros(len(parts_RK))
    for weight, values_R in zip(weights_K, parts_RK.T, strict=True):
        total_R += weight * group_advantages(values_R, group_index_R, estimator="grpo")
    return _whitened(total_R)


def _returns(
    rewards_B: np.ndarray, lengths_B: np.ndarray, gamma: float, kl_N: np.ndarray | None, kl_coef: float
) -> np.ndarray:
    """The discounted return-to-go of N tokens: the reward is at the last token of a rollout, the KL
    of each token at that token.
    """
    assert np.isfinite(rewards_B).all(), "a reward is not finite"
    returns_N = np.zeros(int(lengths_B.sum())) if kl_N is None else -kl_coef * np.asarray(kl_N, dtype=np.float64)
    returns_N[(np.cumsum(lengths_B) - 1)[lengths_B > 0]] += rewards_B[lengths_B > 0]
    order = np.argsort(-lengths_B, kind="stable")
    starts, lengths = _starts(lengths_B)[order], lengths_B[order]
    for token in range(int(lengths_B.max(initial=0)) - 2, -1, -1):
        # rollouts with a token after this one
        at = starts[: np.searchsorted(-lengths, -(token + 1))] + token
        returns_N[at] += gamma * returns_N[at + 1]
    return returns_N


def _whitened(values_N: np.ndarray) -> np.ndarray:
    """Whitens values: (x - mean) / sqrt(variance + VARIANCE_MIN), ddof 1; exactly 0 where all are
    equal.
    """
    if not len(values_N) or values_N.min() == values_N.max():
        return np.zeros_like(values_N)
    return (values_N - values_N.mean()) / np.sqrt(values_N.var(ddof=1) + VARIANCE_MIN)


def _rows(lengths_B: np.ndarray) -> np.ndarray:
    """The index of the rollout of each of the N tokens."""
    return np.repeat(np.arange(len(lengths_B)), lengths_B)


def _starts(lengths_B: np.ndarray) -> np.ndarray:
    """The index among the N tokens of each rollout's first token, [B]."""
    return np.cumsum(lengths_B) - lengths_B
