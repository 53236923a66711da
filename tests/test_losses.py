"""Losses against independent float64 numpy, one token at a time; and the properties that do not depend on numbers.

Legend: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rlpipe.losses import aggregate, clipped_tokens, importance_weights, kl, policy_loss, sft_loss

SHAPE = (5, 7)


def tensors(seed: int = 0, scale: float = 0.7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """policy, proximal, advantages, mask (float64), with one all-masked row."""
    random = np.random.default_rng(seed)
    policy = -random.exponential(2.0, SHAPE)
    proximal = policy + scale * random.standard_normal(SHAPE)
    mask = (random.random(SHAPE) < 0.7).astype(np.float64)
    mask[2] = 0
    return tuple(torch.from_numpy(array) for array in (policy, proximal, random.standard_normal(SHAPE), mask))  # pyright: ignore[reportReturnType]


def each(function: Callable[..., float], *arrays: Tensor) -> np.ndarray:
    return np.array([[function(*(float(array[b, t]) for array in arrays)) for t in range(SHAPE[1])] for b in range(SHAPE[0])])


def ppo_token(policy: float, proximal: float, advantage: float, dual_clip: float | None) -> float:
    ratio = math.exp(policy - proximal)
    bounded = min(max(ratio, 0.8), 1.28)
    loss = -min(ratio * advantage, bounded * advantage)
    return min(loss, -dual_clip * advantage) if dual_clip is not None and advantage < 0 else loss


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_ppo(dual_clip: float | None) -> None:
    policy, proximal, advantages, mask = tensors(scale=1.0)
    found = policy_loss(policy, proximal, advantages, mask, objective="ppo", clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    expected = each(lambda p, q, a: ppo_token(p, q, a, dual_clip), policy, proximal, advantages) * mask.numpy()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_reinforce() -> None:
    policy, proximal, advantages, mask = tensors()
    found = policy_loss(policy, proximal, advantages, mask, objective="reinforce")
    np.testing.assert_allclose(found.numpy(), -(policy * advantages * mask).numpy(), rtol=1e-12)


def test_ppo_on_policy_has_the_gradient_of_reinforce() -> None:
    policy, _, advantages, mask = tensors()
    gradients = []
    for objective in ("ppo", "reinforce"):
        leaf = policy.clone().requires_grad_()
        policy_loss(leaf, policy, advantages, mask, objective=objective).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=0)


def test_clipped_tokens_have_no_gradient_and_others_do() -> None:
    policy, proximal, advantages, _ = tensors(scale=1.0)
    leaf = policy.clone().requires_grad_()
    everywhere = torch.ones(SHAPE)
    policy_loss(leaf, proximal, advantages, everywhere, objective="ppo", clip_low=0.2, clip_high=0.28).sum().backward()
    below, above = clipped_tokens(policy, proximal, advantages, clip_low=0.2, clip_high=0.28)
    assert leaf.grad is not None and below.any() and above.any()
    assert torch.equal(leaf.grad == 0, below | above)


@pytest.mark.parametrize(
    ("estimator", "token"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: max(-10.0, min(10.0, math.exp(-d) + d - 1))),
        ("abs", abs),
    ],
)
def test_kl(estimator: str, token: Callable[[float], float]) -> None:
    policy, reference, _, _ = tensors(scale=2.0)
    expected = each(lambda p, q: token(p - q), policy, reference)
    np.testing.assert_allclose(kl(policy, reference, estimator=estimator).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert kl(policy, policy, estimator=estimator).abs().max() == 0


def test_k3_keeps_its_digits_in_fp32_where_policies_nearly_agree() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-2], dtype=torch.float32)
    exact = np.exp(-d.double().numpy()) + d.double().numpy() - 1
    np.testing.assert_allclose(kl(d, torch.zeros(3), estimator="k3").numpy(), exact, rtol=2e-4)


@pytest.mark.parametrize("mode", ["none", "token_truncate", "token_mask"])
def test_importance_weights(mode: str) -> None:
    proximal, rollout, _, mask = tensors(scale=1.0)

    def token(p: float, q: float, kept: float) -> float:
        ratio = math.exp(p - q)
        if mode == "none" or not kept:
            return 1.0
        inside = 0.5 <= ratio <= 2.0
        return min(max(ratio, 0.5), 2.0) if mode == "token_truncate" else ratio * inside

    leaf = proximal.clone().requires_grad_()
    found = importance_weights(leaf, rollout, mask, mode=mode, low=0.5, high=2.0)
    np.testing.assert_allclose(found.numpy(), each(token, proximal, rollout, mask), rtol=1e-12)
    assert not found.requires_grad


def aggregate_oracle(values: np.ndarray, mask: np.ndarray, mode: str) -> float:
    rows = [row[kept > 0] for row, kept in zip(values, mask, strict=True) if kept.any()]
    if mode == "token_mean":
        return float(np.concatenate(rows).mean())
    if mode == "sequence_mean":
        return float(np.mean([row.mean() for row in rows]))
    return sum(float(row.sum()) for row in rows) / (len(rows) * 16)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "fixed_length"])
def test_aggregate_and_its_parts(mode: str) -> None:
    """With global counts, the parts of any split add up to the whole: why microbatches and ranks do not matter."""
    values, _, _, mask = tensors()
    whole = aggregate(values, mask, mode=mode, length=16)
    assert float(whole) == pytest.approx(aggregate_oracle(values.numpy(), mask.numpy(), mode), rel=1e-12)
    counts = {"num_tokens": float(mask.sum()), "num_sequences": float((mask.sum(-1) > 0).sum())}
    for split in (1, 2, 3):
        parts = zip(values.split(split), mask.split(split), strict=True)
        total = sum(float(aggregate(v, m, mode=mode, length=16, **counts)) for v, m in parts)
        assert total == pytest.approx(float(whole), rel=1e-12)


def test_sft_loss_is_the_mean_over_the_mask() -> None:
    logprobs, _, _, mask = tensors()
    assert float(sft_loss(logprobs, mask)) == pytest.approx(-float(logprobs[mask > 0].mean()), rel=1e-12)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("rows", [0, 3])
def test_all_masked_is_a_finite_zero_whatever_is_stored_there(mode: str, rows: int) -> None:
    hostile = torch.full((rows, 4), -math.inf, requires_grad=True)
    other, mask = torch.full((rows, 4), math.nan), torch.zeros(rows, 4)
    losses = policy_loss(hostile, other, torch.ones(rows, 4), mask, objective="ppo", dual_clip=3.0)
    weights = importance_weights(other, other, mask, mode="token_truncate")
    total = aggregate(losses * weights, mask, mode=mode, length=8)
    total.backward()
    assert total.item() == 0.0
    assert hostile.grad is not None and bool((hostile.grad == 0).all())


def test_unknown_names_are_refused() -> None:
    a = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="objective='trpo'"):
        policy_loss(a, a, a, a, objective="trpo")
    with pytest.raises(ValueError, match="estimator='k4'"):
        kl(a, a, estimator="k4")
    with pytest.raises(ValueError, match="mode='x'"):
        importance_weights(a, a, a, mode="x")
    with pytest.raises(ValueError, match="fixed_length with a length"):
        aggregate(a, a, mode="fixed_length")
