"""Logprobs and entropies of logits on a GPU, with one kernel for the forward and one for the
backward pass: unfused operations read and write the logits about twenty times.

Legend: C positions, V vocabulary. z: logits / temperature, in fp32; S: the sum of exp(z - max z)
over the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def fused_scores(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, entropy_trained: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets and entropies, fp32; the bits are the same with and without
    gradient.
    """
    return _Scores.apply(logits_CV, targets_C, temperature, entropy_trained)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logits_CV: Tensor, targets_C: Tensor, temperature: float, entropy_trained: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs_C, entropy_C, normal_C = compiled(scores)(logits_CV, targets_C, temperature)
        ctx.save_for_backward(logits_CV, targets_C, normal_C, entropy_C)
        ctx.temperature, ctx.entropy_trained = temperature, entropy_trained
        if not entropy_trained:
            ctx.mark_non_differentiable(entropy_C)
        return logprobs_C, entropy_C

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, by_logprob_C: Tensor, by_entropy_C: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits_CV, targets_C, normal_C, entropy_C = (saved.detach() for saved in ctx.saved_tensors)
        if ctx.entropy_trained:
            slopes = compiled(entropy_slopes)(
                logits_CV, targets_C, normal_C, entropy_C, by_logprob_C, by_entropy_C, ctx.temperature
            )
        else:
            slopes = compiled(logprob_slopes)(logits_CV, targets_C, normal_C, by_logprob_C, ctx.temperature)
        return slopes, None, None, None


def scores(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logprobs of the targets, the entropies, and the logarithm of the sum of
    exp(z).
    """
    z_CV = logits_CV.float() / temperature
    highest_C1 = z_CV.amax(-1, keepdim=True)
    below_CV = z_CV - highest_C1
    powers_CV = below_CV.exp()
    sum_C1 = powers_CV.sum(-1, keepdim=True)
    log_sum_C1 = sum_C1.log()
    logprobs_C1 = z_CV.gather(-1, targets_C[:, None]) - highest_C1 - log_sum_C1
    # only finite logits: 0 x -inf is nan
    entropy_C1 = log_sum_C1 - (powers_CV * below_CV).sum(-1, keepdim=True) / sum_C1
    return logprobs_C1.squeeze(-1), entropy_C1.squeeze(-1), (highest_C1 + log_sum_C1).squeeze(-1)


def logprob_slopes(
    logits_CV: Tensor, targets_C: Tensor, normal_C: Tensor, by_logprob_C: Tensor, temperature: float
) -> Tensor:
    """The gradient of a loss that depends only on the logprobs, with respect to the logits, C x V.

    With probabilities p, it follows from d logprob / dz_v = [v is the target] - p_v.
    """
    logprobs_CV = logits_CV.float() / temperature - normal_C[:, None]
    places_1V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)[None]
    by_z_CV = by_logprob_C[:, None] * ((places_1V == targets_C[:, None]).float() - logprobs_CV.exp())
    return (by_z_CV / temperature).to(logits_CV.dtype)


def entropy_slopes(
    logits_CV: Tensor,
    targets_C: Tensor,
    normal_C: Tensor,
    entropy_C: Tensor,
    by_logprob_C: Tensor,
    by_entropy_C: Tensor,
    temperature: float,
) -> Tensor:
    """As `logprob_slopes`, for a loss that depends on the entropies H, too: dH / dz_v = -p_v (log
    p_v + H).
    """
    logprobs_CV = logits_CV.float() / temperature - normal_C[:, None]
    shares_CV = logprobs_CV.exp()
    places_1V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)[None]
    by_z_CV = by_logprob_C[:, None] * ((places_1V == targets_C[:, None]).float() - shares_CV)
    by_z_CV = by_z_CV - by_entropy_C[:, None] * shares_CV * (logprobs_CV + entropy_C[:, None])
    return (by_z_CV / temperature).to(logits_CV.dtype)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a kernel, compiled once for all lengths."""
    # both sums take one pass after the one for the maximum; torch warns for few positions, where it
    # cannot merge the three passes
    return torch.compile(function, dynamic=True, fullgraph=True, options={"online_softmax": False})
