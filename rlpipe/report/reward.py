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
    """A text about the fall of the mean reward, at the point of the curve ([iteration, mean reward]
    each) where it is first seen; empty when it did not fall.

    Two adjacent points must lie below the mean of the earlier ones by more than chance explains:
    one bad iteration is not a fall. Chance is estimated from the differences between adjacent
    points, so a reward that climbs is not taken for noise.
    """
    # within one fall, a noisy curve crosses the bound several times
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
