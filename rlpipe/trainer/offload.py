"""Moves the tensors of the trainer off its device while engines use it (`engines.colocate`), and
back, unchanged to the bit.

From a GPU they go to pinned host memory. On a CPU they go to a file in the node's scratch, which is
slow, and for tests.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from rlpipe.models.storage import bytes_of, free, storages_of
from rlpipe.trainer.ranks import Ranks


@dataclass(frozen=True)
class Offloaded:
    """Offloaded memory: in `copies` on the host, or in the file at `path`, one piece after the
    other.
    """

    pieces: list[UntypedStorage]
    sizes: list[int]  # bytes of each piece
    copies: list[Tensor]
    path: Path
    checksums: list[int]  # of each piece in the file

    @torch.no_grad()
    def restore(self) -> None:
        """Restores all tensors.

        A fault ends this rank, and so the trainer, which is then rebuilt from the store.
        """
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            assert piece.nbytes() == 0, "somebody took memory of what is away"
            piece.resize_(size)
        if self.checksums:
            _read(self.path, self.pieces, self.checksums)
        for piece, copy in zip(self.pieces, self.copies, strict=False):
            bytes_of(piece).copy_(copy, non_blocking=True)
        if self.copies:
            torch.cuda.synchronize()
        self.forget()

    def forget(self) -> None:
        """Deletes the file."""
        self.path.unlink(missing_ok=True)


@torch.no_grad()
def offload(ranks: Ranks, tensors: Iterable[Tensor]) -> Offloaded:
    """Moves the storages of `tensors` off the device and frees them there.

    StoreError, on all ranks and with nothing moved, when the disk is full.
    """
    pieces, path = storages_of(tensors), ranks.scratch("offload") / f"rank-{ranks.rank}"
    copies: list[Tensor] = []
    checksums: list[int] = []
    with ranks.together():
        if ranks.device.type == "cpu":
            checksums = _write(path, pieces)
        else:
            copies = [torch.empty(piece.nbytes(), dtype=torch.uint8, pin_memory=True) for piece in pieces]
            for piece, copy in zip(pieces, copies, strict=True):
                copy.copy_(bytes_of(piece), non_blocking=True)
            torch.cuda.synchronize()
    offloaded = Offloaded(pieces, [piece.nbytes() for piece in pieces], copies, path, checksums)
    free(pieces)
    return offloaded


def _view(piece: UntypedStorage) -> memoryview:
    """The bytes of a piece of main memory."""
    return memoryview((ctypes.c_ubyte * piece.nbytes()).from_address(piece.data_ptr()))


def _write(path: Path, pieces: list[UntypedStorage]) -> list[int]:
    """Writes the pieces to a file; returns the checksum of each."""
    checksums = []
    with path.open("wb") as file:
        for piece in pieces:
            view = _view(piece)
            file.write(view)
            checksums.append(zlib.crc32(view))
    return checksums


def _read(path: Path, pieces: list[UntypedStorage], checksums: list[int]) -> None:
    """Reads the pieces back from the file."""
    with path.open("rb") as file:
        for piece, checksum in zip(pieces, checksums, strict=True):
            view = _view(piece)
            num_bytes = file.readinto(view)
            assert num_bytes == len(view) and zlib.crc32(view) == checksum, f"{path} is not as it was written"
        assert not file.read(1), f"{path} has more than was written"
