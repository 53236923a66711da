"""Losses: pure functions of tensors, formulas in docs/algorithms.md. All-masked rows and empty batches give a finite zero.

Legend: B sequences, T tokens. Masks are 1 (or True) where a token counts. `d` is a difference of logprobs.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
KL_MAX = 10.0
SAPO_SHARPNESS = (1.0, 1.05)  # the temperature of SAPO for A > 0, and for the others


def _difference(left_BT: Tensor, right_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """left - right clamped to ±20; 0 (and without gradient) where masked, whatever is stored there."""
    d_BT = left_BT - right_BT
    if mask_BT is not None:
        d_BT = torch.where(mask_BT.bool(), d_BT, 0.0)
    return d_BT.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def _ratio(policy_logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, mask_BT: Tensor, objective: str) -> Tensor:
    """The ratio that the objective clips: of each token, or for gspo of the sequence, the geometric mean of its tokens'."""
    d_BT = _difference(policy_logprobs_BT, proximal_logprobs_BT, mask_BT)
    if objective == "gspo":
        lengths_B1 = mask_BT.bool().sum(-1, keepdim=True).clamp(min=1)
        d_BT = (d_BT.sum(-1, keepdim=True) / lengths_B1).expand_as(d_BT)
    return d_BT.exp()


def policy_loss(
    policy_logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    objective: str,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Loss per token, to minimise; 0 where masked. For `dppo` pass the rollout's logprobs in place of the proximal ones.

    Objectives: `ppo` and `gspo` (clip-higher, optional dual clip), `cispo`, `sapo`, `dppo`, `reinforce`; a row is a sequence.
    ValueError on any other.
    """
    kept_BT = mask_BT.bool()
    logprobs_BT, advantages_BT = (torch.where(kept_BT, values_BT, 0.0) for values_BT in (policy_logprobs_BT, advantages_BT))
    ratio_BT = _ratio(policy_logprobs_BT, proximal_logprobs_BT, mask_BT, objective)
    bounded_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    if objective == "reinforce":
        loss_BT = -advantages_BT * logprobs_BT
    elif objective == "cispo":
        loss_BT = -bounded_BT.detach() * advantages_BT * logprobs_BT
    elif objective == "sapo":
        sharpness_BT = torch.where(advantages_BT > 0, *(advantages_BT.new_tensor(value) for value in SAPO_SHARPNESS))
        loss_BT = -4 / sharpness_BT * torch.sigmoid(sharpness_BT * (ratio_BT - 1)) * advantages_BT
    elif objective == "dppo":
        below_BT, above_BT = clipped_tokens(
            policy_logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT,
            objective=objective, clip_low=clip_low, clip_high=clip_high,
        )  # fmt: skip
        loss_BT = torch.where(below_BT | above_BT, 0.0, -ratio_BT * advantages_BT)
    elif objective in ("ppo", "gspo"):
        loss_BT = torch.maximum(-ratio_BT * advantages_BT, -bounded_BT * advantages_BT)
        if dual_clip is not None:
            loss_BT = torch.where(advantages_BT < 0, torch.minimum(loss_BT, -dual_clip * advantages_BT), loss_BT)
    else:
        raise ValueError(f"objective={objective!r}: use ppo, gspo, cispo, sapo, dppo or reinforce")
    return torch.where(kept_BT, loss_BT, 0.0)


@torch.no_grad()
def clipped_tokens(
    policy_logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    objective: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Where the objective's clip changes the gradient: (below, above), bool, False where masked.

    `ppo`, `gspo`: the ratio is too low and A < 0, or too high and A > 0, or above the dual clip and A < 0: no gradient.
    `dppo`: the same of the difference of probabilities. `cispo`: the weight is bounded, whatever the sign of A.
    `sapo` and `reinforce` have no clip.
    """
    kept_BT, nothing_BT = mask_BT.bool(), torch.zeros_like(mask_BT, dtype=torch.bool)
    if objective in ("sapo", "reinforce"):
        return nothing_BT, nothing_BT
    if objective == "dppo":
        ratio_BT, centre = policy_logprobs_BT.exp() - proximal_logprobs_BT.exp(), 0
    else:
        ratio_BT, centre = _ratio(policy_logprobs_BT, proximal_logprobs_BT, mask_BT, objective), 1
    below_BT, above_BT = (ratio_BT < centre - clip_low) & kept_BT, (ratio_BT > centre + clip_high) & kept_BT
    if objective == "cispo":
        return below_BT, above_BT
    above_BT &= advantages_BT > 0
    if dual_clip is not None:
        above_BT |= (ratio_BT > dual_clip) & (advantages_BT < 0) & kept_BT
    return below_BT & (advantages_BT < 0), above_BT


def kl(policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, *, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) per token: k1 d, k2 d²/2, k3 exp(-d)+d-1 (clamped to ±10), abs |d|."""
    if estimator == "k1":
        return policy_logprobs_BT - reference_logprobs_BT
    if estimator == "k2":
        return (policy_logprobs_BT - reference_logprobs_BT).square() / 2
    if estimator == "abs":
        return (policy_logprobs_BT - reference_logprobs_BT).abs()
    if estimator != "k3":
        raise ValueError(f"estimator={estimator!r}: use k1, k2, k3 or abs")
    d_BT = _difference(policy_logprobs_BT, reference_logprobs_BT)
    # expm1: exp(-d) - 1 loses all digits in fp32 where the policies nearly agree
    return (torch.expm1(-d_BT) + d_BT).clamp(-KL_MAX, KL_MAX)


def importance_weights(
    proximal_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    mode: str,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Correction of the engine-trainer mismatch, never differentiated: w = proximal / rollout probability of a token.

    `none` 1; `token_truncate` w within low and high; `token_mask` w, or 0 outside; `sequence_truncate`, `sequence_mask` the same
    of the product over the row, bounded by `high` alone. Multiplies the loss after clipping and before aggregation. 1 where masked.
    ValueError on any other mode.
    """
    d_BT = _difference(proximal_logprobs_BT.detach(), rollout_logprobs_BT.detach(), mask_BT)
    if mode in ("sequence_truncate", "sequence_mask"):
        d_BT = d_BT.sum(-1, keepdim=True).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).expand_as(d_BT)
        low = 0.0
    weights_BT = d_BT.exp()
    if mode == "none":
        return torch.ones_like(weights_BT)
    if mode in ("token_truncate", "sequence_truncate"):
        weights_BT = weights_BT.clamp(low, high)
    elif mode in ("token_mask", "sequence_mask"):
        weights_BT = torch.where((weights_BT >= low) & (weights_BT <= high), weights_BT, 0.0)
    else:
        raise ValueError(f"mode={mode!r}: use none, token_truncate, token_mask, sequence_truncate or sequence_mask")
    return torch.where(mask_BT.bool(), weights_BT, 1.0)


def entropy(logits_BTV: Tensor) -> Tensor:
    """Entropy of the distribution at each position, nats."""
    return entropy_of_logprobs(torch.log_softmax(logits_BTV, dim=-1))


def entropy_of_logprobs(logprobs_BTV: Tensor) -> Tensor:
    """Entropy of distributions given by all their logprobs, for who has them anyway."""
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
    """Token values to a scalar: `token_mean`, `sequence_mean` or `fixed_length` (which needs `length`).

    `num_tokens` and `num_sequences` (those with an unmasked token) default to this batch's own; pass the global ones
    (all microbatches, all ranks) to make the sum over parts independent of how the batch was split.
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
        raise ValueError(f"mode={mode!r}, length={length}: use token_mean, sequence_mean, or fixed_length with a length")
    return kept_BT.sum() / (sequences * length)


def sft_loss(policy_logprobs_BT: Tensor, mask_BT: Tensor, *, num_tokens: float | None = None) -> Tensor:
    """Token-mean cross-entropy over the loss mask."""
    return aggregate(-policy_logprobs_BT, mask_BT, mode="token_mean", num_tokens=num_tokens)
