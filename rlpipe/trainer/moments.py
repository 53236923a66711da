"""AdamW's moments away from the device while passes run (`trainer.offload = "optimizer"`).

For an update they come back part by part: the same bits.

On a GPU they are in pinned memory of the host. A CPU has no other memory to go to: there they are
in a file of the node's scratch.
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
from rlpipe.trainer.gang import Gang

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 128  # numbers: as torch's own memory of a GPU begins
Event = torch.Event | None  # on a GPU, when a copy or a computation is done


@dataclass(frozen=True)
class Part:
    """Parameters whose moments come and go together: in `home` they lie one behind the other."""

    shards: list[nn.Parameter]
    home: Tensor


class AwayMoments:
    """The moments kept off the device, and the update that fetches them. UserError, on all ranks,
    where there is no room for them."""

    def __init__(self, gang: Gang, shards: Sequence[nn.Parameter]) -> None:
        self._device = gang.device
        self._file: mmap.mmap | None = None
        of_parts = parts_of(shards)
        sizes = [sum(map(_room, part)) for part in of_parts]
        homes: Sequence[Tensor] = []
        with gang.together():
            try:
                if gang.device.type == "cuda":
                    homes = [torch.zeros(size, pin_memory=True) for size in sizes]
                else:
                    self._file = _mapped(gang, 4 * max(1, sum(sizes)))
                    homes = torch.frombuffer(self._file, dtype=torch.float32)[: sum(sizes)].split(sizes)
            except (RuntimeError, OSError) as error:
                raise UserError(
                    f"trainer.offload='optimizer': a rank has no room for {4 * sum(sizes) / 2**30:.2f} GiB of moments "
                    f"({error!s:.200}); use more ranks, or trainer.offload = 'none'"
                ) from error
        self._parts = [Part(part, home) for part, home in zip(of_parts, homes, strict=True)]
        self._come, self._go = _Way(gang.device), _Way(gang.device)

    def entries(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The moments of every shard, where they are between updates."""
        return {shard: entry for part in self._parts for shard, entry in _entries(part, part.home).items()}

    @torch.no_grad()
    def update(self, optimizer: torch.optim.AdamW, gradients: dict[nn.Parameter, Tensor]) -> None:
        """The optimizer's step, part by part: it leaves alone what has no gradient.

        On a GPU the next part comes while one is updated, and the one before goes.
        """
        longest = max((part.home.numel() for part in self._parts), default=0)
        slots = [torch.empty(longest, device=self._device) for _ in range(min(PARTS_HERE, len(self._parts)))]
        free: list[Event] = [self._come.mark() for _ in slots]  # from when on a part may come into a slot
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
                self._file.madvise(mmap.MADV_DONTNEED)  # what was touched is the kernel's again
        for shard, entry in self.entries().items():
            optimizer.state[shard].update(entry)
        self._go.finish()  # whoever reads them next is on the host


def parts_of(shards: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbours whose moments are at most PART_BYTES together, or one alone that has more."""
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
    """Numbers that its moments take in a part."""
    return len(MOMENTS) * (-(-shard.numel() // ALIGNED) * ALIGNED)


def _entries(part: Part, flat: Tensor) -> dict[nn.Parameter, dict[str, Tensor]]:
    """The moments of a part's shards as views of `flat`."""
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


def _mapped(gang: Gang, num_bytes: int) -> mmap.mmap:
    """Zeros in a file of the node's scratch, which is gone with this process.

    OSError when the disk has no room.
    """
    with tempfile.TemporaryFile(dir=gang.scratch("moments")) as file:
        # a file with holes would end this process when the disk is full
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


class _Way:
    """Copies to a device or from it: of a GPU in a stream of their own, else at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Event:
        """All that was computed so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

    def wait(self, event: Event) -> None:
        """Makes all that is computed from here on wait for the event."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def copy(self, to: Tensor, source: Tensor, after: Event) -> Event:
        """Copies as many numbers as both have, after an event; returns that of its end."""
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
        """Waits for all of them."""
        if self._stream is not None:
            self._stream.synchronize()
