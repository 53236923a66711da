"""Tests whether a series of iterations changed at one of them: pure statistics, valid for small
numbers of groups too.

Groups are the unit of independence: rollouts of one prompt are alike. Effects on whole iterations
(the policy learns) are noise between iterations, which is estimated beside the noise within them.
Legend of the shapes: G groups, T iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from scipy.spatial import KDTree

CALIPER = 0.5  # of a feature's spread: the largest distance between alike rows
ALIKE_MIN, ALIKE_MAX = 4, 64  # alike rows: with fewer nothing is known, more are not used
TREND_MIN = 3  # iterations on the longer side, below which no trend can be told from a jump


@dataclass(frozen=True)
class Shift:
    """The change from the iterations before `at` to those from `at` on. `size` is the mean after
    less the mean before, beyond a trend where one is fitted.
    """

    before: float
    after: float
    size: float
    p: float  # two-sided: the chance of so large a size where nothing changed
    z: float  # the size in standard errors

    @property
    def falls(self) -> float:
        """The one-sided p of a fall."""
        return self.p / 2 if self.size < 0 else 1 - self.p / 2


NO_SHIFT = Shift(0.0, 0.0, 0.0, 1.0, 0.0)


def shift(
    values_G: np.ndarray, iterations_G: np.ndarray, at: int, *, trend: bool = False, exact: bool = False
) -> Shift:
    """The shift of the groups' values at iteration `at`, with the noise within and between
    iterations; NO_SHIFT when a side has no value.

    With `trend` a straight line through both sides is removed, where there are enough iterations:
    learning is no change. `exact`: there is one value an iteration, a metric, and no groups that it
    is the mean of; then each side has a slope of its own, and the size is the step between both
    lines at `at`.
    """
    known_G = np.isfinite(values_G)
    values_G, iterations_G = values_G[known_G], iterations_G[known_G]
    after_G = iterations_G >= at
    if not after_G.any() or after_G.all():
        return NO_SHIFT
    before, after = float(values_G[~after_G].mean()), float(values_G[after_G].mean())
    iterations_T, index_G = np.unique(iterations_G, return_inverse=True)
    counts_T = np.bincount(index_G)
    means_T = np.bincount(index_G, values_G) / counts_T
    late_T = iterations_T >= at
    sides = [_variance_within(values_G, means_T[index_G], after_G == side) for side in (False, True)]
    noise_T = np.zeros(len(means_T)) if exact else np.where(late_T, sides[1], sides[0]) / counts_T
    columns = [np.ones(len(means_T)), late_T.astype(float)]
    lengths = int((~late_T).sum()), int(late_T.sum())
    if trend and exact and min(lengths) >= TREND_MIN:  # a jump of a metric may change its slope
        columns += [np.where(late_T == side, iterations_T - at, 0.0) for side in (False, True)]
    elif trend and max(lengths) >= TREND_MIN:
        columns.append(iterations_T - at)
    counts = [int((after_G == side).sum()) for side in (False, True)]
    within_free = _freedom([variance / count for variance, count in zip(sides, counts, strict=True)], counts)
    size, error, freedom = _step(np.stack(columns, axis=1), means_T, noise_T, within_free)
    if np.ptp(values_G) == 0:
        return replace(NO_SHIFT, before=before, after=after)
    if error <= 0.0:  # the values differ between the sides only
        return Shift(before, after, size, 0.0, float(np.sign(size)) * np.inf)
    return _tested(before, after, size, error, freedom)


def more_often(flags_G: np.ndarray, after_G: np.ndarray) -> Shift:
    """The change of the share of flagged groups, by Fisher's exact test: for flags that depend on
    each group's own row of the data only, not on whole iterations. NO_SHIFT when a side has no
    group.
    """
    counts = [(int(flags_G[after_G == side].sum()), int((after_G == side).sum())) for side in (False, True)]
    (before, of_before), (after, of_after) = counts
    if not of_before or not of_after:
        return NO_SHIFT
    _, p = np.asarray(stats.fisher_exact([[before, of_before - before], [after, of_after - after]]), dtype=float)
    size = after / of_after - before / of_before
    return Shift(before / of_before, after / of_after, size, float(p), float(np.sign(size) * stats.norm.isf(p / 2)))


def drift(values_G: np.ndarray, iterations_G: np.ndarray) -> Shift:
    """The shift from the first iteration to the last along a straight line, with the noise of
    `shift`; NO_SHIFT below TREND_MIN iterations.
    """
    iterations_T, index_G, counts_T = np.unique(iterations_G, return_inverse=True, return_counts=True)
    if len(iterations_T) < TREND_MIN or np.ptp(values_G) == 0:
        return NO_SHIFT
    means_T = np.bincount(index_G, values_G) / counts_T
    variance = _variance_within(values_G, means_T[index_G], np.ones(len(values_G), bool))
    part_T = (iterations_T - iterations_T[0]) / np.ptp(iterations_T)
    design_TC = np.stack([np.ones(len(means_T)), part_T], axis=1)
    size, error, freedom = _step(design_TC, means_T, variance / counts_T, max(len(values_G) - len(means_T), 1.0))
    start = float(means_T.mean() - size * part_T.mean())
    return _tested(start, start + size, size, error, freedom)


def _tested(before: float, after: float, size: float, error: float, freedom: float) -> Shift:
    """The shift of this size with its p, by Student's t."""
    z = size / error
    return Shift(before, after, size, float(2 * stats.t.sf(abs(z), freedom)), float(z))


