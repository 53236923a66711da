"""Losses: pure functions of tensors, formulas in MATHS.md. All-masked rows and empty batches give a finite zero.

Legend: B sequences, T tokens. Masks are 1 (or True) where a token counts. `d` is a difference of logprobs.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
KL_MAX = 10.0


def _difference(left_BT: Tensor, right_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """left - right clamped to ±20; 0 (and without gradient) where masked, whatever is stored there."""
    d_BT = left_BT - right_BT
    if mask_BT is not None:
        d_BT = torch.where(mask_BT.bool(), d_BT, 0.0)
    return d_BT.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


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
    """Loss per token, to minimise; 0 where masked. Objectives: `ppo` (clip-higher, optional dual clip), `reinforce`."""
    if objective == "reinforce":
        return torch.where(mask_BT.bool(), -advantages_BT * policy_logprobs_BT, 0.0)
    if objective != "ppo":
        raise ValueError(f"objective={objective!r}: use ppo or reinforce")
    ratio_BT = _difference(policy_logprobs_BT, proximal_logprobs_BT, mask_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(-ratio_BT * advantages_BT, -clipped_BT * advantages_BT)
    if dual_clip is not None:
        loss_BT = torch.where(advantages_BT < 0, torch.minimum(loss_BT, -dual_clip * advantages_BT), loss_BT)
    return torch.where(mask_BT.bool(), loss_BT, 0.0)


def clipped_tokens(
    policy_logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Where the ppo clip is active: (below, above), bool. Below counts only for A < 0, above only for A > 0."""
    ratio_BT = _difference(policy_logprobs_BT, proximal_logprobs_BT).exp()
    below_BT = (ratio_BT < 1 - clip_low) & (advantages_BT < 0)
    return below_BT, (ratio_BT > 1 + clip_high) & (advantages_BT > 0)


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
    """Correction of the engine-trainer mismatch, never differentiated: `none`, `token_truncate` or `token_mask`.

    Multiplies the loss after clipping and before aggregation. 1 where masked.
    """
    weights_BT = _difference(proximal_logprobs_BT.detach(), rollout_logprobs_BT.detach(), mask_BT).exp()
    if mode == "none":
        return torch.ones_like(weights_BT)
    if mode == "token_truncate":
        weights_BT = weights_BT.clamp(low, high)
    elif mode == "token_mask":
        weights_BT = torch.where((weights_BT >= low) & (weights_BT <= high), weights_BT, 0.0)
    else:
        raise ValueError(f"mode={mode!r}: use none, token_truncate or token_mask")
    return torch.where(mask_BT.bool(), weights_BT, 1.0)


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
