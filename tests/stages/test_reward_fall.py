"""When a reward has fallen: not by noise, not while it climbs, and once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.report.reward import fall
from rlpipe.stages.iteration import _curve


def falls(rewards: list[float]) -> list[int]:
    """The iterations at which a fall is seen."""
    return [
        last for last in range(len(rewards)) if fall([[at, reward] for at, reward in enumerate(rewards[: last + 1])])
    ]


def noisy(seed: int, num_iterations: int) -> np.ndarray:
    """A mean reward that wanders a little, with the noise of sampling."""
    random = np.random.default_rng(seed)
    return np.cumsum(random.normal(0, 0.002, num_iterations)) + random.normal(0, 0.02, num_iterations)


@pytest.mark.slow
def test_noise_alone_seldom_falls() -> None:
    assert sum(bool(falls(noisy(seed, 200).tolist())) for seed in range(200)) <= 8


@pytest.mark.parametrize("climb", [0.0, 0.01])
def test_a_fall_is_seen_at_its_second_iteration_and_once(climb: float) -> None:
    seen = []
    for seed in range(50):
        rewards = noisy(seed, 60) + climb * np.arange(60)
        rewards[40:] -= 0.3
        seen.append([at for at in falls(rewards.tolist()) if at >= 40])
    assert sum(at == [41] for at in seen) >= 45, seen


@pytest.mark.parametrize("at", range(60, 100))
def test_a_fall_is_told_once_also_where_a_record_thins_its_curve(at: int) -> None:
    curve: list[list[float]] = []
    told = []
    for iteration, reward in enumerate(noisy(5, 120) - 0.3 * (np.arange(120) >= at)):
        curve = _curve(curve, iteration, float(reward))
        told += [iteration] if fall(curve) else []
    assert told == [at + 1]


def test_one_bad_iteration_is_none_and_neither_are_the_first_ones() -> None:
    rewards = noisy(3, 40)
    rewards[30] -= 0.5
    assert falls(rewards.tolist()) == []
    assert falls([1.0, 1.0, 1.0, 0.0, 0.0]) == []


def test_what_never_moved_falls_by_anything() -> None:
    assert "0.25 and 0.25 in iterations 10 and 11, and was 1 in the 8 before" in fall(
        [[at, 1.0 if at < 10 else 0.25] for at in range(12)]
    )


@given(st.lists(st.floats(-1, 1), max_size=30), st.sampled_from([0.125, 0.5, 4.0, 1024.0]))
def test_the_unit_of_a_reward_does_not_matter(rewards: list[float], unit: float) -> None:
    assert falls(rewards) == falls([unit * reward for reward in rewards])


@given(st.lists(st.floats(-1, 1), max_size=30))
def test_what_only_climbs_never_falls(rewards: list[float]) -> None:
    assert not falls(sorted(rewards))
