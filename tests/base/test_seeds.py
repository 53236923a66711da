"""The numbers that are in the bits of every run: literals that were computed before
these functions were one family."""

from __future__ import annotations

from rlpipe.base.seeds import data_seed, rollout_seed, uniform
from rlpipe.data.cursor import PromptCursor
from rlpipe.data.sources import split_point


def test_every_number_is_the_one_of_earlier_runs() -> None:
    talks = [[{"role": "system", "content": "s"}, {"role": "user", "content": text}] for text in ("sun", "é 数")]
    assert [split_point(talk, salt) for talk in talks for salt in ("", "validation/")] == [
        0.15413564561283977, 0.3743253143459526, 0.42419613841334325, 0.9329589681086432,
    ]  # fmt: skip
    assert split_point([{"role": "assistant", "content": "sun"}]) == 0.15413564561283977
    names = [(0, 1, 0, 5, "words/3", 0), (7, "evaluation", 2, "a/é", 1), (123, "turn", 2)]
    assert [rollout_seed(*parts) for parts in names] == [790148886, 285582578, 1837039093]
    assert uniform(0, "curriculum", 3, "words/1", 7) == 0.6463686449087653
    assert uniform(5, "curriculum", 0, "a/é", 0) == 0.6269888724012347
    assert [data_seed(0, "words"), data_seed(1, "words"), data_seed(0, "é")] == [87174355, 69684056, 234294843]


def test_the_order_of_rows_is_the_one_of_earlier_runs() -> None:
    cursor = PromptCursor([7, 3], [1.0, 2.5], seed=42)
    draws, position = cursor.take(cursor.start(), 16)
    assert draws == [
        (1, 2), (1, 0), (0, 3), (1, 1), (1, 2), (0, 0), (1, 1), (1, 0), (1, 0), (0, 2), (1, 2),
        (1, 1), (0, 5), (1, 2), (1, 1), (1, 0),
    ]  # fmt: skip
    assert position == {"drawn": 16, "sets": [{"epoch": 0, "offset": 4}, {"epoch": 4, "offset": 0}]}


def test_seeds_differ_in_every_part_and_are_the_same_tomorrow() -> None:
    parts = [(0, 1, 0, 5, "words/3", 0), (1, 1, 0, 5, "words/3", 0),
             (0, 2, 0, 5, "words/3", 0), (0, 1, 1, 5, "words/3", 0),
             (0, 1, 0, 5, "words/4", 0), (0, 1, 0, 5, "words/3", 1)]  # fmt: skip
    seeds = [rollout_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert rollout_seed(0, 1, 0, 5, "words/3", 0) == 790148886
    assert (
        abs(data_seed(0, "words") - data_seed(1, "words")) > 100_000
    )  # neighbouring seeds must not share a generator's items
