"""The gap (trainer's logprob minus the engine's) at every scored token of an iteration. The steps
compute these logprobs anyway, so it costs no forward pass.

Legend: B sequences of a microbatch, or all rows of the batch (as `RlBatch`), T scored tokens of a
sequence, N of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rlpipe.base.references import FileRecord
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import TokenGaps
from rlpipe.trainer.batches import Microbatch, RlBatch
from rlpipe.trainer.publishing import publish_bytes
from rlpipe.trainer.ranks import Ranks


def of_whole_batch(ranks: Ranks, lengths_B: np.ndarray, parts: Iterable[tuple[Microbatch, Tensor]]) -> Tensor:
    """Joins values_BT of all microbatches of all ranks to [N], float32 on the host, on all ranks;
    each context-parallel group fills in its own part. A collective.
    """
    scored = ((microbatch, microbatch.scored(values_BT)[:, None]) for microbatch, values_BT in parts)
    return rows_of_batch(ranks, lengths_B, scored, 1)[:, 0]


def rows_of_batch(
    ranks: Ranks, lengths_B: np.ndarray, parts: Iterable[tuple[Microbatch, Tensor]], width: int
) -> Tensor:
    """Joins the values at the scored positions of all microbatches, of `width` numbers each, as
    `of_whole_batch`, to [N, width].
    """
    ends_B = np.cumsum(lengths_B)
    values_NC = torch.zeros(int(lengths_B.sum()), width)
    for microbatch, values in parts:
        own = values[: None if microbatch.rows else 0].cpu().split([int(lengths_B[row]) for row in microbatch.rows])
        for row, of_row in zip(microbatch.rows, own, strict=True):
            values_NC[ends_B[row] - len(of_row) : ends_B[row]] = of_row
    return ranks.join(ranks.once(values_NC))


class Gaps:
    """Collects the gaps of this rank's microbatches during the steps of an iteration.

    They stay on the device until the last step, so that no step waits for a copy.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._gaps: list[Tensor] = []  # at the scored tokens of those rows

    def add(self, microbatch: Microbatch, start_BT: Tensor, recorded_BT: Tensor) -> None:
        """Adds the gaps of a microbatch. `start_BT`: logprobs by the weights that the iteration
        started from; `recorded_BT`: true where these and the engine's are known.
        """
        gap_BT = (start_BT - microbatch.rollout_logprobs_BT).masked_fill(~recorded_BT, torch.nan)
        self._rows += microbatch.rows
        self._gaps.append(microbatch.scored(gap_BT))

    def gathered(self, ranks: Ranks, rollouts: RlBatch) -> list[TokenGaps]:
        """Gathers on rank 0 the gaps of each rollout of the batch, in its order; returns an empty
        list on the other ranks. Branches of a rollout have none. A collective.
        """
        rows, gaps = (
            torch.tensor(self._rows, dtype=torch.int64),
            torch.cat(self._gaps).cpu().half() if self._gaps else torch.zeros(0).half(),
        )
        if ranks.context and ranks.context.rank:  # all ranks of a context-parallel group have the same
            rows, gaps = rows[:0], gaps[:0]
        gap_of_row: dict[int, np.ndarray] = {}
        for rows_of_rank, gaps_of_rank in zip(ranks.to_first(rows), ranks.to_first(gaps), strict=True):
            parts = gaps_of_rank.split(rollouts.lengths_B[rows_of_rank.numpy()].tolist())
            gap_of_row.update(zip(rows_of_rank.tolist(), (part.numpy() for part in parts), strict=True))
        # own_B: true at the first row of each rollout
        none, own_B = (np.zeros(0, dtype=np.float16), np.diff(rollouts.rollout_B, prepend=-1) > 0)
        places = zip(rollouts.group_index_B, rollouts.rollout_index_B, own_B, strict=True)
        return [
            TokenGaps(int(group), int(index), gap_of_row.get(row, none))
            for row, (group, index, own) in enumerate(places)
            if own and not ranks.rank
        ]


def save_gaps(ranks: Ranks, gaps: list[TokenGaps] | None, folder: str, attempt: str) -> list[FileRecord]:
    """Publishes the gaps of an iteration; returns their record on rank 0."""
    assert gaps is not None, "the gaps of an iteration that was loaded, not trained"
    records: list[FileRecord] = []
    with ranks.together():
        if ranks.rank == 0:
            table = to_table(gaps, TokenGaps)
            records.append(publish_bytes(ranks.published / folder / attempt, "gap.parquet", to_parquet(table)))
    return records
