"""Logprobs of chosen tokens, computed in chunks, so that the full logits never exist at once.

Legend: N positions whose next token is scored, H hidden size, V vocabulary, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlpipe.algorithms.fused_scores import fused_scores
from rlpipe.algorithms.losses import entropy

LOGITS_MAX = 2**26  # elements of a chunk's logits: 256 MiB in fp32
LOGITS_KEPT = 2**22  # so few, 16 MiB, are kept for the backward pass and not recomputed

# (logits of a chunk, the places of its positions) -> what else is computed of them, [C, ...] each
Beside = Callable[[Tensor, slice], tuple[Tensor, ...]]


def chunk_size(vocab_size: int, elements_max: int = LOGITS_MAX) -> int:
    """The number of positions whose logits have at most `elements_max` elements."""
    return max(1, elements_max // vocab_size)


def chunked_logprobs(
    hidden_NH: Tensor,
    targets_N: Tensor,
    project: Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
    chunk: int,
    kept: int = 0,
    entropy_trained: bool = True,
    beside: Beside | None = None,
) -> tuple[Tensor, ...]:
    """Computes the logprobs of `targets_N` and the entropies at N positions, fp32, of the
    temperature-scaled distribution, then what `beside` gives for each chunk, joined.

    `project` maps hidden states to logits (the lm_head). Each chunk's logits are recomputed in the
    backward pass, unless N is at most `kept`. `entropy_trained`: the loss depends on the entropies;
    otherwise they are computed without gradient, since logits that are recomputed for an output
    which the backward pass never reaches would stay in memory until the end of the step, for all
    chunks.
    """
    assert hidden_NH.ndim == 2 and hidden_NH.shape[0] == targets_N.shape[0], "one target a position"
    assert temperature > 0 and chunk > 0, f"temperature={temperature}, chunk={chunk}"

    scores = fused_scores if hidden_NH.device.type == "cuda" else scores_of

    def of_chunk(hidden_CH: Tensor, targets_C: Tensor, first: int) -> tuple[Tensor, ...]:
        logits_CV = project(hidden_CH)
        own = scores(logits_CV, targets_C, temperature, entropy_trained)
        return own if beside is None else (*own, *beside(logits_CV, slice(first, first + len(targets_C))))

    parts = [
        checkpoint(of_chunk, hidden_CH, targets_C, index * chunk, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled() and len(targets_N) > kept
        else of_chunk(hidden_CH, targets_C, index * chunk)
        for index, (hidden_CH, targets_C) in enumerate(zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True))
    ]
    joined = tuple(torch.cat(values) for values in zip(*parts, strict=True))
    assert joined[0].shape == targets_N.shape, "a position was lost"
    return joined


def scores_of(logits_CV: Tensor, targets_C: Tensor, temperature: float, entropy_trained: bool) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets and entropies, fp32, for CPUs."""
    if not entropy_trained:
        return _LeanScores.apply(logits_CV, targets_C, temperature)  # pyright: ignore[reportReturnType]
    logprobs_CV = torch.log_softmax(logits_CV.float() / temperature, dim=-1)
    # before the gather: the order in which gradients are summed affects the bits
    entropy_C = entropy(logprobs_CV)
    return logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1), entropy_C


class _LeanScores(torch.autograd.Function):
    """Logprobs, and entropies without gradient, in the fewest passes over C x V numbers."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logits_CV: Tensor, targets_C: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scaled_CV = logits_CV.float() if temperature == 1 else logits_CV.float() / temperature
        logprobs_CV = torch.log_softmax(scaled_CV, dim=-1)
        logprobs_C = logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        shares_CV = logprobs_CV.exp()
        entropy_C = -logprobs_CV.mul_(shares_CV).sum(-1)
        ctx.save_for_backward(shares_CV, targets_C)
        ctx.temperature, ctx.dtype = temperature, logits_CV.dtype
        ctx.mark_non_differentiable(entropy_C)
        return logprobs_C, entropy_C

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, by_logprob_C: Tensor, _by_entropy_C: Tensor
    ) -> tuple[Tensor, None, None]:
        shares_CV, targets_C = ctx.saved_tensors
        slope_C1 = (by_logprob_C / ctx.temperature)[:, None]
        # in place: a second backward pass, which nothing here does, would be refused by torch
        slopes_CV = shares_CV.mul_(-slope_C1).scatter_add_(-1, targets_C[:, None], slope_C1)
        return slopes_CV.to(ctx.dtype), None, None
