"""The memory behind tensors, given back and taken again.

A tensor and all its views stay the same objects: only their bytes go and come.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from rlpipe.processes.memory import trim


def storages_of(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The memory behind tensors, each piece once; none of what is empty."""
    pieces = {
        storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors) if storage.nbytes()
    }
    return list(pieces.values())


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A view of all of it, uint8.

    No numpy() of it: memory that numpy has seen can never be resized again.
    """
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def free(storages: Iterable[UntypedStorage]) -> None:
    """Empties them, and gives what this process has freed to the GPU and to the kernel.

    Nobody may read them before they are resized.
    """
    for storage in storages:
        assert storage.resizable(), "memory that numpy or a file has a part in cannot be freed"
        storage.resize_(0)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()
