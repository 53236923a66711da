"""Losses against the oracle of plain Python, their gradients against finite differences, and what
depends on no numbers.

Legend: B sequences, T tokens. All float64 but where it says so.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlpipe.algorithms.losses import aggregate, entropy, importance_weights, kl, policy_terms, sft_loss
from rlpipe.config.training import RlConfig
from tests import maths_oracle as oracle

SHAPE = (5, 7)
OBJECTIVES, AGGREGATIONS, IMPORTANCES, KLS = (
    get_args(RlConfig.model_fields[name].annotation)
    for name in ("objective", "aggregation", "importance", "kl_estimator")
)
CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
CLIPS_OF: dict[str, dict[str, Any]] = {
    "dppo": {"clip_low": 0.05, "clip_high": 0.08},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
}
seeds = st.integers(0, 10_000)


def tensors(seed: int = 0, scale: float = 0.7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """policy, proximal, advantages, a ragged mask with one row all
    masked; sometimes everything is."""
    random = np.random.default_rng(seed)
    policy = -random.exponential(2.0, SHAPE)
    proximal = np.minimum(policy + scale * random.standard_normal(SHAPE), 0)
    mask = (random.random(SHAPE) < random.choice([0.0, 0.4, 0.9], p=[0.1, 0.4, 0.5])).astype(np.float64)
    mask[2] = 0
    advantages = random.standard_normal(SHAPE) * (random.random(SHAPE) < 0.9)
    return tuple(torch.from_numpy(array) for array in (policy, proximal, advantages, mask))  # pyright: ignore[reportReturnType]


def policy_loss(*stored: Tensor, **options: Any) -> Tensor:
    """The loss of `policy_terms` alone."""
    return policy_terms(*stored, **options)[0]


def hostile(values: Tensor, mask: Tensor, with_: float = math.nan) -> Tensor:
    return torch.where(mask > 0, values, with_)


def rows_of(*arrays: Tensor) -> Any:
    return zip(*(array.tolist() for array in arrays), strict=True)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("objective", OBJECTIVES)
@given(seed=seeds, scale=st.sampled_from([0.0, 0.1, 1.0, 15.0]))
@settings(max_examples=30)
def test_policy_loss(objective: str, dual_clip: float | None, seed: int, scale: float) -> None:
    policy, proximal, advantages, mask = tensors(seed, scale)
    clips = CLIPS_OF.get(objective, CLIPS)
    stored = [hostile(values, mask) for values in (policy, proximal, advantages)]
    found = policy_loss(*stored, mask, objective=objective, **clips, dual_clip=dual_clip)
    expected = [
        oracle.policy_loss(*row, objective, clips["clip_low"], clips["clip_high"], dual_clip)
        for row in rows_of(policy, proximal, advantages, mask)
    ]
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gradient_of_policy_loss_is_that_of_finite_differences(objective: str, seed: int) -> None:
    """cispo is not differentiated through its weight: with that held fixed, its loss is linear."""
    policy, proximal, advantages, mask = tensors(seed)
    mask = torch.ones_like(mask) * (mask + torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) > 0.3)
    clips = CLIPS_OF.get(objective, CLIPS)
    fixed = (policy - proximal).exp().clamp(1 - clips["clip_low"], 1 + clips["clip_high"])

    def total(leaf: Tensor) -> Tensor:
        if objective == "cispo":
            return (-fixed * advantages * leaf * mask).sum()
        return policy_loss(leaf, proximal, advantages, mask, objective=objective, **clips, dual_clip=1.5).sum()

    leaf = policy.clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (leaf,), eps=1e-7, atol=1e-6)
    policy_loss(leaf, proximal, advantages, mask, objective=objective, **clips, dual_clip=1.5).sum().backward()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    assert leaf.grad is not None and bool(leaf.grad[mask > 0].any())
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-15)
    assert not leaf.grad[mask == 0].any()


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in ("gspo", "dppo")])
def test_on_policy_every_token_objective_has_the_gradient_of_reinforce(objective: str) -> None:
    policy, _, advantages, mask = tensors()
    gradients = []
    for name in (objective, "reinforce"):
        leaf = policy.clone().requires_grad_()
        policy_loss(leaf, policy, advantages, mask, objective=name).sum().backward()
        gradients.append(leaf.grad)
    assert mask.any()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)


def test_gspo_on_policy_has_the_gradient_of_reinforce_in_the_sequence_mean() -> None:
    policy, _, advantages, mask = tensors()
    advantages = advantages[:, :1].expand(SHAPE)  # one a sequence, as GSPO has it
    gradients = []
    for name in ("gspo", "reinforce"):
        leaf = policy.clone().requires_grad_()
        losses = policy_loss(leaf, policy, advantages, mask, objective=name)
        aggregate(losses, mask, mode="sequence_mean").backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("objective", "dual_clip"), [("ppo", None), ("ppo", 1.5), ("gspo", None), ("gspo", 1.2), ("dppo", None)]
)
def test_clipped_tokens_are_those_without_gradient(objective: str, dual_clip: float | None) -> None:
    policy, proximal, advantages, _ = tensors(3, scale=1.0)
    mask = torch.ones(SHAPE)
    mask[0, 3:] = 0
    if objective == "gspo":
        advantages = advantages[:, :1].expand(
            SHAPE
        )  # one a sequence: clipped for some of its tokens, it still moves by the others
    advantages = torch.where(advantages == 0, 1.0, advantages)
    clips = CLIPS_OF.get(objective, CLIPS)
    leaf = policy.clone().requires_grad_()
    policy_loss(leaf, proximal, advantages, mask, objective=objective, **clips, dual_clip=dual_clip).sum().backward()
    _, below, above = policy_terms(
        hostile(policy, mask),
        hostile(proximal, mask),
        advantages,
        mask,
        objective=objective,
        **clips,
        dual_clip=dual_clip,
    )
    assert leaf.grad is not None and below.any() and above.any() and not (below & above).any()
    assert torch.equal((leaf.grad == 0) & (mask > 0), below | above)
    if dual_clip is not None:
        assert (above & (advantages < 0)).any(), "the dual clip was not at work"


def test_clipped_tokens_of_cispo_are_those_whose_weight_is_bounded_and_others_have_none() -> None:
    policy, proximal, advantages, mask = tensors(scale=1.0)
    _, below, above = policy_terms(policy, proximal, advantages, mask, objective="cispo", **CLIPS)
    ratio = (policy - proximal).exp()
    assert torch.equal(below, (ratio < 0.8) & (mask > 0)) and torch.equal(above, (ratio > 1.28) & (mask > 0))
    for objective in ("sapo", "reinforce"):
        terms = policy_terms(policy, proximal, advantages, mask, objective=objective, **CLIPS)
        assert not any(side.any() for side in terms[1:])
    for objective in OBJECTIVES:
        terms = policy_terms(policy, policy, advantages, mask, objective=objective, **CLIPS)
        assert not any(side.any() for side in terms[1:]), "on-policy"


@pytest.mark.parametrize("estimator", KLS)
@given(seed=seeds, scale=st.sampled_from([0.0, 0.1, 2.0, 15.0]))
@settings(max_examples=30)
def test_kl(estimator: str, seed: int, scale: float) -> None:
    policy, reference, _, _ = tensors(seed, scale)
    expected = [[oracle.kl(p, q, estimator) for p, q in zip(*row, strict=True)] for row in rows_of(policy, reference)]
    np.testing.assert_allclose(kl(policy, reference, estimator=estimator).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert kl(policy, policy, estimator=estimator).abs().max() == 0


@pytest.mark.parametrize("estimator", KLS)
def test_gradient_of_kl(estimator: str) -> None:
    policy, reference, _, _ = tensors(5)
    leaf = policy.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl(x, reference, estimator=estimator), (leaf,), eps=1e-7, atol=1e-6)


def test_k3_keeps_its_digits_in_fp32_where_policies_nearly_agree() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-2], dtype=torch.float32)
    exact = np.exp(-d.double().numpy()) + d.double().numpy() - 1
    np.testing.assert_allclose(kl(d, torch.zeros(3), estimator="k3").numpy(), exact, rtol=2e-4)


@pytest.mark.parametrize("mode", IMPORTANCES)
@given(seed=seeds, scale=st.sampled_from([0.0, 0.1, 1.0, 15.0]))
@settings(max_examples=30)
def test_importance_weights(mode: str, seed: int, scale: float) -> None:
    proximal, rollout, _, mask = tensors(seed, scale)
    leaf = hostile(proximal, mask).requires_grad_()
    found, bounded = importance_weights(leaf, hostile(rollout, mask, 0.0), mask, mode=mode, low=0.5, high=2.0)
    expected = [oracle.importance_weights(*row, mode, 0.5, 2.0) for row in rows_of(proximal, rollout, mask)]
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=1e-9, atol=1e-12)
    assert not found.requires_grad
    free, unbounded = importance_weights(leaf, hostile(rollout, mask, 0.0), mask, mode=mode, low=0.0, high=math.inf)
    assert torch.equal(bounded, found != free) and not unbounded.any()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(seed=seeds)
@settings(max_examples=30)
def test_aggregate_and_its_parts(mode: str, seed: int) -> None:
    """With global counts, the parts of any split add up to the whole: why
    microbatches and ranks do not matter."""
    values, _, _, mask = tensors(seed)
    whole = aggregate(hostile(values, mask), mask, mode=mode, length=16)
    expected = oracle.aggregate(values.tolist(), mask.tolist(), mode, 16)
    assert float(whole) == pytest.approx(expected, rel=1e-12)
    counts = {"num_tokens": float(mask.sum()), "num_sequences": float((mask.sum(-1) > 0).sum())}
    for split in (1, 2, 3):
        parts = zip(values.split(split), mask.split(split), strict=True)
        total = sum(float(aggregate(v, m, mode=mode, length=16, **counts)) for v, m in parts)
        assert total == pytest.approx(float(whole), rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradient_of_aggregate(mode: str) -> None:
    values, _, _, mask = tensors(4)
    leaf = values.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, mode=mode, length=16), (leaf,))


def test_entropy_and_its_gradient() -> None:
    logits = torch.from_numpy(3 * np.random.default_rng(0).standard_normal((2, 3, 5)))
    expected = [[oracle.entropy(row) for row in rows] for rows in logits.tolist()]
    np.testing.assert_allclose(entropy(torch.log_softmax(logits, -1)).numpy(), expected, rtol=1e-12)
    assert float(entropy(torch.log_softmax(torch.zeros(8), -1))) == pytest.approx(math.log(8), rel=1e-6)
    assert torch.autograd.gradcheck(lambda x: entropy(torch.log_softmax(x, -1)), (logits.requires_grad_(),))


def test_sft_loss_is_the_mean_over_the_mask() -> None:
    logprobs, _, _, mask = tensors()
    assert float(sft_loss(logprobs, mask)) == pytest.approx(-float(logprobs[mask > 0].mean()), rel=1e-12)


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rows", [0, 3])
def test_all_masked_is_a_finite_zero_whatever_is_stored_there(objective: str, importance: str, rows: int) -> None:
    for mode in AGGREGATIONS:
        leaf = torch.full((rows, 4), -math.inf, requires_grad=True)
        other, mask = torch.full((rows, 4), math.nan), torch.zeros(rows, 4)
        losses = policy_loss(leaf, other, other, mask, objective=objective, dual_clip=3.0)
        total = aggregate(
            losses * importance_weights(other, other, mask, mode=importance)[0], mask, mode=mode, length=8
        )
        total.backward()
        assert total.item() == 0.0
        assert leaf.grad is not None and bool((leaf.grad == 0).all())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masked_tokens_are_absent_to_the_gradient_too(objective: str) -> None:
    """As in a rollout of several turns: what is stored at the environment's tokens
    reaches neither loss nor gradient."""
    policy, proximal, advantages, mask = tensors(1)
    gradients = []
    for stored in (0.0, math.nan, -math.inf):
        leaf = hostile(policy, mask, stored).requires_grad_()
        losses = policy_loss(
            leaf, hostile(proximal, mask, stored), hostile(advantages, mask, stored), mask, objective=objective
        )
        losses = losses * importance_weights(leaf, hostile(proximal, mask, stored), mask, mode="sequence_truncate")[0]
        aggregate(losses, mask, mode="sequence_mean").backward()
        gradients.append(leaf.grad)
    assert mask.any() and torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


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
