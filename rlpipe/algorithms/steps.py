"""The groups that each step of an iteration trains on. They depend only on the indices of groups,
so they are known before anything is sampled.
"""

from __future__ import annotations

from itertools import pairwise


def step_ranges(num_groups: int, num_steps: int) -> list[range]:
    """Splits 0 .. num_groups - 1 into one contiguous range per step, of lengths as equal as
    possible, longer ones first.

    Fewer groups than steps give fewer steps. Example: step_ranges(5, 2) == [range(0, 3), range(3,
    5)].
    """
    assert num_groups >= 0 and num_steps > 0, f"{num_groups} groups in {num_steps} steps"
    count = min(num_steps, num_groups)
    size, longer = divmod(num_groups, max(count, 1))
    starts = [step * size + min(step, longer) for step in range(count + 1)]
    assert starts[-1] == num_groups or not count, f"steps end at {starts[-1]} of {num_groups} groups"
    return [range(*places) for places in pairwise(starts)]
