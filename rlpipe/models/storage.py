"""Frees the memory of tensors, and allocates it again.

A tensor and all its views stay the same objects: only their storage is resized.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from rlpipe.processes.memory import trim


def storages_of(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages of tensors, each once, without empty ones."""
    pieces = {
        storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors) if storage.nbytes()
    }
    return list(pieces.values())


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A view of the whole storage, uint8.

    Trap: never call numpy() on it; a storage that numpy has seen can never be resized again.
    """
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def free(storages: Iterable[UntypedStorage]) -> None:
    """Frees the storages, and returns freed memory of this process to the GPU and to the kernel.

    Their tensors must not be read before the storages are resized again.
    """
    for storage in storages:
        assert storage.resizable(), "memory that numpy or a file has a part in cannot be freed"
        storage.resize_(0)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()
