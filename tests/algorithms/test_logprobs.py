"""Chunked logprobs against float64 numpy over the full logits; the
gradient does not depend on the chunk.

Legend: N positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlpipe.algorithms.logprobs import LOGITS_MAX, chunk_size, chunked_logprobs, scores_of
from rlpipe.extras.plan.trial import LiveBytes

N, H, V = 23, 8, 50


def setup() -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(0)
    return 3 * torch.randn(N, H), torch.randint(0, V, (N,)), nn.Linear(H, V, bias=False)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_values(temperature: float) -> None:
    hidden, targets, head = setup()
    logits = hidden.double().numpy() @ head.weight.detach().double().numpy().T / temperature
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature=temperature, chunk=5)
    np.testing.assert_allclose(
        logprobs.detach().numpy(), np.log(probabilities)[np.arange(N), targets], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        entropy.detach().numpy(), -(probabilities * np.log(probabilities)).sum(-1), rtol=1e-5, atol=1e-5
    )


def gradients(chunk: int) -> tuple[Tensor, Tensor]:
    hidden, targets, head = setup()
    hidden.requires_grad_()
    logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature=0.9, chunk=chunk)
    (logprobs * torch.arange(N) + 0.1 * entropy).sum().backward()
    assert hidden.grad is not None and head.weight.grad is not None
    return hidden.grad, head.weight.grad


@pytest.mark.parametrize("chunk", [1, 7, 22, 100])
def test_gradient_is_that_of_one_chunk(chunk: int) -> None:
    for found, expected in zip(gradients(chunk), gradients(N), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_logits_of_more_than_a_chunk_never_exist() -> None:
    hidden, targets, head = setup()
    sizes: list[int] = []

    def project(part: Tensor) -> Tensor:
        sizes.append(part.shape[0])
        return head(part)

    chunked_logprobs(hidden.requires_grad_(), targets, project, chunk=6)[0].sum().backward()
    assert sizes == [6, 6, 6, 5, 5, 6, 6, 6], "each chunk once forward and once more in the backward pass"
    assert chunk_size(151_936) * 151_936 <= LOGITS_MAX


@pytest.mark.parametrize("entropy_trained", [True, False])
def test_the_backward_pass_keeps_the_logits_of_a_chunk_or_two(entropy_trained: bool) -> None:
    vocabulary, chunk, positions = 4096, 8, 128
    hidden, head = torch.randn(positions, 4, requires_grad=True), nn.Linear(4, vocabulary)
    targets = torch.arange(positions)
    with LiveBytes([hidden, targets, *head.parameters()]) as live:
        logprobs, entropy = chunked_logprobs(hidden, targets, head, chunk=chunk, entropy_trained=entropy_trained)
        loss = logprobs.sum() + (entropy.sum() if entropy_trained else 0.0)
        loss.backward()
        assert live.most < 8 * chunk * vocabulary * 4 < positions * vocabulary * 4
        assert live.now < chunk * vocabulary * 4, "while the graph is still there"


def test_an_entropy_that_is_not_trained_changes_no_logprob_and_no_gradient() -> None:
    found: list[tuple[Tensor, ...]] = []
    for entropy_trained in (True, False):
        hidden, targets, head = setup()
        logprobs, entropy = chunked_logprobs(
            hidden.requires_grad_(), targets, head, chunk=6, entropy_trained=entropy_trained
        )
        logprobs.sum().backward()
        assert hidden.grad is not None and head.weight.grad is not None
        found.append((logprobs, entropy, hidden.grad, head.weight.grad))
    (logprobs, entropy, *trained), (own_logprobs, own_entropy, *own) = found
    assert torch.equal(logprobs, own_logprobs) and torch.equal(entropy, own_entropy)
    for pair in zip(trained, own, strict=True):  # by other operations
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-7)


def test_no_position_is_an_empty_answer() -> None:
    hidden, targets, head = setup()
    logprobs, entropy = chunked_logprobs(hidden[:0], targets[:0], head, chunk=4)
    assert logprobs.shape == entropy.shape == (0,)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_without_that_of_the_entropy_are_those_of_float64(temperature: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = (4 * torch.randn(N, V)).to(dtype).requires_grad_(), torch.randint(0, V, (N,))
    by_logprob = torch.randn(N)
    logprobs, entropy = scores_of(logits, targets, temperature, entropy_trained=False)
    (slopes,) = torch.autograd.grad(logprobs, logits, by_logprob)
    exact = logits.detach().double().requires_grad_()
    expected = torch.log_softmax(exact / temperature, -1).gather(-1, targets[:, None]).squeeze(-1)
    (expected_slopes,) = torch.autograd.grad(expected, exact, by_logprob.double())
    assert slopes.dtype is dtype and not entropy.requires_grad
    torch.testing.assert_close(
        slopes, expected_slopes.to(dtype), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6
    )
    with torch.no_grad():
        assert all(map(torch.equal, scores_of(logits, targets, temperature, False), (logprobs, entropy)))
