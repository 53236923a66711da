"""Reads the data of a job: Parquet to sequences, and rows of texts (rlpipe/trainer/packing.py) to
tensors.

Legend: R rows of a microbatch, L tokens of a row, N scored positions, B sequences of a microbatch,
T their scored tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlpipe.algorithms.divergence import TopTokens
from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef
from rlpipe.records.kinds import Float, Int32, Logprobs, Mask, Tokens
from rlpipe.records.kinds import Text as TextColumn
from rlpipe.records.rollout import (
    BRANCHES_FILE,
    TEACHER_FILE,
    TEACHER_TOP_FILE,
    Branch,
    Conversation,
    TeacherLogprobs,
    TeacherTop,
    with_branches,
)
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.mapped import map_records, map_records_if_any
from rlpipe.trainer.packing import BRANCHES, Row, Text, TrainSequence, fullest, text_tokens


@dataclass(frozen=True, eq=False)
class BatchRow:
    """The columns of `batch.parquet` that training reads, of one rollout."""

    prompt_tokens: Tokens
    completion_tokens: Tokens
    loss_mask: Mask
    rollout_logprobs: Logprobs
    reward: Float
    group_index: Int32
    rollout_index: Int32


@dataclass(frozen=True)
class BatchAdvantage:
    """The column of `batch.parquet` on which gdpo trains."""

    advantage: Float


@dataclass(frozen=True)
class BatchPrompt:
    """The column of `batch.parquet` that says which prompt, of which data set, a rollout has."""

    prompt_id: TextColumn


@dataclass(frozen=True)
class RlBatch:
    """The rollouts of an iteration: the values from which advantages are computed, and the
    sequences of each step.

    Branches that are trained are rows (B) of their own, directly after the row of their rollout.
    """

    rewards_B: np.ndarray  # the reward of its rollout
    group_index_B: np.ndarray
    rollout_B: np.ndarray  # the index of its rollout in the batch
    rollout_index_B: np.ndarray
    lengths_B: np.ndarray  # the number of scored tokens; masked tokens do not count
    steps: list[list[TrainSequence]]


@dataclass(frozen=True)
class Microbatch:
    """The inputs of one forward pass. `slot_N`: the place of each scored position in the B x T of
    the losses. `rows`: the rows of the batch that are its B sequences, in this order.

    A microbatch without sequences has one row of padding, and one scored position outside the mask:
    it runs the same collectives, with gradient 0.
    """

    tokens_RL: Tensor
    positions_RL: Tensor
    # only where a text has several sequences: BRANCHES x index of the text, plus 0 in the prompt
    # and 1, 2, ... in its completions
    branch_RL: Tensor | None
    source_N: Tensor
    target_N: Tensor
    slot_N: Tensor
    rows: tuple[int, ...]
    mask_BT: Tensor
    rollout_logprobs_BT: Tensor
    advantages_BT: Tensor | None = None
    proximal_logprobs_BT: Tensor | None = None
    reference_logprobs_BT: Tensor | None = None
    teacher_logprobs_BT: Tensor | None = None
    teacher_top: TopTokens | None = None  # of the N scored positions

    def spread(self, values_N: Tensor) -> Tensor:
        """Places the values of the scored positions into B x T, with 0 elsewhere."""
        flat = values_N.new_zeros(self.mask_BT.numel())
        return flat.index_put((self.slot_N,), values_N).view(self.mask_BT.shape)

    def place(self, values_B: list[np.ndarray]) -> Tensor:
        """Places the values of the scored tokens of all rows of the batch into B x T, fp32: those
        of its own rows.
        """
        own = [values_B[row] for row in self.rows] or [np.zeros(1)]  # padding has one position
        return self.spread(torch.from_numpy(np.concatenate(own)).float().to(self.slot_N.device))

    def with_teacher_top(self, top_B: list[TeacherTop]) -> Microbatch:
        """With the teacher's top tokens at its scored positions. `top_B`: of all rows of the
        batch.
        """
        top_k = next(len(row.tokens) // len(row.rest) for row in top_B if len(row.rest))
        own = [top_B[row] for row in self.rows]
        one = np.zeros(0 if own else 1)  # padding has one position

        def joined(values: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate([np.repeat(one, top_k), *values])).view(-1, top_k)

        rest_N = torch.from_numpy(np.concatenate([one, *(row.rest for row in own)])).float()
        is_whole = all(np.isneginf(row.rest).all() for row in top_B)
        top = TopTokens(
            joined([row.tokens for row in own]).long().to(self.slot_N.device),
            joined([row.logprobs for row in own]).float().to(self.slot_N.device),
            None if is_whole else rest_N.to(self.slot_N.device),
        )
        return replace(self, teacher_top=top)

    def scored(self, values_BT: Tensor) -> Tensor:
        """Returns the values of B x T at the scored positions, row after row; empty for a
        microbatch of padding.
        """
        return values_BT.flatten()[self.slot_N] if self.rows else values_BT.new_zeros(0)

    def to(self, device: torch.device) -> Microbatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def collate(texts: list[Text], rows: list[Row], padding: int = 0) -> Microbatch:
    """Builds the tensors of one microbatch: texts one after the other in rows, whose length is that
    of the fullest row plus `padding`.

    Positions restart with each text and with each token of padding; all completions of a prompt
    continue its positions. In rows of one sequence each, the positions of the padding continue
    those of the sequence: then the causal mask is enough.
    """
    row_tokens = fullest([[text_tokens(texts[index]) for index in row] for row in rows]) + padding
    shape = (max(len(rows), 1), row_tokens)
    tokens_RL, positions_RL, branch_RL = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    chosen = [sequence for row in rows for index in row for sequence in texts[index]]
    read = [(sequence.tokens, sequence.scored) for sequence in chosen]
    width, unread = max((sequence.num_scored for sequence in chosen), default=1), iter(read)
    source: list[np.ndarray] = []
    for row_index, row in enumerate(rows):
        start = 0
        if len(chosen) == len(rows) and not padding:
            positions_RL[row_index] = np.arange(row_tokens)
        for number, text in enumerate((texts[index] for index in row), start=1):
            first, shared = start, len(text[0].prompt)
            for branch in range(1, len(text) + 1):
                tokens, scored = next(unread)
                skipped = shared if branch > 1 else 0
                end = start + len(tokens) - skipped
                tokens_RL[row_index, start:end] = tokens[skipped:]
                positions_RL[row_index, start:end] = np.arange(skipped, len(tokens))
                branch_RL[row_index, start:end] = BRANCHES * number + branch
                before = scored - 1
                source.append(row_index * row_tokens + np.where(before < skipped, first, start - skipped) + before)
                start = end
            branch_RL[row_index, first : first + shared] = BRANCHES * number
        assert start <= row_tokens, f"a row holds {start} of {row_tokens} tokens"
    return Microbatch(
        *(torch.from_numpy(array) for array in (tokens_RL, positions_RL)),
        branch_RL=torch.from_numpy(branch_RL) if any(len(texts[index]) > 1 for row in rows for index in row) else None,
        source_N=_joined(source),
        target_N=_joined([tokens[scored] for tokens, scored in read]),
        slot_N=_joined([b * width + np.arange(len(scored)) for b, (_, scored) in enumerate(read)]),
        rows=tuple(sequence.row for sequence in chosen),
        mask_BT=_padded([np.ones(len(scored)) for _, scored in read], width) > 0,
        rollout_logprobs_BT=_padded([sequence.rollout_logprobs for sequence in chosen], width),
    )


def _joined(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts or [np.zeros(1)]).astype(np.int64))


def _padded(rows: list[np.ndarray], width: int) -> Tensor:
    padded = np.zeros((max(len(rows), 1), width), dtype=np.float32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


def read_rl_batch(store: Store, data: ArtifactRef, num_steps: int, folder: Path) -> RlBatch:
    """Reads the rollouts of a batch, in as many steps as it has groups for. `folder`: see
    `map_records`. StoreError naming the group of an invalid row.
    """
    rollouts = map_records(store, data, "batch.parquet", BatchRow, folder)
    rows, rollout_B = with_branches(rollouts, map_records_if_any(store, data, BRANCHES_FILE, Branch, folder))
    rewards = [rollouts[place].reward for place in rollout_B]
    sequences: list[TrainSequence] = []
    for row, reward in zip(rows, rewards, strict=True):
        same = len(row.completion_tokens) == len(row.loss_mask) == len(row.rollout_logprobs)
        if not (same and len(row.prompt_tokens) and np.isfinite(reward)):
            raise StoreError(
                f"{store.address(data.folder)}: row of group {row.group_index}: prompt, completion and masks do not"
                f" fit, or its reward {reward} is not finite"
            )
        parts, num_scored = (
            (row.prompt_tokens, row.completion_tokens, row.loss_mask),
            int(np.count_nonzero(row.loss_mask)),
        )
        sequences.append(TrainSequence(*parts, row.rollout_logprobs, num_scored, len(sequences)))
    group_index_B = np.array([row.group_index for row in rows], dtype=np.int64)
    empty_groups = read_manifest(store, data.folder, data.sha256).metrics.get("empty_groups")
    return RlBatch(
        rewards_B=np.array(rewards, dtype=np.float64),
        group_index_B=group_index_B,
        rollout_B=rollout_B,
        rollout_index_B=np.array([row.rollout_index for row in rows], dtype=np.int64),
        lengths_B=np.array([sequence.num_scored for sequence in sequences], dtype=np.int64),
        steps=[[sequences[row] for row in step] for step in rows_of_steps(group_index_B, empty_groups, num_steps)],
    )


def read_advantages(store: Store, data: ArtifactRef, rollouts: RlBatch, folder: Path) -> list[np.ndarray]:
    """Reads the advantages that the stage filter gave to the rollouts, for the scored tokens of
    each row. `folder`: see `map_records`.
    """
    stored = [row.advantage for row in map_records(store, data, "batch.parquet", BatchAdvantage, folder)]
    places = zip(rollouts.rollout_B, rollouts.lengths_B, strict=True)
    return [np.broadcast_to(np.float64(stored[rollout]), length) for rollout, length in places]


def read_sets(store: Store, data: ArtifactRef, rollouts: RlBatch, folder: Path) -> list[str]:
    """Reads the name of the data set of each row of a batch. `folder`: see `map_records`."""
    ids = [row.prompt_id for row in map_records(store, data, "batch.parquet", BatchPrompt, folder)]
    return [ids[rollout].rpartition("/")[0] for rollout in rollouts.rollout_B]


def read_teacher(store: Store, ref: ArtifactRef, rollouts: RlBatch, folder: Path) -> list[np.ndarray]:
    """Reads the teacher's logprobs of the scored tokens of each row of a batch. `folder`: see
    `map_records`. StoreError when they are of another batch.
    """
    rows = map_records(store, ref, TEACHER_FILE, TeacherLogprobs, folder)
    _check_taught(store, ref, rollouts, [(row.group_index, row.rollout_index, len(row.logprobs)) for row in rows])
    return [row.logprobs for row in rows]


def read_teacher_top(store: Store, ref: ArtifactRef, rollouts: RlBatch, folder: Path) -> list[TeacherTop]:
    """Reads the teacher's top tokens at the scored tokens of each row, as `read_teacher`; empty
    where it was not asked for them.
    """
    rows = list(map_records_if_any(store, ref, TEACHER_TOP_FILE, TeacherTop, folder))
    if rows:
        taught = [(row.group_index, row.rollout_index, len(row.rest)) for row in rows]
        _check_taught(store, ref, rollouts, taught)
    return rows


def _check_taught(store: Store, ref: ArtifactRef, rollouts: RlBatch, taught: list[tuple[int, int, int]]) -> None:
    if taught != [*zip(rollouts.group_index_B, rollouts.rollout_index_B, rollouts.lengths_B, strict=True)]:
        raise StoreError(f"{store.address(ref.folder)}: the teacher's logprobs are not those of the batch's tokens")


def rows_of_steps(group_index_B: np.ndarray, empty_groups: list[int] | None, num_steps: int) -> list[np.ndarray]:
    """The rows of each step: its groups are contiguous (`step_ranges`), and include those of which
    nothing can be trained.

    Such a group keeps its place, so that a step does not depend on the outcome of other groups. A
    batch of older code has no list of them (None): there step j has the groups j, j + num_steps,
    ..., so that training it again gives the same weights.
    """
    if empty_groups is None:
        group_B = np.cumsum(np.diff(group_index_B, prepend=group_index_B[:1]) != 0)
        return [
            np.flatnonzero(group_B % num_steps == step) for step in range(min(num_steps, group_B.max(initial=-1) + 1))
        ]
    assert not {*group_index_B.tolist()} & {*empty_groups}, "a group has rollouts, and none"
    groups = np.unique([*group_index_B.tolist(), *empty_groups])
    place_B = np.searchsorted(groups, group_index_B)
    steps = [
        np.flatnonzero((place_B >= places.start) & (place_B < places.stop))
        for places in step_ranges(len(groups), num_steps)
    ]
    assert sum(map(len, steps)) == len(group_index_B), "a row is in no step, or in two"
    return steps


def read_conversations(store: Store, data: ArtifactRef, name: str, folder: Path) -> list[TrainSequence]:
    """Reads the conversations of a file of an SFT data set, in order; empty where there is no such
    file.

    `folder`: see `map_records`. StoreError for an invalid conversation.
    """
    sequences, none = [], np.zeros(0, dtype=np.float32)
    for row in map_records_if_any(store, data, name, Conversation, folder):
        if not len(row.tokens) == len(row.loss_mask) > 0:
            raise StoreError(
                f"{store.address(data.folder)}: a conversation has {len(row.tokens)} tokens and a mask of"
                f" {len(row.loss_mask)}"
            )
        loss_mask = (
            row.loss_mask if not row.loss_mask[0] else np.concatenate([row.loss_mask[:1] * 0, row.loss_mask[1:]])
        )
        sequences.append(TrainSequence(row.tokens[:0], row.tokens, loss_mask, none, int(np.count_nonzero(loss_mask))))
    return sequences


def conversations_of_step(num_conversations: int, step: int, batch_size: int, seed: int) -> list[int]:
    """The indices of the conversations of a global step: a slice of an endless sequence of epochs.
    A pure function of its arguments.

    The first epoch is in the stored order, which the mixture's cursor has shuffled with exact
    shares in every batch (after another shuffle the number of hard examples per batch would vary,
    and with it the result of a short SFT). Later epochs are permuted.
    """
    assert num_conversations > 0 and step >= 0, f"{num_conversations} conversations, step {step}"
    places = [divmod(place, num_conversations) for place in range(step * batch_size, (step + 1) * batch_size)]
    orders = {epoch: _order(num_conversations, epoch, seed) for epoch in {epoch for epoch, _ in places}}
    return [int(orders[epoch][offset]) for epoch, offset in places]


def _order(count: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed + epoch)).permutation(count) if epoch else np.arange(count)


def step_ranges(num_groups: int, num_steps: int) -> list[range]:
    """Splits 0 .. num_groups - 1 into the groups of each step: contiguous ranges of lengths as
    equal as possible, longer ones first. They are known before anything is sampled.

    Fewer groups than steps give fewer steps. Example: step_ranges(5, 2) == [range(0, 3), range(3,
    5)].
    """
    assert num_groups >= 0 and num_steps > 0, f"{num_groups} groups in {num_steps} steps"
    count = min(num_steps, num_groups)
    size, longer = divmod(num_groups, max(count, 1))
    starts = [step * size + min(step, longer) for step in range(count + 1)]
    assert starts[-1] == num_groups or not count, f"steps end at {starts[-1]} of {num_groups} groups"
    return [range(*places) for places in pairwise(starts)]
