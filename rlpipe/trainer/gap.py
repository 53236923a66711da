"""How far engine and trainer are apart at every scored token of an iteration. The steps have it at hand, so it costs no forward pass.

Legend: B sequences of a microbatch, T their scored tokens, N scored tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import TokenGaps
from rlpipe.trainer.batches import Microbatch, RlBatch
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.publishing import publish_bytes
from rlpipe.types import FileRecord


def of_whole_batch(gang: Gang, num_tokens: int, parts: Iterable[tuple[Microbatch, Tensor]]) -> Tensor:
    """Values_BT of every microbatch of every rank as [N], float32 on the host, on all ranks: each team of ranks fills in its own."""
    values_N = torch.zeros(num_tokens)
    for microbatch, values_BT in parts:
        scored_N = microbatch.mask_BT.flatten()[microbatch.slot_N]  # none in a microbatch of padding
        values_N[microbatch.place_N[scored_N].cpu()] = values_BT.flatten()[microbatch.slot_N][scored_N].cpu()
    return gang.join(gang.once(values_N))


class Gaps:
    """The gaps of this rank's microbatches, while a job takes its steps. They stay on the device until all are there: no step waits for them."""

    def __init__(self) -> None:
        self._parts: list[tuple[Microbatch, Tensor]] = []

    def add(self, microbatch: Microbatch, start_BT: Tensor, recorded_BT: Tensor) -> None:
        """The trainer's logprobs of a microbatch, by the weights that the iteration started from; `recorded`: where they and the engine's are known."""
        gap_BT = (start_BT - microbatch.rollout_logprobs_BT).masked_fill(~recorded_BT, torch.nan)
        self._parts.append((microbatch, gap_BT))

    def gathered(self, gang: Gang, rollouts: RlBatch) -> list[TokenGaps]:
        """A row for each rollout of the batch, in its order, on rank 0; none on the others. Branches beside them have none. A collective."""
        gap_N = of_whole_batch(gang, int(rollouts.lengths_B.sum()), self._parts).half().numpy()
        own_B = np.diff(rollouts.rollout_B, prepend=-1) > 0  # the first row of each rollout
        ends_B = np.cumsum(rollouts.lengths_B)
        rows = zip(rollouts.group_index_B, rollouts.rollout_index_B, rollouts.lengths_B, ends_B, own_B, strict=True)
        return [
            TokenGaps(int(group), int(index), gap_N[end - length : end])
            for group, index, length, end, own in rows
            if own and not gang.rank
        ]


def save_gaps(gang: Gang, taken: list[list[TokenGaps]], folder: str, attempt: str) -> list[FileRecord]:
    """Publishes the gaps of an iteration, which was trained in one job or more; the record on rank 0."""
    assert taken, "the gaps of an iteration that was loaded, not trained"
    records: list[FileRecord] = []
    with gang.together():
        if gang.rank == 0:
            table = to_table([row for rows in taken for row in rows], TokenGaps)
            records.append(publish_bytes(gang.published / folder / attempt, "gap.parquet", to_parquet(table)))
    return records
