"""Packing: every sequence exactly once, nothing overlaps, the
budget holds, whatever the lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.models.masks import own_branch
from rlpipe.trainer.batches import collate, conversations_of_step
from rlpipe.trainer.packing import (
    BRANCHES,
    Rows,
    TrainSequence,
    cost,
    deal,
    fullest,
    plan_step,
    plan_texts,
    sequence_of,
    shapes,
    text_pairs,
    text_tokens,
)

lengths_of = st.lists(st.integers(1, 200), max_size=60)


@given(lengths=lengths_of, ranks=st.integers(1, 4), tokens_max=st.integers(200, 1000))
def test_every_sequence_once_within_the_budget(lengths: list[int], ranks: int, tokens_max: int) -> None:
    plans = plan_step(lengths, ranks, tokens_max)
    placed = [index for plan in plans for rows in plan for row in rows for index in row]
    assert sorted(placed) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1, "all ranks run the same number of microbatches"
    for rows in (rows for plan in plans for rows in plan):
        assert len(rows) * fullest([[lengths[index] for index in row] for row in rows]) <= tokens_max
    assert sum(num_slots for num_slots, _ in shapes(plans, lengths)) >= sum(lengths)
    assert plans == plan_step(lengths, ranks, tokens_max)


@given(lengths=lengths_of, ranks=st.integers(1, 4))
def test_ranks_get_about_the_same_number_of_tokens(lengths: list[int], ranks: int) -> None:
    tokens = [sum(lengths[index] for index in hand) for hand in deal(lengths, ranks)]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=20), seed=st.integers(0, 1000))
def test_rows_hold_the_sequences_side_by_side(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        scored = 1 + np.flatnonzero(random.random(length - 1) < 0.5)
        made = sequence_of(random.integers(1, 99, length), scored)
        sequences.append(replace(made, logprobs=-random.random(length).astype(np.float32)))
    (plan,) = plan_step(lengths, 1, 256)
    scored_targets = []
    for rows in plan:
        packed = collate([[sequence] for sequence in sequences], rows)
        assert packed.branch_RL is None
        # what transformers takes for the first token of a sequence
        starts = np.diff(packed.positions_RL.numpy(), prepend=-1) != 1
        for row_index, row in enumerate(rows):
            start = 0
            for index in row:
                end = start + lengths[index]
                np.testing.assert_array_equal(packed.tokens_RL[row_index, start:end], sequences[index].tokens)
                np.testing.assert_array_equal(packed.positions_RL[row_index, start:end], np.arange(lengths[index]))
                assert starts[row_index, start + 1 : end].sum() == 0 and (start == 0 or starts[row_index, start])
                start = end
            alone = all(len(row) == 1 for row in rows)
            assert alone or starts[row_index, start:].all(), "padding belongs to no sequence"
            assert not alone or packed.positions_RL[row_index].tolist() == list(range(packed.tokens_RL.shape[1]))
        order = [index for row in rows for index in row]
        spread = packed.spread(packed.target_N).numpy()
        for b, index in enumerate(order):
            count = len(sequences[index].scored)
            np.testing.assert_array_equal(spread[b, :count], sequences[index].tokens[sequences[index].scored])
            np.testing.assert_array_equal(packed.mask_BT[b].numpy(), np.arange(packed.mask_BT.shape[1]) < count)
            np.testing.assert_allclose(
                packed.rollout_logprobs_BT[b, :count], sequences[index].rollout_logprobs, rtol=1e-6
            )
        flat = packed.tokens_RL.flatten()
        np.testing.assert_array_equal(flat[packed.source_N + 1], packed.target_N)
        scored_targets += packed.target_N.tolist()
    assert len(scored_targets) == sum(len(sequence.scored) for sequence in sequences)


@st.composite
def steps_of_groups(draw: st.DrawFn) -> list[TrainSequence]:
    """Sequences of some groups, each with a prompt of its own; of some
    completions no token is scored."""
    random, sequences = np.random.default_rng(draw(st.integers(0, 1000))), list[TrainSequence]()
    for group in range(draw(st.integers(1, 6))):
        prompt = np.append(random.integers(1, 99, draw(st.integers(0, 20))), 1000 + group)
        for length in draw(st.lists(st.integers(1, 30), min_size=1, max_size=9)):
            scored = len(prompt) + np.flatnonzero(random.random(length) < 0.7)
            tokens = np.concatenate([prompt, random.integers(1, 99, length)])
            sequences.append(sequence_of(tokens, scored, num_shared=len(prompt)))
    return sequences


@given(
    sequences=steps_of_groups(),
    ranks=st.integers(1, 3),
    tokens_max=st.integers(60, 600),
    padding=st.integers(0, 3),
    attention_tokens=st.sampled_from([None, 40.0, 8000.0]),
)
def test_where_prompts_are_shared_each_token_is_predicted_from_what_stands_before_it_in_its_own_sequence(
    sequences: list[TrainSequence], ranks: int, tokens_max: int, padding: int, attention_tokens: float | None
) -> None:
    texts, plans = plan_texts(sequences, ranks, tokens_max, Rows.SHARED, 1, attention_tokens)
    assert [id(sequence) for text in texts for sequence in text] == [id(sequence) for sequence in sequences]
    alone, apart = plan_texts(sequences, ranks, tokens_max, Rows.PACKED, 1, attention_tokens)
    costs = [
        cost(
            plan,
            [*map(text_tokens, placed)],
            [text_pairs(text) / attention_tokens for text in placed] if attention_tokens else None,
        )
        for placed, plan in ((texts, plans), (alone, apart))
    ]
    assert costs[0] <= costs[1]
    for rows in (rows for plan in plans for rows in plan if rows):
        microbatch = collate(texts, rows, padding)
        assert microbatch.tokens_RL.numel() <= tokens_max + padding * len(rows)
        width = microbatch.tokens_RL.shape[1]
        branch_RL = torch.zeros_like(microbatch.tokens_RL) if microbatch.branch_RL is None else microbatch.branch_RL
        sees = own_branch(branch_RL, BRANCHES) & (
            microbatch.positions_RL[:, None, :] <= microbatch.positions_RL[:, :, None]
        )
        chosen = [
            (sequence, place) for row in rows for index in row for sequence in texts[index] for place in sequence.scored
        ]
        assert len(chosen) == len(microbatch.source_N)
        for (sequence, place), source, target in zip(
            chosen, microbatch.source_N.tolist(), microbatch.target_N.tolist(), strict=True
        ):
            row, query = divmod(source, width)
            if microbatch.branch_RL is None:  # the model's own mask: back to where positions begin
                start = query - int(microbatch.positions_RL[row, query])
                seen = microbatch.tokens_RL[row, start : query + 1].tolist()
            else:
                seen = microbatch.tokens_RL[row][sees[row, query]].tolist()
            assert seen == sequence.tokens[:place].tolist() and target == sequence.tokens[place]


def test_a_prompt_is_shared_by_as_many_as_pay() -> None:
    def group(prompt: int, completion: int, size: int) -> list[TrainSequence]:
        tokens = np.arange(prompt + completion)
        scored = np.arange(prompt, prompt + completion)
        return [sequence_of(tokens, scored, num_shared=prompt) for _ in range(size)]

    def largest(sequences: list[TrainSequence], rows: Rows = Rows.SHARED) -> int:
        return max(map(len, plan_texts(sequences, 1, 8192, rows)[0]))

    assert largest(group(400, 10, 16)) == 16
    assert largest(group(17, 16, 8)) == 8
    assert largest(group(17, 1000, 8)) == 1, "attention over a long row costs more than a short prompt"
    assert largest(group(400, 10, 16), Rows.PACKED) == 1
    assert max(map(len, plan_texts(group(400, 10, 64), 1, 512, Rows.SHARED)[0])) == 11, "as many as a microbatch holds"
    assert largest([*group(400, 10, 16), *group(300, 1500, 1)]) == 16, "a long one beside keeps none from it"
    assert largest([sequence_of(sequence.tokens, sequence.scored) for sequence in group(400, 10, 16)]) == 1


# groups, completions of each, tokens of a prompt, fewest and most tokens of a completion; slots
# with masks of L x L, slots with flex_attention
SHAPES = [
    (16, 8, 6000, 500, 500, 832_000, 160_000),
    (64, 16, 200, 50, 600, 500_595, 353_966),
    (16, 8, 512, 1000, 7000, 587_797, 542_269),
]


@pytest.mark.parametrize(("groups", "size", "prompt", "fewest", "most", "dense", "flex"), SHAPES)
def test_with_flex_attention_a_prompt_is_computed_once(
    groups: int, size: int, prompt: int, fewest: int, most: int, dense: int, flex: int
) -> None:
    """What no token sees costs nothing there, so rows and texts are as long as a
    microbatch, and nothing is padding."""
    random, sequences = np.random.default_rng(0), list[TrainSequence]()
    for group in range(groups):
        for length in random.integers(fewest, most + 1, size):
            tokens = np.full(prompt + length, group)
            scored = np.arange(prompt, len(tokens))
            sequences.append(sequence_of(tokens, scored, num_shared=prompt))
    found = []
    for attention_tokens in (None, 24641.0):  # of a model of 4B parameters
        texts, plans = plan_texts(sequences, 1, 16384, Rows.SHARED, 1, attention_tokens)
        lengths = [*map(text_tokens, texts)]
        found.append(sum(num_slots for num_slots, _ in shapes(plans, lengths)))
    assert found == [dense, flex]
    assert found[1] == sum(lengths), "padding"


def test_a_text_has_no_more_sequences_than_branches_have_numbers() -> None:
    tokens = np.arange(4)
    group = [sequence_of(tokens, np.array([3]), num_shared=3) for _ in range(5000)]
    texts, plans = plan_texts(group, 1, 16384, Rows.SHARED, 1, 1000.0)
    assert len(texts[0]) == BRANCHES - 1
    for rows in plans[0]:
        branch_RL = collate(texts, rows).branch_RL
        assert branch_RL is not None
        for row, own_L in zip(rows, branch_RL, strict=True):
            kept = own_L[own_L > 0]
            assert len(torch.unique(kept)) == sum(len(texts[index]) + 1 for index in row), "two sequences of one number"


def test_a_microbatch_without_sequences_scores_one_position_outside_the_mask() -> None:
    empty = collate([], [])
    assert empty.tokens_RL.shape == (1, 1) and empty.source_N.tolist() == [0] and not empty.mask_BT.any()


def test_where_layers_carry_a_state_every_sequence_has_a_row() -> None:
    (plan,) = plan_step([5, 30, 7], 1, 256, Rows.SINGLE)
    assert plan == [[[1], [2], [0]]]
    (plan,) = plan_step([5, 30, 7], 1, 60, Rows.SINGLE)
    assert plan == [[[1], [2]], [[0]]]


@given(lengths=st.lists(st.integers(1, 200), min_size=100, max_size=200))
def test_one_a_row_a_microbatch_holds_what_is_alike(lengths: list[int]) -> None:
    """So that little is padding where sequences are not packed."""
    (plan,) = plan_step(lengths, 1, 1000, Rows.SINGLE)
    assert [index for rows in plan for (index,) in rows] == sorted(
        range(len(lengths)), key=lambda index: (-lengths[index], index)
    )
    padding = sum(num_slots for num_slots, _ in shapes([plan], lengths)) - sum(lengths)
    assert padding <= max(len(rows) for rows in plan) * max(lengths)


@pytest.mark.parametrize(
    ("lengths", "row_tokens"),
    [([33] * 64, 33), ([60, 20, 20, 20] * 16, 60), ([100, *[4] * 50], 100), ([30, *[21] * 40], 60)],
)
def test_rows_are_of_the_length_that_costs_least(lengths: list[int], row_tokens: int) -> None:
    """As short as fills them: attention grows with the square."""
    (plan,) = plan_step(lengths, 1, 4096)
    assert max(fullest([[lengths[index] for index in row] for row in rows]) for rows in plan) <= row_tokens
    assert sum(num_slots for num_slots, _ in shapes([plan], lengths)) <= 1.5 * sum(lengths)


def test_a_sequence_that_does_not_fit_is_named() -> None:
    assert plan_step([], 2, 64) == [[], []]
    with pytest.raises(
        UserError, match=r"a sequence has 301 tokens, trainer\.tokens_max=300; set trainer\.tokens_max to 301"
    ):
        plan_step([301], 1, 300)
    with pytest.raises(
        UserError,
        match=r"601 tokens, .*=300 and trainer\.context_ranks=2 ranks split a row; set trainer\.tokens_max to 301",
    ):
        plan_step([601], 4, 300, context_ranks=2)


def test_ranks_that_share_rows_have_one_plan() -> None:
    lengths = [150, 90, 80, 40, 7]
    plans = plan_step(lengths, 4, 100, context_ranks=2)
    assert plans[0] == plans[1] and plans[2] == plans[3]
    assert plans[::2] == plan_step(lengths, 2, 200)


@given(count=st.integers(1, 30), batch_size=st.integers(1, 40), seed=st.integers(0, 9))
def test_conversations_are_an_endless_sequence_of_permutations(count: int, batch_size: int, seed: int) -> None:
    steps = 1 + 3 * count // batch_size
    drawn = [index for step in range(steps) for index in conversations_of_step(count, step, batch_size, seed)]
    for epoch in range(len(drawn) // count):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert drawn[-batch_size:] == conversations_of_step(count, steps - 1, batch_size, seed), (
        "a step is a function of its index"
    )
