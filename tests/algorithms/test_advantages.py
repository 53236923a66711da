"""Advantages against the oracle of plain Python, and what must hold of all of them.

Legend: B rollouts, T tokens, N scored tokens.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.algorithms.advantages import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    gdpo_advantages,
    group_advantages,
    rollout_means,
)
from tests import maths_oracle as oracle
from tests.batches import token_advantages

groups_of = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=6), min_size=1, max_size=5)
seeds = st.integers(0, 10_000)


def batch(seed: int, groups: list[list[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.random.Generator]:
    """rewards_B, group_index_B, a ragged mask_BT with rows and sometimes everything masked, and the
    randomness that is left."""
    random = np.random.default_rng(seed)
    rewards_B = np.array([reward for group in groups for reward in group])
    group_index_B = np.array([7 * number for number, group in enumerate(groups) for _ in group])
    order = random.permutation(len(rewards_B))
    mask_BT = (random.random((len(rewards_B), 6)) < random.choice([0.0, 0.4, 0.9])).astype(np.int64)
    mask_BT[random.random(len(rewards_B)) < 0.2] = 0
    return rewards_B[order], group_index_B[order], mask_BT, random


def assert_close(found: np.ndarray, expected: Any) -> None:
    np.testing.assert_allclose(found, np.array(expected).reshape(found.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@given(groups=groups_of, seed=seeds)
@settings(max_examples=60)
def test_group_estimators_equal_the_oracle_in_any_order_of_rows(
    estimator: str, groups: list[list[float]], seed: int
) -> None:
    rewards_B, group_index_B, mask_BT, _ = batch(seed, groups)
    lengths_B = mask_BT.sum(-1)
    found = group_advantages(rewards_B, group_index_B, estimator=estimator, lengths_B=lengths_B)
    expected = oracle.group_advantages(rewards_B.tolist(), group_index_B.tolist(), estimator, lengths_B.tolist())
    if estimator == "maxrl":  # a mean that is zero but for rounding has either sign
        means = [rewards_B[group_index_B == group].mean() for group in group_index_B]
        sure = np.abs(means) > 1e-9
        np.testing.assert_allclose(found[sure], np.array(expected)[sure], rtol=1e-5, atol=1e-6)
    else:
        assert_close(found, expected)


@given(groups=groups_of, seed=seeds, gamma=st.sampled_from([1.0, 0.97, 0.5]), kl_coef=st.sampled_from([None, 0.3]))
@settings(max_examples=60)
def test_reinforce_plus_plus_equals_the_oracle(
    groups: list[list[float]], seed: int, gamma: float, kl_coef: float | None
) -> None:
    rewards_B, group_index_B, mask_BT, random = batch(seed, groups)
    kl_BT = None if kl_coef is None else random.standard_normal(mask_BT.shape)
    lengths_B, kept = mask_BT.sum(-1), mask_BT > 0
    kl: dict[str, Any] = {} if kl_BT is None else {"kl_N": kl_BT[kept], "kl_coef": kl_coef}
    found = token_advantages(rewards_B, group_index_B, lengths_B, estimator="reinforce_plus_plus", gamma=gamma, **kl)
    rows = None if kl_BT is None else kl_BT.tolist()
    expected = oracle.reinforce_plus_plus(rewards_B.tolist(), mask_BT.tolist(), gamma, rows, kl_coef or 0.0)
    assert_close(found, np.array(expected)[kept])
    found = token_advantages(rewards_B, group_index_B, lengths_B, estimator="reinforce_plus_plus_baseline")
    expected = oracle.reinforce_plus_plus_baseline(rewards_B.tolist(), group_index_B.tolist(), mask_BT.tolist())
    assert_close(found, np.array(expected)[kept])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(groups=groups_of, seed=seeds, kl_coef=st.sampled_from([None, 0.3]))
@settings(max_examples=40)
def test_token_advantages_are_those_of_the_estimator(
    estimator: str, groups: list[list[float]], seed: int, kl_coef: float | None
) -> None:
    """What the trainer and the filter call: the KL is subtracted per token,
    or as its sum over the rollout."""
    rewards_B, group_index_B, mask_BT, random = batch(seed, groups)
    kl_BT = random.random(mask_BT.shape) * mask_BT
    lengths_B, kept = mask_BT.sum(-1), mask_BT > 0
    shaped_B = rewards_B - (kl_coef or 0.0) * kl_BT.sum(-1)
    marks = mask_BT.tolist()
    if estimator == "reinforce_plus_plus":
        expected = oracle.reinforce_plus_plus(rewards_B.tolist(), marks, 0.9, kl_BT.tolist(), kl_coef or 0.0)
        expected = np.array(expected)[kept]
    elif estimator == "reinforce_plus_plus_baseline":
        expected = np.array(oracle.reinforce_plus_plus_baseline(shaped_B.tolist(), group_index_B.tolist(), marks))[kept]
    else:
        expected = group_advantages(shaped_B, group_index_B, estimator=estimator, lengths_B=lengths_B)
        expected = (expected[:, None] * np.ones(mask_BT.shape))[kept]
    kl = {} if kl_coef is None else {"kl_N": kl_BT[kept], "kl_coef": kl_coef}
    found = token_advantages(rewards_B, group_index_B, lengths_B, estimator=estimator, gamma=0.9, **kl)
    assert found.shape == (lengths_B.sum(),) and np.isfinite(found).all()
    if estimator not in ("grpo", "maxrl") or kl_coef is None:  # these divide by what the last bit of a sum may change
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    means_B = rollout_means(found, lengths_B)
    for row, length in enumerate(lengths_B):
        of_row = found[lengths_B[:row].sum() :][:length]
        assert means_B[row] == pytest.approx(of_row.mean() if length else 0.0, abs=1e-9)
        if estimator in GROUP_ESTIMATORS and length:
            assert means_B[row] == of_row[0], "to the bit"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.3], [], [1e-9 + 0.7] * 7])
def test_nothing_to_compare_is_zero_exactly(estimator: str, rewards: list[float]) -> None:
    index = np.zeros(len(rewards), dtype=int)
    lengths_B = np.arange(1, len(rewards) + 1)
    found = token_advantages(np.array(rewards), index, lengths_B, estimator=estimator)
    assert found.tolist() == [0.0] * int(lengths_B.sum())
    unscored = token_advantages(
        np.array([*rewards, 1.0]), np.array([*index, 0]), 0 * np.array([*lengths_B, 1]), estimator=estimator
    )
    assert unscored.shape == (0,), "all masked"


def test_a_masked_rollout_s_reward_still_counts_in_its_group() -> None:
    found = token_advantages(np.array([1.0, 0.0]), np.zeros(2), np.array([2, 0]), estimator="dr_grpo")
    assert found.tolist() == [0.5, 0.5]


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    random = np.random.default_rng(0)
    found = token_advantages(
        random.random(20), np.arange(20), np.full(20, 9), estimator="reinforce_plus_plus", gamma=0.9
    )
    assert found.mean() == pytest.approx(0, abs=1e-12)
    assert found.var(ddof=1) == pytest.approx(1, rel=1e-5)


def test_unknown_estimators_are_named() -> None:
    with pytest.raises(ValueError, match=r"estimator='gae'.*grpo"):
        group_advantages(np.zeros(2), np.zeros(2), estimator="gae")
    with pytest.raises(ValueError, match=r"estimator='gae'.*reinforce_plus_plus"):
        token_advantages(np.zeros(2), np.zeros(2), np.ones(2), estimator="gae")
    with pytest.raises(ValueError, match="opo needs lengths_B"):
        group_advantages(np.zeros(2), np.zeros(2), estimator="opo")


def test_needs_no_torch() -> None:
    code = (
        "import sys, rlpipe.algorithms.advantages, rlpipe.trainer.process, rlpipe.trainer.jobs; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(groups=groups_of, seed=seeds, weights=st.lists(st.floats(-2, 2, width=16), min_size=1, max_size=3))
@settings(max_examples=60)
def test_gdpo_equals_the_oracle_and_is_0_for_equal_parts(
    groups: list[list[float]], seed: int, weights: list[float]
) -> None:
    rewards_B, group_index_B, _, random = batch(seed, groups)
    parts_BK = np.round(random.normal(size=(len(rewards_B), len(weights))), 1)
    parts_BK[:, 0] = rewards_B
    found = gdpo_advantages(parts_BK, np.array(weights), group_index_B)
    if np.ptp(np.array(oracle.gdpo(parts_BK.T.tolist(), weights, group_index_B.tolist()))) > 1e-6:
        assert_close(found, oracle.gdpo(parts_BK.T.tolist(), weights, group_index_B.tolist()))
    assert not gdpo_advantages(np.ones_like(parts_BK), np.array(weights), group_index_B).any()


def test_gdpo_tells_rollouts_of_equal_sums_apart_and_does_not_ask_how_much_a_part_varies() -> None:
    parts_BK = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    group_B, weights_K = np.array([0, 0, 0, 0, 1, 1]), np.array([2.0, 1.0])
    found = gdpo_advantages(parts_BK, weights_K, group_B)
    assert found[0] > found[1] and len({*found.round(6)}) == 6
    wider = gdpo_advantages(parts_BK * [1.0, 1000.0], weights_K, group_B)
    np.testing.assert_allclose(wider, found, rtol=1e-4)
