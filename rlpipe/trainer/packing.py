"""Packs sequences into texts, texts into rows, and rows into microbatches. Pure and deterministic.

A text is one sequence, or several of a group that share their prompt: each continues it, and sees
none of the others. All ranks have the same number of microbatches in a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from rlpipe.base.errors import UserError

# for L x L masks, where attention is a model's own: the length of a row at which attention, which
# is quadratic, costs as much as all else; measured on a CPU, between models of 0.8M and of 135M
# parameters
ATTENTION_TOKENS = 512
# of a text with a shared prompt, so that its mask stays small beside the activations of each layer
SHARED_TOKENS_MAX = 2048
ROW_LENGTHS = (1, 2, 4)  # lengths of a row to try, as multiples of the longest text
# lengths of a text with a shared prompt to try, as multiples of the longest sequence
TEXT_LENGTHS = (1, 2, 4, 8)
BRANCHES = 2048  # a text has fewer sequences

Row = list[int]  # indices of the texts in it
# the microbatches of one rank in one step. Example: [[[0, 5], [2]],
# [[7]]]: two, the first of two rows
RankPlan = list[list[Row]]


class Rows(IntEnum):
    """The ways to put sequences into rows. A model that allows one also allows those before it."""

    # one sequence per row; for models whose layers carry a state along a row, which would reach the
    # next sequence
    SINGLE = 0
    PACKED = 1  # several sequences per row
    SHARED = 2  # also a prompt once for several of its completions


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """The tokens of a sequence, with a mask of those that are trained.

    All ranks plan with its prompt and its counts. The long arrays may be memory-mapped: a rank
    reads them only when it uses `tokens`, `scored` or `rollout_logprobs`.
    """

    # the first tokens, none of them scored, which other sequences of the group share
    prompt: np.ndarray
    completion: np.ndarray  # the tokens after the prompt
    # of the completion; never 1 at the first token of the sequence, which nothing predicts
    loss_mask: np.ndarray
    logprobs: np.ndarray  # of the completion, recorded while sampling; empty for SFT
    num_scored: int
    row: int = 0  # its row in the batch

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.completion])

    @property
    def scored(self) -> np.ndarray:
        """The positions of the trained tokens, ascending."""
        return np.flatnonzero(self.loss_mask) + len(self.prompt)

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """The `rollout_logprobs` of the scored tokens; empty for SFT."""
        return self.logprobs[np.flatnonzero(self.loss_mask)] if len(self.logprobs) else self.logprobs


def sequence_of(tokens: np.ndarray, scored: np.ndarray, num_shared: int = 0) -> TrainSequence:
    """A sequence of given tokens, without logprobs. Example: sequence_of([5, 9, 2], scored=[1,
    2]).
    """
    loss_mask = np.zeros(len(tokens), dtype=np.int8)
    loss_mask[scored] = 1
    return TrainSequence(
        tokens[:num_shared], tokens[num_shared:], loss_mask[num_shared:], np.zeros(0, np.float32), len(scored)
    )


Text = list[TrainSequence]  # several sequences have equal prompts


def text_tokens(text: Text) -> int:
    """The number of tokens of a text; a shared prompt counts once."""
    return sum(sequence.num_tokens for sequence in text) - (len(text) - 1) * len(text[0].prompt)


def text_pairs(text: Text) -> int:
    """The number of pairs of a text's tokens, as if each token saw its whole sequence; pairs within
    a shared prompt count once.

    Causal attention computes half of them.
    """
    return sum(sequence.num_tokens**2 for sequence in text) - (len(text) - 1) * len(text[0].prompt) ** 2


def share_prompts(sequences: list[TrainSequence], tokens_max: int) -> list[Text]:
    """Joins neighbours with the same prompt into texts of at most `tokens_max` tokens; a sequence
    without a prompt is a text of its own.
    """
    texts: list[Text] = []
    prompt, room = np.zeros(0), 0
    for sequence in sequences:
        own, added = sequence.prompt, len(sequence.completion)
        if len(own) and added <= room and len(texts[-1]) < BRANCHES - 1 and np.array_equal(own, prompt):
            texts[-1].append(sequence)
        else:
            texts.append([sequence])
            prompt, room = own, tokens_max - len(own)
        room -= added
    return texts


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assigns texts to ranks: longest first, each to the rank with the fewest tokens so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = tokens.index(min(tokens))
        hands[rank].append(index)
        tokens[rank] += lengths[index]
    assert sum(map(len, hands)) == len(lengths), "a sequence was lost"
    return hands


def pack_rows(indices: Sequence[int], lengths: Sequence[int], row_tokens: int) -> list[Row]:
    """Packs texts into rows by best-fit decreasing: `indices` are longest first, each goes to the
    row with the least free room that is enough.
    """
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in indices:
        assert 0 < lengths[index] <= row_tokens, f"sequence {index} has {lengths[index]} tokens, a row {row_tokens}"
        fits = bisect.bisect_left(room, (lengths[index], -1))
        free, row = room.pop(fits) if fits < len(room) else (row_tokens, len(rows))
        rows[row:] = rows[row:] or [[]]
        rows[row].append(index)
        bisect.insort(room, (free - lengths[index], row))
    return rows


def plan_texts(
    sequences: list[TrainSequence],
    ranks: int,
    tokens_max: int,
    rows: Rows = Rows.PACKED,
    context_ranks: int = 1,
    attention_tokens: float | None = None,
) -> tuple[list[Text], list[RankPlan]]:
    """Returns the texts of a step and each rank's plan, with the number of sequences per shared
    prompt that costs least.

    A prompt that more sequences share is computed fewer times, but its row is longer. With an L x L
    mask, attention costs the full square of the row, masked pairs included. Without one
    (`attention_tokens`: the length of a text at which attention costs as much as all else) only
    visible pairs cost: then rows and texts may be as long as a microbatch, but texts that are too
    long spread the work unevenly over ranks.
    """
    longest = max((sequence.num_tokens for sequence in sequences), default=0)
    longest_row = tokens_max * context_ranks
    shared_max = min(SHARED_TOKENS_MAX, longest_row) if attention_tokens is None else longest_row
    limits: set[int] = set()
    if rows is Rows.SHARED:
        limits = {min(times * longest, shared_max) for times in TEXT_LENGTHS} | (
            {longest_row} if attention_tokens else set()
        )
    tried: list[tuple[float, list[Text], list[RankPlan]]] = []
    for text_tokens_max in (0, *sorted(limits)):
        texts = share_prompts(sequences, text_tokens_max)
        lengths = list(map(text_tokens, texts))
        attention = [text_pairs(text) / attention_tokens for text in texts] if attention_tokens else None
        plans = plan_step(lengths, ranks, tokens_max, rows, context_ranks, attention)
        tried.append((cost(plans, lengths, attention), texts, plans))
    _, texts, plans = min(tried, key=lambda plan: plan[0])
    return texts, plans


def plan_step(
    lengths: Sequence[int],
    ranks: int,
    tokens_max: int,
    rows: Rows = Rows.PACKED,
    context_ranks: int = 1,
    attention: Sequence[float] | None = None,
) -> list[RankPlan]:
    """Returns the plan of every rank: rows of the length that costs least, in microbatches of
    similar rows with at most `tokens_max` tokens per rank. `attention`: see `cost`.

    UserError when a sequence does not fit.

    Each context-parallel group of `context_ranks` neighbouring ranks shares its rows and has one
    plan. A rank with less work gets microbatches without rows, so that all ranks run the same
    number.
    """
    longest = max(lengths, default=1)
    if longest > tokens_max * context_ranks:
        shared = f" and trainer.context_ranks={context_ranks} ranks split a row" if context_ranks > 1 else ""
        raise UserError(
            f"a sequence has {longest} tokens, trainer.tokens_max={tokens_max}{shared}; set trainer.tokens_max to"
            f" {-(-longest // context_ranks)}, or raise trainer.context_ranks, so that more ranks split a row"
        )
    tokens_max, ranks = tokens_max * context_ranks, ranks // context_ranks
    hands, tried = deal(lengths, ranks), {}
    row_lengths = {min(times * longest, tokens_max) for times in ROW_LENGTHS} | (
        set() if attention is None else {tokens_max}
    )
    for row_tokens in sorted(row_lengths):
        filled = [
            [[index] for index in hand] if rows is Rows.SINGLE else pack_rows(hand, lengths, row_tokens)
            for hand in hands
        ]
        plans = [microbatches(hand_rows, lengths, tokens_max) for hand_rows in filled]
        tried[cost(plans, lengths, attention), row_tokens] = plans
    _, plans = min(tried.items())
    count = max(map(len, plans))
    plans = [plan + [[]] * (count - len(plan)) for plan in plans]
    plans = [plan for plan in plans for _ in range(context_ranks)]
    placed = sorted(index for plan in plans[::context_ranks] for rows in plan for row in rows for index in row)
    assert placed == list(range(len(lengths))), "a sequence was lost or placed twice"
    return plans


def cost(plans: list[RankPlan], lengths: Sequence[int], attention: Sequence[float] | None = None) -> float:
    """The cost of a step on the rank with the most work, in tokens of short rows.

    `attention`: the cost of each text's attention, independent of its row; None: every token costs
    as if it saw its whole row.
    """

    def of(plan: RankPlan) -> float:
        if attention is None:
            return sum(num_slots * (1 + length / ATTENTION_TOKENS) for num_slots, length in shapes([plan], lengths))
        seen = sum(attention[index] for rows in plan for row in rows for index in row)
        return sum(num_slots for num_slots, _ in shapes([plan], lengths)) + seen

    return max(map(of, plans))


def microbatches(rows: list[Row], lengths: Sequence[int], tokens_max: int) -> RankPlan:
    """Groups the rows, fullest first, into microbatches of at most `tokens_max` tokens, so that
    little padding is needed.
    """
    plan: RankPlan = []
    room = 0
    for row in sorted(rows, key=lambda row: -sum(lengths[index] for index in row)):
        if not room:
            plan.append([])
            room = tokens_max // sum(lengths[index] for index in row)
        plan[-1].append(row)
        room -= 1
    return plan


def fullest(rows: Sequence[Sequence[int]]) -> int:
    """L, the number of tokens of the fullest row, given the lengths of each row's sequences; 1
    without a row.
    """
    return max(map(sum, rows), default=1)


def shapes(plans: list[RankPlan], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (token slots including padding, L) of every microbatch."""
    filled = [[[lengths[index] for index in row] for row in rows] for plan in plans for rows in plan]
    return [(max(len(rows), 1) * fullest(rows), fullest(rows)) for rows in filled]
