"""A policy that is an adapter on a base which never changes: saves the adapter, and uses the same
model with another adapter as the reference of the KL term.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.models.adapter import target_names
from rlpipe.store.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, PREFIX, AdapterBase, config_document
from rlpipe.store.documents import sealed
from rlpipe.store.policy_files import base_of
from rlpipe.trainer.documents import json_bytes
from rlpipe.trainer.model import adapter_rows, fill, whole_tensor
from rlpipe.trainer.publishing import publish_bytes
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.step import Resident


def save_adapter(ranks: Ranks, resident: Resident, folder: Path, documents: dict[str, bytes]) -> list[FileRecord]:
    """Publishes in a folder the adapter in peft's format, in the dtype of the forward pass, the
    reference to its base, and the documents. Returns the records on rank 0.
    """
    adapted, dtype = resident.policy.adapted, getattr(torch, ranks.options.dtype)
    assert adapted is not None, "the policy is whole"
    # gathered by all ranks; cloned, as with one rank they are views of the live weights
    whole = {PREFIX + name: whole_tensor(shard, dtype).cpu().clone() for name, shard in resident.policy.trained()}
    records: list[FileRecord] = []
    with ranks.together():
        if ranks.rank == 0:
            config = config_document(adapted.settings, target_names(resident.policy.lm))
            beside = {
                ADAPTER_WEIGHTS: save(whole, metadata={"format": "pt"}),
                ADAPTER_CONFIG: json_bytes(config),
                BASE: sealed(AdapterBase(adapted.base)),
            }
            records = [publish_bytes(folder, name, data) for name, data in (beside | documents).items()]
    return records


def adapter_of_reference(ranks: Ranks, resident: Resident, ref: ArtifactRef) -> list[Tensor]:
    """This rank's rows of the adapter with which the policy in training equals the policy `ref`;
    zeros (the adapter is off) where `ref` is its base.

    Empty where `ref` has another base, and must be loaded as a model of its own.
    """
    adapted, rows = resident.policy.adapted, None
    if adapted is None:
        return []
    with ranks.together():
        if ref != adapted.base:
            if base_of(ranks.store, ref) != adapted.base:
                return []
            rows = adapter_rows(ranks, ref)
        tensors = [torch.zeros_like(shard, requires_grad=False) for shard in resident.shards.values()]
        if rows is not None:
            fill(ranks, resident.policy.trained(), tensors, rows)
    return tensors
