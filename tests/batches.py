"""What the trainer reads of a batch and of conversations, without trainer processes: the files that
it maps are gone again, their pages stay. And the advantages of all its tokens."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.algorithms.advantages import all_tokens, row_advantages
from rlpipe.base.references import ArtifactRef
from rlpipe.store.backend import Store
from rlpipe.trainer import batches
from rlpipe.trainer.batches import RlBatch
from rlpipe.trainer.packing import TrainSequence


def read_rl_batch(store: Store, data: ArtifactRef, num_steps: int) -> RlBatch:
    with tempfile.TemporaryDirectory() as folder:
        return batches.read_rl_batch(store, data, num_steps, Path(folder))


def read_conversations(store: Store, data: ArtifactRef, name: str) -> list[TrainSequence]:
    with tempfile.TemporaryDirectory() as folder:
        return batches.read_conversations(store, data, name, Path(folder))


def token_advantages(*given: Any, **named: Any) -> np.ndarray:
    """Those of each row, row after row."""
    return all_tokens(row_advantages(*given, **named))
