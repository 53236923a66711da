"""The divergence of a student from a teacher's top tokens, against sums written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.divergence import jensen_shannon, top_tokens

SIZES = st.tuples(st.integers(1, 4), st.integers(2, 12))


def logits(seed: int, size: tuple[int, int]) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def classes(logits_V: np.ndarray, chosen: np.ndarray, temperature: float) -> np.ndarray:
    """The probabilities of the chosen tokens, then of all others together, if there are others."""
    shares = np.exp(logits_V / temperature - (logits_V / temperature).max())
    shares /= shares.sum()
    others = np.setdiff1d(np.arange(len(shares)), chosen)
    return np.array([*shares[chosen], *([shares[others].sum()] if len(others) else [])])


def written_out(student: np.ndarray, teacher: np.ndarray, beta: float) -> float:
    """beta KL(T || M) + (1 - beta) KL(P || M), M = beta T + (1 - beta) P; forward and reverse KL at
    the ends."""

    def kl(p: np.ndarray, q: np.ndarray) -> float:
        return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@given(st.integers(0, 999), SIZES, st.integers(1, 14), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), st.floats(0.5, 2))
def test_it_is_the_formula_and_its_limits(
    seed: int, size: tuple[int, int], top_k: int, beta: float, temperature: float
) -> None:
    student, teacher = logits(seed, size), logits(seed + 1, size)
    top = top_tokens(teacher, top_k, temperature)
    assert top.tokens_NK.shape == (size[0], min(top_k, size[1]))
    assert (top.rest_N is None) == (top_k >= size[1])
    found = jensen_shannon(student, top, temperature=temperature, beta=beta)
    for row, value in enumerate(found):
        chosen = np.argsort(-teacher[row].numpy(), kind="stable")[:top_k]
        assert set(chosen) == set(top.tokens_NK[row].tolist())
        shares = [classes(each[row].double().numpy(), chosen, temperature) for each in (student, teacher)]
        assert float(value) == pytest.approx(written_out(shares[0], shares[1], beta), rel=2e-4, abs=2e-6)


@given(st.integers(0, 999), SIZES, st.integers(1, 14), st.floats(0, 1))
def test_it_is_0_for_the_teacher_alone_and_grows_with_the_tokens_that_are_told_apart(
    seed: int, size: tuple[int, int], top_k: int, beta: float
) -> None:
    student, teacher = logits(seed, size), logits(seed + 1, size)
    few, more = (
        jensen_shannon(student, top_tokens(teacher, count, 1.0), temperature=1.0, beta=beta)
        for count in (top_k, top_k + 1)
    )
    assert (few >= -1e-6).all() and (more >= few - 1e-5).all()
    same = jensen_shannon(teacher, top_tokens(teacher, top_k, 1.0), temperature=1.0, beta=beta)
    torch.testing.assert_close(same, torch.zeros(size[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 1e-4, 0.5, 1 - 1e-4, 1.0])
@pytest.mark.parametrize("top_k", [1, 5, 11, 12, 99])
def test_its_gradient_is_that_of_float64(beta: float, top_k: int) -> None:
    student, teacher = logits(3, (6, 12)).requires_grad_(), logits(4, (6, 12))
    top = top_tokens(teacher, top_k, 0.7)
    jensen_shannon(student, top, temperature=0.7, beta=beta).sum().backward()
    exact = student.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(6):
        chosen = top.tokens_NK[row]
        others = [token for token in range(12) if token not in set(chosen.tolist())]
        p, t = (torch.softmax(each[row].double() / 0.7, -1) for each in (exact, teacher))
        p, t = (torch.cat([each[chosen], each[others].sum()[None]]) if others else each[chosen] for each in (p, t))
        if beta in (0, 1):
            total = total + ((p * (p / t).log()).sum() if beta else (t * (t / p).log()).sum())
        else:
            m = beta * t + (1 - beta) * p
            total = total + beta * (t * (t / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum()
    total.backward()
    assert student.grad is not None and exact.grad is not None
    assert float((student.grad.double() - exact.grad).norm()) <= 1e-5 * max(float(exact.grad.norm()), 1e-1)


def test_tokens_that_the_student_all_but_excludes_have_a_finite_gradient() -> None:
    student = torch.tensor([[60.0, 0.0, -60.0]], requires_grad=True)
    for top_k in (1, 2, 3):
        top = top_tokens(torch.tensor([[-60.0, 0.0, 60.0]]), top_k, 1.0)
        for beta in (0.0, 0.5, 1.0):
            jensen_shannon(student, top, temperature=1.0, beta=beta).sum().backward()
    assert student.grad is not None and student.grad.isfinite().all()
