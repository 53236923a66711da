"""Keeps AdamW's moments off the device while passes run (`trainer.offload = "optimizer"`).

For an update they are copied back part by part, with the same bits.

With a GPU they are in pinned host memory, on a CPU in a file in the node's scratch.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlpipe.base.errors import UserError
from rlpipe.config.operational import PART_BYTES, PARTS_HERE
from rlpipe.trainer.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 128  # in numbers; the alignment of torch's own allocations on a GPU
Event = torch.Event | None  # the end of a copy or a computation on a GPU; None on a CPU


@dataclass(frozen=True)
class Part:
    """Parameters whose moments are copied together; in `home` they are stored one after the
    other.
    """

    shards: list[nn.Parameter]
    home: Tensor


class AwayMoments:
    """The moments off the device, and the update that fetches them. UserError, on all ranks, when
    there is no room for them.
    """

    def __init__(self, ranks: Ranks, shards: Sequence[nn.Parameter]) -> None:
        self._device = ranks.device
        self._file: mmap.mmap | None = None
        of_parts = parts_of(shards)
        sizes = [sum(map(_room, part)) for part in of_parts]
        homes: Sequence[Tensor] = []
        with ranks.together():
            try:
                if ranks.device.type == "cuda":
                    homes = [torch.zeros(size, pin_memory=True) for size in sizes]
                else:
                    self._file = _mapped(ranks, 4 * max(1, sum(sizes)))
                    homes = torch.frombuffer(self._file, dtype=torch.float32)[: sum(sizes)].split(sizes)
            except (RuntimeError, OSError) as error:
                raise UserError(
                    f"trainer.offload='optimizer': a rank has no room for {4 * sum(sizes) / 2**30:.2f} GiB of moments "
                    f"({error!s:.200}); use more ranks, or trainer.offload = 'none'"
                ) from error
        self._parts = [Part(part, home) for part, home in zip(of_parts, homes, strict=True)]
        self._come, self._go = _Way(ranks.device), _Way(ranks.device)

    def entries(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The moments of every shard, in the memory that they have between updates."""
        return {shard: entry for part in self._parts for shard, entry in _entries(part, part.home).items()}

    @torch.no_grad()
    def update(self, optimizer: torch.optim.AdamW, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Does the optimizer's step part by part; the optimizer skips parameters without a
        gradient.

        On a GPU, while one part is updated, the next one is copied in and the one before is copied
        out.
        """
        longest = max((part.home.numel() for part in self._parts), default=0)
        slots = [torch.empty(longest, device=self._device) for _ in range(min(PARTS_HERE, len(self._parts)))]
        # after this event the next part may be copied into the slot
        free: list[Event] = [self._come.mark() for _ in slots]
        arrived: list[Event] = []
        for index, part in enumerate(self._parts):
            for following in self._parts[len(arrived) : index + PARTS_HERE]:
                place = len(arrived) % PARTS_HERE
                arrived.append(self._come.copy(slots[place], following.home, free[place]))
            slot = slots[index % PARTS_HERE]
            self._come.wait(arrived[index])
            here = _entries(part, slot)
            for shard in part.shards:
                optimizer.state[shard].update(here[shard])
                shard.grad = gradients[shard]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            free[index % PARTS_HERE] = self._go.copy(part.home, slot, self._go.mark())
            if self._file is not None:
                # lets the kernel free the pages that were touched
                self._file.madvise(mmap.MADV_DONTNEED)
        for shard, entry in self.entries().items():
            optimizer.state[shard].update(entry)
        self._go.finish()  # the moments are read on the host next


def parts_of(shards: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups neighbours whose moments are at most PART_BYTES together; a larger one is a part of
    its own.
    """
    parts: list[list[nn.Parameter]] = []
    taken = 0
    for shard in shards:
        assert shard.is_contiguous() and shard.dtype == torch.float32, f"{shard.shape}: {shard.dtype}"
        if not parts or taken + 4 * _room(shard) > PART_BYTES:
            parts.append([])
            taken = 0
        parts[-1].append(shard)
        taken += 4 * _room(shard)
    return parts


def _room(shard: nn.Parameter) -> int:
    """The numbers that a shard's moments take in a part, with alignment."""
    return len(MOMENTS) * (-(-shard.numel() // ALIGNED) * ALIGNED)


def _entries(part: Part, flat: Tensor) -> dict[nn.Parameter, dict[str, Tensor]]:
    """The moments of a part's shards, as views of `flat`."""
    entries: dict[nn.Parameter, dict[str, Tensor]] = {}
    start = 0
    for shard in part.shards:
        room = _room(shard) // len(MOMENTS)
        entries[shard] = {
            moment: flat[start + place * room :][: shard.numel()].view(shard.shape)
            for place, moment in enumerate(MOMENTS)
        }
        start += _room(shard)
    return entries


def _mapped(ranks: Ranks, num_bytes: int) -> mmap.mmap:
    """Maps a file of zeros in the node's scratch; it is deleted when this process ends.

    OSError when the disk is full.
    """
    with tempfile.TemporaryFile(dir=ranks.scratch("moments")) as file:
        # not a sparse file: that would kill this process later, when the disk is full
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


class _Way:
    """Copies in one direction, to a device or from it: on a GPU in a stream of its own, else
    synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Event:
        """Records an event after all computations so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

    def wait(self, event: Event) -> None:
        """Makes all later computations wait for the event."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def copy(self, to: Tensor, source: Tensor, after: Event) -> Event:
        """Copies as many numbers as both have, after the event `after`; returns the event of its
        end.
        """
        count = min(to.numel(), source.numel())
        if self._stream is None:
            to[:count].copy_(source[:count])
            return None
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            to[:count].copy_(source[:count], non_blocking=True)
        return self._stream.record_event()

    def finish(self) -> None:
        """Waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()
