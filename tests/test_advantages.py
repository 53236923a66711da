"""Advantages against an oracle of plain Python, one group at a time."""

from __future__ import annotations

import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.advantages import ESTIMATORS, group_advantages


def oracle(rewards: list[float], estimator: str) -> list[float]:
    if len(rewards) == 1 or len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    centred = [reward - statistics.fmean(rewards) for reward in rewards]
    if estimator == "grpo":
        return [value / (statistics.stdev(rewards) + 1e-6) for value in centred]
    return [value * (len(rewards) / (len(rewards) - 1) if estimator == "rloo" else 1.0) for value in centred]


groups = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=6), min_size=1, max_size=5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(groups=groups, seed=st.integers(0, 100))
def test_equals_the_oracle_in_any_order_of_rows(estimator: str, groups: list[list[float]], seed: int) -> None:
    rewards = np.array([reward for group in groups for reward in group])
    index = np.array([7 * number for number, group in enumerate(groups) for _ in group])
    expected = np.array([value for group in groups for value in oracle(group, estimator)])
    order = np.random.default_rng(seed).permutation(len(rewards))
    found = group_advantages(rewards[order], index[order], estimator=estimator)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(found, expected[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.3], [], [1e-9 + 0.7] * 7])
def test_nothing_to_compare_is_zero_exactly(estimator: str, rewards: list[float]) -> None:
    found = group_advantages(np.array(rewards), np.zeros(len(rewards), dtype=int), estimator=estimator)  # pyright: ignore[reportArgumentType]
    assert found.tolist() == [0.0] * len(rewards)


def test_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match=r"estimator='gae'.*grpo"):
        group_advantages(np.zeros(2), np.zeros(2), estimator="gae")  # pyright: ignore[reportArgumentType]


def test_needs_no_torch() -> None:
    code = "import sys, rlpipe.advantages, rlpipe.trainer.options, rlpipe.trainer.board; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
