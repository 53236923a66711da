"""Shifts of a series: as often significant as they say where nothing changed, also in small groups,
and seen where something did."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.extras.why.changes import NO_SHIFT, drift, matched, more_often, shift


def passes(rng: np.random.Generator, rates_T: np.ndarray, groups: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pass rates of groups whose prompts differ, and their iterations."""
    iterations = np.repeat(np.arange(len(rates_T)), groups)
    chances = np.clip(rates_T[iterations] + rng.uniform(-0.3, 0.3, len(iterations)), 0, 1)
    return rng.binomial(size, chances) / size, iterations


def p_values(rates_T: np.ndarray, groups: int, size: int, *, trend: bool, wander: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(7)
    series = (passes(rng, rates_T + rng.normal(0, wander, len(rates_T)), groups, size) for _ in range(1000))
    return np.array([shift(*pair, len(rates_T) // 2, trend=trend).p for pair in series])


@pytest.mark.slow
@pytest.mark.parametrize(("iterations", "groups", "size"), [(4, 4, 4), (8, 4, 4), (12, 16, 8), (2, 8, 4)])
@pytest.mark.parametrize("wander", [0.0, 0.05])
def test_where_nothing_changed_a_p_value_is_what_it_says(
    iterations: int, groups: int, size: int, wander: float
) -> None:
    if iterations == 2 and wander:
        return  # of one iteration a side nobody can tell what iterations differ by
    p = p_values(np.full(iterations, 0.5), groups, size, trend=True, wander=wander)
    assert (p < 0.05).mean() < 0.09 and (p < 0.01).mean() < 0.035 and (p < 0.001).mean() < 0.008


def test_a_policy_that_learns_does_not_jump() -> None:
    learning = 0.3 + 0.4 * (1 - np.exp(-np.arange(12) / 4))
    assert (p_values(learning, 16, 8, trend=True) < 0.01).mean() < 0.02
    assert (p_values(learning, 16, 8, trend=False) < 0.05).mean() > 0.9  # without a trend it is taken for a change


def test_a_drift_is_the_way_along_a_line_and_chance_has_none() -> None:
    iterations_G = np.repeat([3, 4, 5, 8], 2)
    line = drift(0.1 * iterations_G + np.tile([-1e-3, 1e-3], 4), iterations_G)
    assert (line.before, line.after, line.size) == pytest.approx((0.3, 0.8, 0.5)) and line.p < 0.01 < 1 < line.z
    rng = np.random.default_rng(7)
    for wander in (0.0, 0.05):
        p = np.array([drift(*passes(rng, 0.5 + rng.normal(0, wander, 12), 8, 4)).p for _ in range(1000)])
        assert (p < 0.05).mean() < 0.09 and (p < 0.001).mean() < 0.008
    falling = drift(*passes(rng, np.linspace(0.8, 0.3, 12), 16, 8))
    assert falling.p < 1e-6 and falling.size == pytest.approx(-0.5, abs=0.1)
    assert drift(np.ones(4), np.arange(4)) == drift(np.arange(2.0), np.arange(2)) == NO_SHIFT


def test_flags_are_counted_as_in_the_lady_tasting_tea() -> None:
    """Fisher 1935: three of four right on either side has p = 34/70; all four have 2/70."""
    cups = np.repeat([False, True], 4)
    three = more_often(np.array([0, 0, 0, 1, 0, 1, 1, 1], bool), cups)
    assert (three.before, three.after, three.size) == (0.25, 0.75, 0.5) and three.p == pytest.approx(34 / 70)
    all_four = more_often(cups, cups)
    assert all_four.p == pytest.approx(2 / 70) and all_four.z > three.z > 0
    assert more_often(~cups, cups).z == -all_four.z
    assert more_often(cups[:4], cups[:4]) == more_often(cups[:0], cups[:0]) == NO_SHIFT


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_flags_where_nothing_changed_are_seldom_significant(rate: float) -> None:
    rng, after_G = np.random.default_rng(7), np.arange(60) >= 20
    p = np.array([more_often(rng.random(60) < rate, after_G).p for _ in range(1000)])
    assert (p < 0.05).mean() < 0.06 and (p < 0.01).mean() < 0.015


def test_a_jump_is_seen_and_measured() -> None:
    fallen = np.where(np.arange(12) < 6, 0.6, 0.2)
    assert (p_values(fallen, 16, 8, trend=True) < 1e-3).mean() > 0.9
    measured = shift(*passes(np.random.default_rng(1), fallen, 200, 8), 6, trend=True)
    assert measured.size == pytest.approx(-0.4, abs=0.06) and measured.before > measured.after


def test_a_few_groups_that_agree_are_no_proof() -> None:
    values, iterations = np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1])
    assert shift(values, iterations, 1).p > 0.01
    assert shift(np.ones(8), np.repeat([0, 1], 4), 1).p == 1.0
    assert shift(values, iterations, 5) == NO_SHIFT
    assert shift(np.array([np.nan, 1.0]), np.array([0, 1]), 1) == NO_SHIFT


def test_what_is_matched_is_learnt_from_rows_of_other_groups_that_are_alike() -> None:
    rng = np.random.default_rng(2)
    features = rng.normal(size=(800, 2))
    values = 1 + features @ np.array([2.0, 0.0])
    values[400:] -= 5
    learnt, groups = np.arange(800) < 400, np.arange(800) // 4
    expected, share = matched(features, values, learnt, groups)
    known = np.isfinite(expected)
    assert share > 0.8 and known.mean() > 0.8
    assert (values - expected)[known & ~learnt].mean() == pytest.approx(-5, abs=0.1)
    assert matched(np.zeros((800, 0)), values, learnt, groups)[1] == 0.0


def test_nothing_is_matched_where_nothing_before_was_alike() -> None:
    """A straight line through a few near misses says nothing of
    garbage that is far from all of them."""
    before, after = np.linspace(0.7, 1.0, 200), np.linspace(0.0, 0.3, 200)
    features = np.concatenate([before, after])[:, None]
    expected, share = matched(features, features[:, 0], np.arange(400) < 200, np.arange(400))
    assert share > 0.9 and np.isfinite(expected[:200]).all() and np.isnan(expected[200:]).all()


def test_a_row_says_nothing_of_its_own_group() -> None:
    features, groups = np.zeros((40, 1)), np.repeat(np.arange(10), 4)
    values = groups.astype(float)
    expected, _ = matched(features, values, np.ones(40, bool), groups)
    assert expected == pytest.approx((values.sum() - 4 * values) / 36)