def _variance_within(values_G: np.ndarray, means_G: np.ndarray, side_G: np.ndarray) -> float:
    """The variance of a side's groups within their iterations.

    One pseudo-group at the distance of the two sides bounds it from below: four groups that agree
    by chance are no proof. Each side has its own variance: flags that are rare on one side vary
    little there.
    """
    residuals = (values_G - means_G)[side_G]
    return float(((residuals**2).sum() + values_G.var()) / len(residuals))


def _freedom(errors: list[float], counts: list[int]) -> float:
    """Welch's degrees of freedom, for two sides with these squared errors and numbers of groups."""
    each_side = sum(error**2 / max(count - 1, 1) for error, count in zip(errors, counts, strict=True))
    return max(sum(errors) ** 2 / each_side, 1.0) if each_side > 0 else 1.0


def _step(
    design_TC: np.ndarray, means_T: np.ndarray, noise_T: np.ndarray, within_free: float
) -> tuple[float, float, float]:
    """The step's coefficient, its standard error and degrees of freedom, by weighted least squares
    with a variance between iterations.

    `within_free`: the degrees of freedom of the noise within iterations.
    """
    num, columns = design_TC.shape
    coefficients = np.linalg.lstsq(design_TC, means_T, rcond=None)[0]
    free = num - columns
    residuals_T = means_T - design_TC @ coefficients
    between = max(0.0, float((residuals_T**2).sum() / free - noise_T.mean())) if free > 0 else 0.0
    variance_T = noise_T + between
    if not (variance_T > 0).all():
        return float(coefficients[1]), 0.0, 1.0
    weighted_CT = design_TC.T / variance_T
    covariance_CC = np.linalg.pinv(weighted_CT @ design_TC)
    coefficients = covariance_CC @ weighted_CT @ means_T
    share = between / (between + float(noise_T.mean()))
    freedom = 1 / (share**2 / free + (1 - share) ** 2 / within_free) if free > 0 else within_free
    return float(coefficients[1]), float(np.sqrt(covariance_CC[1, 1])), float(max(freedom, 1.0))


def group_means(values_R: np.ndarray, group_R: np.ndarray, num_groups: int) -> np.ndarray:
    """The mean of each group's values, [G]; nan where none has one.

    `group_R`: the position of each value's group.
    """
    known_R = np.isfinite(values_R)
    counts_G = np.bincount(group_R[known_R], minlength=num_groups)
    sums_G = np.bincount(group_R[known_R], values_R[known_R], minlength=num_groups)
    return np.where(counts_G > 0, sums_G / np.maximum(counts_G, 1), np.nan)


def within_correlation(
    first_R: np.ndarray, second_R: np.ndarray, group_R: np.ndarray, num_groups: int, chosen_R: np.ndarray
) -> float:
    """The correlation of two columns, each less its group's mean, over the chosen rows that have
    both; nan where one does not vary.
    """
    centered = [column - group_means(column, group_R, num_groups)[group_R] for column in (first_R, second_R)]
    both_R = np.isfinite(centered[0]) & np.isfinite(centered[1]) & chosen_R
    first, second = (column[both_R] for column in centered)
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum() / scale) if scale > 1e-12 else float("nan")


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the places 0 to count - 1, the first and the last among them, in order."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist() if count else []


def matched(
    features_NF: np.ndarray, values_N: np.ndarray, learnt_N: np.ndarray, group_N: np.ndarray
) -> tuple[np.ndarray, float]:
    """The mean value, [N], of the rows `learnt_N` that are most like each row, and how well this
    predicts the values of `learnt_N` themselves, an R2.

    Two rows are alike when they differ in every feature by at most CALIPER of its spread, and are
    of different groups. nan where a row has fewer than ALIKE_MIN of them: nothing is extrapolated.
    """
    expected_N, learnt = np.full(len(values_N), np.nan), np.flatnonzero(learnt_N)
    if not len(learnt) or not features_NF.shape[1]:
        return expected_N, 0.0
    spread = features_NF[learnt].std(0)
    units_NF = features_NF / (CALIPER * np.where(spread > 0, spread, 1.0))
    tree = KDTree(units_NF[learnt], balanced_tree=False)
    near_NK, found_NK = tree.query(units_NF, k=min(ALIKE_MAX, len(learnt)), p=np.inf, distance_upper_bound=1.0)
    for row, (far_K, found_K) in enumerate(zip(np.atleast_2d(near_NK), np.atleast_2d(found_NK), strict=True)):
        alike = learnt[found_K[np.isfinite(far_K)]]
        alike = alike[group_N[alike] != group_N[row]]
        if len(alike) >= ALIKE_MIN:
            expected_N[row] = values_N[alike].mean()
    tried = learnt[np.isfinite(expected_N[learnt])]
    total = float(((values_N[tried] - values_N[tried].mean()) ** 2).sum()) if len(tried) else 0.0
    left = float(((values_N[tried] - expected_N[tried]) ** 2).sum())
    return expected_N, 1 - left / total if total > 0 else 0.0
