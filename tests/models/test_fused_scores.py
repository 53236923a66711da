"""The kernels that make logprobs and entropies of logits on a GPU, against float64 and against one
operation after the other.

Legend: C positions, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlpipe.algorithms import fused_scores as fused
from rlpipe.algorithms.fused_scores import fused_scores
from rlpipe.algorithms.logprobs import scores_of

SHAPES = [(5, 37), (1, 1), (64, 1000)]
Scores = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler traces is run operation by operation: a CPU takes
    a minute to make kernels of it."""
    kernel = functools.cache(functools.partial(torch.compile, dynamic=True, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(fused, "compiled", kernel)


def gradient(
    scores: Scores, logits: Tensor, targets: Tensor, temperature: float, trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies, and the slopes of a sum of both that is uneven."""
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = scores(leaf, targets, temperature, trained)
    uneven = torch.linspace(-1, 1, len(targets), device=logits.device, dtype=logprobs.dtype)
    ((logprobs * uneven).sum() + (entropy * uneven.flip(0) ** 2).sum() * trained).backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropy.detach(), leaf.grad


def oracle(logits: Tensor, targets: Tensor, temperature: float, _trained: bool) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits / temperature, dim=-1)
    return every.gather(-1, targets[:, None]).squeeze(-1), -(every.exp() * every).sum(-1)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_values_and_slopes_are_those_of_float64(temperature: float, trained: bool) -> None:
    torch.manual_seed(0)
    for count, vocabulary in SHAPES:
        logits, targets = 8 * torch.randn(count, vocabulary), torch.randint(vocabulary, (count,))
        expected = gradient(oracle, logits.double(), targets, temperature, trained)
        for one, other in zip(gradient(fused_scores, logits, targets, temperature, trained), expected, strict=True):
            assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("traced")
def test_without_gradient_the_bits_are_the_same_and_far_logits_stay_finite() -> None:
    logits, targets = torch.tensor([[3e4, -3e4, 0.0], [-1e4, -1e4, -1e4]]), torch.tensor([1, 2])
    logprobs, entropy, slopes = gradient(fused_scores, logits, targets, 1.0, True)
    with torch.no_grad():
        assert all(map(torch.equal, fused_scores(logits, targets, 1.0, True), (logprobs, entropy)))
    assert logprobs[0] == -6e4 and entropy[0] == 0 and slopes.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("trained", [True, False])
def test_the_kernels_on_cuda_are_as_near_to_float64_as_torchs_own(trained: bool) -> None:
    """bfloat16, a vocabulary of 152k; twice, and without gradient, to the same bits."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(300, 151_936, device="cuda")).bfloat16()
    targets = torch.randint(151_936, (300,), device="cuda")
    expected = gradient(oracle, logits.double(), targets, 0.8, trained)
    twice: Any = [gradient(fused_scores, logits, targets, 0.8, trained) for _ in range(2)]
    assert all(map(torch.equal, *twice))
    with torch.no_grad():
        assert all(map(torch.equal, fused_scores(logits, targets, 0.8, trained), twice[0][:2]))
    for one, torchs, exact in zip(twice[0], gradient(scores_of, logits, targets, 0.8, trained), expected, strict=True):
        assert (one.double() - exact).abs().max() <= 2 * (torchs.double() - exact).abs().max() + 1e-6
