"""The statistics of the gate: intervals beside exact ones, their coverage, the sign test, and how
often made-up pairs of policies pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlpipe.extras.gate.statistics import CONFIDENCE, difference, interval, sign_test

PROMPTS = 200
PLANTED = 0.15  # how much lower the pass rate of a worse policy is
PAIRS = 20  # of equal policies, and as many of which the second is worse


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 60), st.data())
def test_the_interval_of_zeros_and_ones_is_that_of_the_binomial_distribution(prompts: int, data: st.DataObject) -> None:
    ones = data.draw(st.integers(0, prompts))
    low, high = interval(np.repeat([1.0, 0.0], [ones, prompts - ones]), seed=7)
    exact = stats.binom.ppf([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], prompts, ones / prompts) / prompts
    # 10,000 draws may end one prompt beside
    assert np.allclose([low, high], exact, atol=1.001 / prompts, rtol=0)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=50), st.floats(0.1, 10), st.floats(-5, 5), st.integers(0, 2**31 - 1)
)
def test_the_interval_moves_and_grows_with_the_values(values: list[float], scale: float, by: float, seed: int) -> None:
    plain, moved = interval(np.array(values), seed), interval(np.array(values) * scale + by, seed)
    assert np.allclose(np.array(plain) * scale + by, moved, atol=1e-9)
    assert min(values) - 1e-12 <= plain[0] <= plain[1] <= max(values) + 1e-12
    assert interval(np.full(3, values[0]), seed) == (values[0], values[0])


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_sign_test_counts_the_same_outcomes_as_integers_do(better: int, worse: int) -> None:
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    assert sign_test(better, worse) == pytest.approx(min(1.0, 2 * tail / 2**n), rel=1e-9)


def test_a_difference_by_hand() -> None:
    one = difference("s_greedy", np.array([1.0, 1, 0, 1, 1, 0, 1, 1]), np.array([0.0, 0, 1, 0, 1, 0, 0, 0]))
    assert (one.before, one.after, one.difference, one.better, one.worse) == (0.75, 0.25, -0.5, 1, 5)
    assert one.sign_p == pytest.approx(stats.binomtest(1, 6).pvalue)
    assert one.low < -0.5 < one.high and one == difference(
        "s_greedy", np.array([1.0, 1, 0, 1, 1, 0, 1, 1]), np.array([0.0, 0, 1, 0, 1, 0, 0, 0])
    )
    assert difference("s_reward_mean", np.array([0.5, 1]), np.array([0.25, 1])).sign_p is None


def made_up(rng: np.random.Generator, worse_by: float) -> tuple[np.ndarray, np.ndarray]:
    """Passes of two policies on the same prompts, some of which are harder; one completion each."""
    rates = rng.uniform(0.2, 0.95, PROMPTS)
    return rng.binomial(1, rates).astype(float), rng.binomial(1, rates - worse_by).astype(float)


def nominal(margin: float, worse_by: float) -> float:
    """The probability that the lower bound is at least -margin, by the normal distribution, with
    the variance of both policies on a prompt."""
    rates = np.linspace(0.2, 0.95, 10_001)
    variance = np.mean(rates * (1 - rates) + (rates - worse_by) * (1 - rates + worse_by))
    return float(stats.norm.cdf((margin - worse_by) / math.sqrt(variance / PROMPTS) - stats.norm.ppf(0.975)))


def passed(repetitions: int, worse_by: float, margin: float, seed: int = 20261130) -> int:
    """Of PAIRS x repetitions made-up pairs those that pass the rule `at_most_below` margin."""
    rng = np.random.default_rng(seed)
    pairs = (made_up(rng, worse_by) for _ in range(PAIRS * repetitions))
    return sum(difference("s_pass_at_1", *pair).low >= -margin for pair in pairs)


@pytest.mark.parametrize("worse_by", [0.0, PLANTED])
def test_as_many_pairs_pass_as_the_normal_distribution_says(worse_by: float) -> None:
    """Equal policies pass (power), those that are worse by the margin do not (false alarms)."""
    repetitions = 8
    count = passed(repetitions, worse_by, PLANTED)
    assert stats.binomtest(count, PAIRS * repetitions, nominal(PLANTED, worse_by)).pvalue > 1e-3, count
    assert nominal(PLANTED, 0.0) > 0.85 and nominal(PLANTED, PLANTED) == pytest.approx(0.025)


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng, repetitions, worse_by = np.random.default_rng(11), 300, 0.1
    ones = (difference("s_pass_at_1", *made_up(rng, worse_by)) for _ in range(repetitions))
    covered = sum(one.low <= -worse_by <= one.high for one in ones)
    assert stats.binomtest(covered, repetitions, CONFIDENCE).pvalue > 1e-3, covered
