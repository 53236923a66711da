"""Sequences to texts, texts to rows, rows to microbatches: pure and deterministic.

A text is one sequence, or several of a group with their prompt once: each goes on from it, and sees
none of the others. All ranks of a step share the number of microbatches.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from rlpipe.base.errors import UserError

# With masks of L x L, which a CPU takes. At this length of a row its attention, which grows with
# the square, costs as much as all else: between a model of 0.8M and one of 135M on a CPU
ATTENTION_TOKENS = 512
# of a text that shares a prompt: its mask in each layer is to stay small beside the activations
SHARED_TOKENS_MAX = 2048
ROW_LENGTHS = (1, 2, 4)  # that are tried, in lengths of the longest text
# that are tried for texts that share a prompt, in lengths of the longest sequence
TEXT_LENGTHS = (1, 2, 4, 8)
BRANCHES = 2048  # more than one text has sequences

Row = list[int]  # indices of texts, side by side
# the microbatches of one rank in one step. Example: [[[0, 5], [2]],
# [[7]]]: two, the first of two rows
RankPlan = list[list[Row]]


class Rows(IntEnum):
    """The ways to put sequences into rows; one that is allowed allows those before it."""

    # for models whose layers carry a state along a row: what stands behind a sequence would see it
    SINGLE = 0
    PACKED = 1  # side by side
    SHARED = 2  # and a prompt once for several of its completions


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """Tokens, and which of them are trained.

    All ranks plan with its prompt and its counts; what is long may be pages of a file, which a rank
    has in memory once it asks for `tokens`, `scored` or `rollout_logprobs`.
    """

    # tokens at its beginning, none of them scored, that others of its group have too
    prompt: np.ndarray
    completion: np.ndarray  # the tokens behind it
    # of the completion; never 1 at the first token of all, which is predicted by nothing
    loss_mask: np.ndarray
    logprobs: np.ndarray  # of the completion, recorded while sampling; empty for SFT
    num_scored: int
    row: int = 0  # of the batch

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.completion])

    @property
    def scored(self) -> np.ndarray:
        """Positions of trained tokens, rising."""
        return np.flatnonzero(self.loss_mask) + len(self.prompt)

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """The `rollout_logprobs` of the scored tokens; empty for SFT."""
        return self.logprobs[np.flatnonzero(self.loss_mask)] if len(self.logprobs) else self.logprobs


def sequence_of(tokens: np.ndarray, scored: np.ndarray, num_shared: int = 0) -> TrainSequence:
    """A made sequence, without logprobs. Example: sequence_of([5, 9, 2], scored=[1, 2])."""
    loss_mask = np.zeros(len(tokens), dtype=np.int8)
    loss_mask[scored] = 1
    return TrainSequence(
        tokens[:num_shared], tokens[num_shared:], loss_mask[num_shared:], np.zeros(0, np.float32), len(scored)
    )


Text = list[TrainSequence]  # of several the prompts are equal


def text_tokens(text: Text) -> int:
    """Tokens of a text: the prompt once."""
    return sum(sequence.num_tokens for sequence in text) - (len(text) - 1) * len(text[0].prompt)


def text_pairs(text: Text) -> int:
    """Pairs of a text's tokens, as if each saw all of its sequence; those of a shared prompt once.

    The causal half of them is what is seen.
    """
    return sum(sequence.num_tokens**2 for sequence in text) - (len(text) - 1) * len(text[0].prompt) ** 2


def share_prompts(sequences: list[TrainSequence], tokens_max: int) -> list[Text]:
    """Neighbours with the same prompt as one text, as many as are `tokens_max` together; what has
    no prompt stays alone.
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
    """The texts of each rank: longest first, each to the rank with the fewest tokens so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = tokens.index(min(tokens))
        hands[rank].append(index)
        tokens[rank] += lengths[index]
    assert sum(map(len, hands)) == len(lengths), "a sequence was lost"
    return hands


def pack_rows(indices: Sequence[int], lengths: Sequence[int], row_tokens: int) -> list[Row]:
    """Best-fit decreasing: `indices` come longest first, each goes to the row with the least room
    that is enough.
    """
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), rising
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
    flex_tokens: float | None = None,
) -> tuple[list[Text], list[RankPlan]]:
    """The texts of a step and their plan: a prompt is shared by as many as costs least.

    Shared by many it is computed once, but their row is long. With a mask of L x L attention within
    it, though masked, costs as much as if all saw all. With flex_attention (`flex_tokens`: at this
    length of a text its attention costs as much as all else) only what is seen costs: then rows and
    texts are as long as a microbatch, and what is shared by too many keeps ranks from having the
    same to do.
    """
    longest = max((sequence.num_tokens for sequence in sequences), default=0)
    longest_row = tokens_max * context_ranks
    shared_max = min(SHARED_TOKENS_MAX, longest_row) if flex_tokens is None else longest_row
    limits: set[int] = set()
    if rows is Rows.SHARED:
        limits = {min(times * longest, shared_max) for times in TEXT_LENGTHS} | (
            {longest_row} if flex_tokens else set()
        )
    tried: list[tuple[float, list[Text], list[RankPlan]]] = []
    for text_tokens_max in (0, *sorted(limits)):
        texts = share_prompts(sequences, text_tokens_max)
        lengths = list(map(text_tokens, texts))
        attention = [text_pairs(text) / flex_tokens for text in texts] if flex_tokens else None
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
    """The plan of every rank: rows of the length that costs least, in microbatches of rows that are
    alike and at most `tokens_max` tokens a rank. `attention`: as `cost` has it.

    `context_ranks` neighbours share each row, and have one plan. A rank with less to do gets
    microbatches without rows, so that all run the same number. UserError when a sequence does not
    fit.
    """
    longest = max(lengths, default=1)
    if longest > tokens_max * context_ranks:
        shared = f" and trainer.context_ranks={context_ranks} ranks share a row" if context_ranks > 1 else ""
        raise UserError(
            f"a sequence has {longest} tokens, trainer.tokens_max={tokens_max}{shared}; set trainer.tokens_max to "
            f"{-(-longest // context_ranks)}, or let more ranks share a row (trainer.context_ranks)"
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
    """The cost of a step for the rank that has most to do, in tokens of short rows.

    `attention`: the cost of each text's attention, whatever row it is in; without it every token of
    a row costs as if it saw all of the row.
    """

    def of(plan: RankPlan) -> float:
        if attention is None:
            return sum(num_slots * (1 + length / ATTENTION_TOKENS) for num_slots, length in shapes([plan], lengths))
        seen = sum(attention[index] for rows in plan for row in rows for index in row)
        return sum(num_slots for num_slots, _ in shapes([plan], lengths)) + seen

    return max(map(of, plans))


def microbatches(rows: list[Row], lengths: Sequence[int], tokens_max: int) -> RankPlan:
    """The rows, fullest first, as many at a time as hold `tokens_max` tokens: padded to the fullest
    of its microbatch a row wastes little.
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
    """L: tokens of the fullest row, given the lengths of each row's sequences; 1 where there is
    only padding.
    """
    return max(map(sum, rows), default=1)


def shapes(plans: list[RankPlan], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(token slots that are computed, padding included; L) of every microbatch."""
    filled = [[[lengths[index] for index in row] for row in rows] for plan in plans for rows in plan]
    return [(max(len(rows), 1) * fullest(rows), fullest(rows)) for rows in filled]
