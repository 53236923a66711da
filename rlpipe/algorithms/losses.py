"""The losses: pure functions of tensors; formulas in docs/algorithms.md.

Rows that are fully masked and empty batches give 0.

Legend: B sequences, T tokens. Masks are 1 (or True) where a token counts. `d` is a difference of
logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
KL_MAX = 10.0
SAPO_SHARPNESS = (1.0, 1.05)  # the temperature of SAPO for A > 0, and for the others

Entry = TypeVar("Entry")
# the loss of each token, and masks of the tokens that are clipped below and above
Terms = tuple[Tensor, Tensor, Tensor]


def _entry(table: dict[str, Entry], option: str, name: str) -> Entry:
    """The entry of the table. ValueError with the known names for an unknown one."""
    if name not in table:
        raise ValueError(f"{option}={name!r}: use one of {', '.join(table)}")
    return table[name]


def _difference(left_BT: Tensor, right_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """left - right, clamped to ±20; 0 without gradient where masked, whatever the values there."""
    return torch.where(mask_BT.bool(), left_BT - right_BT, 0.0).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


@dataclass(frozen=True)
class _Tokens:
    """The inputs of an objective. Logprobs and advantages are 0 where masked."""

    logprobs_BT: Tensor
    anchor_BT: Tensor  # the logprobs in the denominator of the ratio
    advantages_BT: Tensor
    ratio_BT: Tensor
    clip_low: float
    clip_high: float
    dual_clip: float | None

    @property
    def bounded_BT(self) -> Tensor:
        return self.ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)

    def outside(self, values_BT: Tensor, centre: int) -> tuple[Tensor, Tensor]:
        """Returns two masks: of values below `centre - clip_low`, and of values above `centre +
        clip_high`.
        """
        return values_BT < centre - self.clip_low, values_BT > centre + self.clip_high

    def no_clip(self) -> tuple[Tensor, Tensor]:
        nowhere_BT = torch.zeros_like(self.ratio_BT, dtype=torch.bool)
        return nowhere_BT, nowhere_BT


def _ppo(tokens: _Tokens) -> Terms:
    ratio_BT, advantages_BT = tokens.ratio_BT, tokens.advantages_BT
    loss_BT = torch.maximum(-ratio_BT * advantages_BT, -tokens.bounded_BT * advantages_BT)
    low_BT, high_BT = tokens.outside(ratio_BT, 1)
    above_BT = high_BT & (advantages_BT > 0)
    if tokens.dual_clip is not None:
        loss_BT = torch.where(advantages_BT < 0, torch.minimum(loss_BT, -tokens.dual_clip * advantages_BT), loss_BT)
        above_BT |= (ratio_BT > tokens.dual_clip) & (advantages_BT < 0)
    return loss_BT, low_BT & (advantages_BT < 0), above_BT


def _cispo(tokens: _Tokens) -> Terms:
    loss_BT = -tokens.bounded_BT.detach() * tokens.advantages_BT * tokens.logprobs_BT
    return loss_BT, *tokens.outside(tokens.ratio_BT, 1)


def _sapo(tokens: _Tokens) -> Terms:
    ratio_BT, advantages_BT = tokens.ratio_BT, tokens.advantages_BT
    sharpness_BT = torch.where(advantages_BT > 0, *(advantages_BT.new_tensor(value) for value in SAPO_SHARPNESS))
    loss_BT = -4 / sharpness_BT * torch.sigmoid(sharpness_BT * (ratio_BT - 1)) * advantages_BT
    return loss_BT, *tokens.no_clip()


def _dppo(tokens: _Tokens) -> Terms:
    low_BT, high_BT = tokens.outside(tokens.logprobs_BT.exp() - tokens.anchor_BT.exp(), 0)
    below_BT, above_BT = low_BT & (tokens.advantages_BT < 0), high_BT & (tokens.advantages_BT > 0)
    return torch.where(below_BT | above_BT, 0.0, -tokens.ratio_BT * tokens.advantages_BT), below_BT, above_BT


def _reinforce(tokens: _Tokens) -> Terms:
    return -tokens.advantages_BT * tokens.logprobs_BT, *tokens.no_clip()


OBJECTIVES: dict[str, Callable[[_Tokens], Terms]] = {
    "ppo": _ppo, "gspo": _ppo, "cispo": _cispo, "sapo": _sapo, "dppo": _dppo, "reinforce": _reinforce,
}  # fmt: skip


def policy_terms(
    policy_logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    objective: str,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Terms:
    """Returns the loss per token, to minimise, and masks of the tokens that are clipped below and
    above (bool). 0 and False where masked.

    ValueError for an unknown objective. For `dppo` pass the rollout's logprobs as the proximal
    ones; a row is a sequence. Clipped tokens have no gradient: in `ppo` and `gspo` a ratio too low
    and A < 0, too high and A > 0, or above the dual clip and A < 0; in `dppo` the same with the
    difference of probabilities; in `cispo` a bounded weight, for any A.
    """
    terms = _entry(OBJECTIVES, "objective", objective)
    kept_BT = mask_BT.bool()
    d_BT = _difference(policy_logprobs_BT, proximal_logprobs_BT, mask_BT)
    if objective == "gspo":  # the ratio of the sequence is the geometric mean of its tokens' ratios
        d_BT = (d_BT.sum(-1, keepdim=True) / kept_BT.sum(-1, keepdim=True).clamp(min=1)).expand_as(d_BT)
    logprobs_BT, anchor_BT, advantages_BT = (
        torch.where(kept_BT, values_BT, 0.0) for values_BT in (policy_logprobs_BT, proximal_logprobs_BT, advantages_BT)
    )
    tokens = _Tokens(logprobs_BT, anchor_BT, advantages_BT, d_BT.exp(), clip_low, clip_high, dual_clip)
    loss_BT, below_BT, above_BT = terms(tokens)
    return torch.where(kept_BT, loss_BT, 0.0), below_BT, above_BT


def _k3(d_BT: Tensor) -> Tensor:
    d_BT = d_BT.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    # expm1: exp(-d) - 1 loses all digits in fp32 where the policies are nearly equal
    return (torch.expm1(-d_BT) + d_BT).clamp(-KL_MAX, KL_MAX)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d_BT: d_BT, "k2": lambda d_BT: d_BT.square() / 2, "k3": _k3, "abs": torch.abs,
}  # fmt: skip


def kl(policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, *, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) per token: k1 d, k2 d²/2, k3 exp(-d)+d-1 (clamped to ±10),
    abs |d|.
    """
    return _entry(KL_ESTIMATORS, "estimator", estimator)(policy_logprobs_BT - reference_logprobs_BT)


