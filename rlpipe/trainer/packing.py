"""Packing: sequences of many lengths become a few rectangles of tokens. Pure and deterministic; needs no torch.

Legend: R rows of a microbatch, L tokens of a row. All ranks of a step share L and the number of microbatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rlpipe.types import UserError

# Attention of a row costs L²: on a CPU, many short rows are several times faster than one long row
ROW_TOKENS_MIN = 128
ROW_MULTIPLE = 8

Row = list[int]  # indices of sequences, side by side


@dataclass(frozen=True)
class Plan:
    """How one rank computes one step.

    Example: Plan(128, [[[0, 5], [2]], [[7]]]): rows of 128 tokens; two microbatches, the first of two rows.
    """

    row_tokens: int
    microbatches: list[list[Row]]


def row_length(lengths: Sequence[int], tokens_max: int) -> int:
    """L: the longest sequence, but at least ROW_TOKENS_MIN (or the budget), rounded up to ROW_MULTIPLE.

    UserError when a sequence does not fit `tokens_max`.
    """
    longest = max(lengths, default=1)
    if longest > tokens_max:
        raise UserError(
            f"a sequence has {longest} tokens, trainer.tokens_max={tokens_max}; set trainer.tokens_max to {longest}"
        )
    wanted = max(longest, min(ROW_TOKENS_MIN, tokens_max))
    return min(-(-wanted // ROW_MULTIPLE) * ROW_MULTIPLE, tokens_max)


def by_length(lengths: Sequence[int]) -> list[int]:
    """Indices, longest sequence first; equal lengths in their order."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """The sequences of each rank: longest first, each to the rank with the fewest tokens so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for index in by_length(lengths):
        tokens, rank = heap[0]
        hands[rank].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], rank))
    assert sum(map(len, hands)) == len(lengths), "a sequence was lost"
    return hands


def pack_rows(indices: Sequence[int], lengths: Sequence[int], row_tokens: int) -> list[Row]:
    """First-fit decreasing: `indices` come longest first, each goes to the first row that has room."""
    rows: list[Row] = []
    room: list[int] = []
    for index in indices:
        assert 0 < lengths[index] <= row_tokens, f"sequence {index} has {lengths[index]} tokens, a row {row_tokens}"
        fits = next((row for row, free in enumerate(room) if free >= lengths[index]), None)
        if fits is None:
            rows.append([])
            room.append(row_tokens)
            fits = len(rows) - 1
        rows[fits].append(index)
        room[fits] -= lengths[index]
    return rows


def plan_step(lengths: Sequence[int], ranks: int, tokens_max: int) -> list[Plan]:
    """The plan of every rank. A rank with less to do gets microbatches without rows, so that all run the same number."""
    row_tokens = row_length(lengths, tokens_max)
    rows_max = tokens_max // row_tokens
    per_rank = [pack_rows(hand, lengths, row_tokens) for hand in deal(lengths, ranks)]
    count = max(-(-len(rows) // rows_max) for rows in per_rank)
    plans = [Plan(row_tokens, [rows[i * rows_max : (i + 1) * rows_max] for i in range(count)]) for rows in per_rank]
    placed = sorted(index for plan in plans for rows in plan.microbatches for row in rows for index in row)
    assert placed == list(range(len(lengths))), "a sequence was lost or placed twice"
    return plans


def slots(plans: list[Plan]) -> int:
    """Token slots that are computed, padding included: what packing efficiency divides by."""
    return sum(max(len(rows), 1) * plan.row_tokens for plan in plans for rows in plan.microbatches)
