"""The cursor: nothing skipped, nothing repeated, shares exact, resumable anywhere."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlpipe.data.cursor import PromptCursor

SETS = st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 10)), min_size=1, max_size=4)


def make(sets: list[tuple[int, float]], seed: int = 0) -> PromptCursor:
    return PromptCursor([size for size, _ in sets], [weight for _, weight in sets], seed)


@given(SETS, st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))
def test_taking_twice_is_taking_once(sets: list[tuple[int, float]], first: int, second: int, seed: int) -> None:
    head, between = make(sets, seed).take(make(sets).start(), first)
    # another process: nothing but the JSON position crosses
    tail, after = make(sets, seed).take(json.loads(json.dumps(between)), second)
    whole, expected = make(sets, seed).take(make(sets).start(), first + second)
    assert (head + tail, after) == (whole, expected)
    assert after["drawn"] == first + second


@given(SETS, st.integers(1, 60))
def test_every_row_once_an_epoch(sets: list[tuple[int, float]], count: int) -> None:
    draws, position = make(sets).take(make(sets).start(), count)
    counts = Counter(draws)
    for set_index, (size, _) in enumerate(sets):
        at = position["sets"][set_index]
        drawn = [counts[set_index, row_index] for row_index in range(size)]
        assert sum(drawn) == at["epoch"] * size + at["offset"]
        assert set(drawn) <= {at["epoch"], at["epoch"] + 1}
        assert drawn.count(at["epoch"] + 1) == at["offset"] < size


@given(SETS, st.integers(1, 200))
def test_shares_are_never_a_whole_row_off(sets: list[tuple[int, float]], count: int) -> None:
    draws, _ = make(sets).take(make(sets).start(), count)
    total = sum(weight for _, weight in sets)
    drawn = Counter(set_index for set_index, _ in draws)
    for set_index, (_, weight) in enumerate(sets):
        assert abs(drawn[set_index] - count * weight / total) < 1 + 1e-9


def test_nine_to_one_is_exact_every_ten() -> None:
    cursor = PromptCursor([1000, 1000], [9, 1], seed=0)
    draws, _ = cursor.take(cursor.start(), 500)
    for start in range(0, 500, 10):
        assert Counter(set_index for set_index, _ in draws[start : start + 10]) == {0: 9, 1: 1}


def test_order_depends_on_seed_epoch_and_set() -> None:
    def rows(seed: int) -> list[list[int]]:
        cursor = PromptCursor([50, 50], [1, 1], seed)
        draws, _ = cursor.take(cursor.start(), 200)
        each = [[row for set_index, row in draws if set_index == wanted] for wanted in (0, 1)]
        return [each[0][:50], each[0][50:], each[1][:50]]

    first, second, other = rows(0)
    assert len({tuple(first), tuple(second), tuple(other), tuple(rows(1)[0]), tuple(range(50))}) == 5


def test_position_is_not_changed() -> None:
    cursor = PromptCursor([3], [1.0], seed=0)
    start = cursor.start()
    cursor.take(start, 2)
    assert start == {"drawn": 0, "sets": [{"epoch": 0, "offset": 0}]}
