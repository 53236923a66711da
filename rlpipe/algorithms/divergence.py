"""The generalised Jensen-Shannon divergence of a student and a teacher (GKD, arXiv 2306.13649),
over the tokens that the teacher finds most probable and all others as one class.

Legend: N positions, C of them in a chunk, V vocabulary, K top tokens of the teacher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The K tokens that the teacher finds most probable at each of N positions, with their
    logprobs. `rest_N`: the logprob of all other tokens together; None where there are none, K = V.
    """

    tokens_NK: Tensor
    logprobs_NK: Tensor
    rest_N: Tensor | None

    def at(self, place: slice) -> TopTokens:
        """Those of some of the positions."""
        rest_N = None if self.rest_N is None else self.rest_N[place]
        return TopTokens(self.tokens_NK[place], self.logprobs_NK[place], rest_N)


def top_tokens(logits_CV: Tensor, top_k: int, temperature: float) -> TopTokens:
    """The top tokens of the temperature-scaled distribution, fp32; all tokens where V is at most
    `top_k`.
    """
    logprobs_CV = torch.log_softmax(logits_CV.float() / temperature, dim=-1)
    logprobs_CK, tokens_CK = logprobs_CV.topk(min(top_k, logprobs_CV.shape[-1]), dim=-1)
    return TopTokens(tokens_CK, logprobs_CK, _rest(logprobs_CV, tokens_CK))


def jensen_shannon(logits_CV: Tensor, top: TopTokens, *, temperature: float, beta: float) -> Tensor:
    """The divergence D at each position, in nats, fp32, with the gradient of the logits.

    With teacher T, student π and M = βT + (1 − β)π: D = β KL(T ‖ M) + (1 − β) KL(π ‖ M). β = 0 is
    the forward KL(T ‖ π) and β = 1 the reverse KL(π ‖ T), to which D / β and D / (1 − β) tend.
    """
    assert 0 <= beta <= 1, f"beta={beta}"
    student_CV = torch.log_softmax(logits_CV.float() / temperature, dim=-1)
    student_CK, teacher_CK = student_CV.gather(-1, top.tokens_NK), top.logprobs_NK
    if top.rest_N is not None:
        rest_C = _rest(student_CV, top.tokens_NK)
        assert rest_C is not None, "a teacher has more tokens than the student"
        student_CK = torch.cat([student_CK, rest_C[:, None]], dim=-1)
        teacher_CK = torch.cat([teacher_CK, top.rest_N[:, None]], dim=-1)
    if beta == 0:
        return _kl(teacher_CK, student_CK)
    if beta == 1:
        return _kl(student_CK, teacher_CK)
    mixture_CK = torch.logaddexp(teacher_CK + math.log(beta), student_CK + math.log1p(-beta))
    return beta * _kl(teacher_CK, mixture_CK) + (1 - beta) * _kl(student_CK, mixture_CK)


def _rest(logprobs_CV: Tensor, tokens_CK: Tensor) -> Tensor | None:
    """The logprob of all tokens but those; None where there are no others."""
    if tokens_CK.shape[-1] == logprobs_CV.shape[-1]:
        return None
    return logprobs_CV.scatter(-1, tokens_CK, -torch.inf).logsumexp(-1)


def _kl(logprobs_CK: Tensor, others_CK: Tensor) -> Tensor:
    return (logprobs_CK.exp() * (logprobs_CK - others_CK)).sum(-1)