def _zeroed(weights_BT: Tensor, low: float, high: float) -> Tensor:
    return torch.where((weights_BT >= low) & (weights_BT <= high), weights_BT, 0.0)


BOUNDS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": lambda weights_BT, low, high: weights_BT,
    "token_truncate": torch.clamp, "token_mask": _zeroed, "sequence_truncate": torch.clamp, "sequence_mask": _zeroed,
}  # fmt: skip


def importance_weights(
    proximal_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    mode: str,
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Weights that correct the engine-trainer mismatch, without gradient: w = proximal / rollout
    probability of a token.

    Returns the weights, 1 where masked, and a mask of those that a bound changed (bool). ValueError
    for an unknown mode.

    `none`: 1; `token_truncate`: w, clamped to low and high; `token_mask`: w, or 0 outside of low
    and high; `sequence_truncate`, `sequence_mask`: the same with the product over the row, bounded
    by `high` alone. They multiply the loss after clipping and before aggregation.
    """
    bounded = _entry(BOUNDS, "mode", mode)
    d_BT = _difference(proximal_logprobs_BT.detach(), rollout_logprobs_BT.detach(), mask_BT)
    if mode.startswith("sequence"):
        d_BT, low = d_BT.sum(-1, keepdim=True).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).expand_as(d_BT), 0.0
    ratio_BT = torch.ones_like(d_BT) if mode == "none" else torch.where(mask_BT.bool(), d_BT.exp(), 1.0)
    weights_BT = torch.where(mask_BT.bool(), bounded(ratio_BT, low, high), 1.0)
    return weights_BT, weights_BT != ratio_BT


def entropy(logprobs_BTV: Tensor) -> Tensor:
    """The entropy, in nats, of distributions given by all their logprobs."""
    return -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)


def aggregate(
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    mode: str,
    num_tokens: float | None = None,
    num_sequences: float | None = None,
    length: float | None = None,
) -> Tensor:
    """Aggregates token values to a scalar: `token_mean`, `sequence_mean` or `fixed_length` (which
    needs `length`).

    `num_tokens` and `num_sequences` (sequences with an unmasked token) default to those of this
    batch. With the global counts (all microbatches, all ranks) the sum over parts does not depend
    on the split of the batch.
    """
    kept_BT = torch.where(mask_BT.bool(), values_BT, 0.0)
    lengths_B = mask_BT.bool().sum(-1)
    if mode == "token_mean":
        tokens = float(lengths_B.sum()) if num_tokens is None else num_tokens
        return kept_BT.sum() / max(tokens, 1.0)
    sequences = max(float((lengths_B > 0).sum()) if num_sequences is None else num_sequences, 1.0)
    if mode == "sequence_mean":
        return (kept_BT.sum(-1) / lengths_B.clamp(min=1)).sum() / sequences
    if mode != "fixed_length" or not length:
        raise ValueError(
            f"mode={mode!r}, length={length}: use token_mean, sequence_mean, or fixed_length with a length"
        )
    return kept_BT.sum() / (sequences * length)


def sft_loss(policy_logprobs_BT: Tensor, mask_BT: Tensor, *, num_tokens: float | None = None) -> Tensor:
    """The cross-entropy, averaged over the tokens in the loss mask."""
    return aggregate(-policy_logprobs_BT, mask_BT, mode="token_mean", num_tokens=num_tokens)
