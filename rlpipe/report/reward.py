"""The fall of a run's mean reward, found in the points of its curve."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

# points: the newest, those that they are compared with, those that tell the noise
NEW, BEFORE, NOISE = 2, 8, 24
# what chance explains, in standard deviations of a point beside the mean of those before
TIMES = 3.5


def fall(curve: Sequence[Sequence[float]]) -> str:
    """The fall, in words, at the point of the curve ([iteration, mean reward] each) where it is
    first seen; empty when nothing fell.

    Two points in a row have to lie below the mean of those before by more than chance explains: a
    single bad iteration is no fall. Chance is told by the differences from one point to the next,
    so a reward that climbs is not taken for noise.
    """
    # of the same fall a noisy curve is in and out
    is_known = any(_fallen(curve[:-back]) for back in range(1, BEFORE + 1))
    return "" if is_known else _fallen(curve)


def _fallen(curve: Sequence[Sequence[float]]) -> str:
    rewards = [reward for _, reward in curve]
    if len(rewards) < NEW + BEFORE:
        return ""
    new, earlier = rewards[-NEW:], rewards[-NEW - NOISE : -NEW]
    before = fmean(earlier[-BEFORE:])
    squares = [(after - reward) ** 2 for reward, after in pairwise(earlier)]
    chance = TIMES * (fmean(squares) / 2 * (1 + 1 / BEFORE)) ** 0.5
    if before - max(new) <= chance:
        return ""
    first, last = curve[-NEW][0], curve[-1][0]
    return (
        f"the mean reward is {new[0]:.3g} and {new[1]:.3g} in iterations {first:g} and {last:g}, and was {before:.3g}"
        f" in the {BEFORE} before (chance explains {chance:.2g})"
    )
