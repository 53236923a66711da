"""Writes the sharded policy as files. The ranks gather it tensor by tensor, and each file is
written by another rank, so that all GPUs copy at the same time.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from rlpipe.models.checkpoint import FILE_BYTES_MAX, block_of, hub_tensors, tensors_of
from rlpipe.models.folder import INDEX
from rlpipe.trainer.adapted import save_adapter
from rlpipe.trainer.documents import config_files, json_bytes, tokenizer_files
from rlpipe.trainer.jobs import JobResult, SaveJob
from rlpipe.trainer.model import saved_as, whole_tensor
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.saving import PolicyWriter
from rlpipe.trainer.step import Resident

METADATA = {"format": "pt"}  # of each file of weights
BUFFERS, BUFFER_BYTES = 2, 64 << 20  # pinned memory per rank


@dataclass(frozen=True)
class Layout:
    """The files of a policy's weights.

    `files`: the blocks of each file, each as the names of its tensors; `metadata`: of the index,
    empty for a single file.
    """

    files: dict[str, list[list[str]]]
    metadata: dict[str, int]


def layout_of(ranks: Ranks, resident: Resident) -> Layout:
    """Assigns each tensor of the resident policy to a file; a block of layers is in one file."""
    dtype, tensors = getattr(torch, ranks.options.dtype), tensors_of(resident.policy.lm)
    blocks: dict[str, list[str]] = {}
    for name in tensors:
        blocks.setdefault(block_of(name), []).append(name)
    bytes_of = {name: tensor.numel() * saved_as(tensor, dtype).itemsize for name, tensor in tensors.items()}
    sizes = {block: sum(bytes_of[name] for name in names) for block, names in blocks.items()}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=FILE_BYTES_MAX
    )
    files = {file: [blocks[block] for block in in_file] for file, in_file in split.filename_to_tensors.items()}
    return Layout(files, split.metadata if split.is_sharded else {})


def save_policy(ranks: Ranks, resident: Resident, job: SaveJob, folder: str) -> JobResult:
    """Publishes the policy in HF format: weights in the dtype of the forward pass, config,
    tokenizer; for an adapter only the adapter's files. Returns, on rank 0, the records of all
    files, and metrics.
    """
    if resident.policy.adapted is not None:
        target, documents = ranks.published / folder / job.attempt, config_files(ranks, resident, job.stop_token_ids)
        return JobResult(policy=save_adapter(ranks, resident, target, documents))
    tensors, layout, dtype = (
        tensors_of(resident.policy.lm),
        layout_of(ranks, resident),
        getattr(torch, ranks.options.dtype),
    )
    writer = PolicyWriter(ranks, job, folder)
    files = [(file, [name for block in blocks for name in block]) for file, blocks in layout.files.items()]
    for first in range(
        0, len(files), ranks.size
    ):  # each rank has one file in memory at a time, and the nodes share the files
        at_once = {ranks.by_node(turn): file for turn, file in enumerate(files[first : first + ranks.size])}
        whole = _gathered(ranks, tensors, {rank: names for rank, (_, names) in at_once.items()}, dtype)
        with ranks.together():
            if ranks.rank in at_once:
                path, stored = writer.whole / at_once[ranks.rank][0], hub_tensors(resident.policy.lm, whole)
                save_file(stored, path, metadata=METADATA)
                writer.weights(path, stored, dtype.itemsize)
    index = writer.together()
    saved = writer.weights_alone()
    with ranks.together():
        if ranks.rank == 0:
            beside = config_files(ranks, resident, job.stop_token_ids) | tokenizer_files(ranks, job.tokenizer)
            if layout.metadata:
                beside[INDEX] = json_bytes({"metadata": layout.metadata, "weight_map": index})
            saved = writer.documents(beside)
        if ranks.leads_node:
            writer.keep()
    return saved


def _gathered(
    ranks: Ranks, tensors: dict[str, Tensor], files: dict[int, list[str]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gathers the tensors of this rank's file, whole, in main memory. A collective.

    `files`: the names of the tensors in the file of each rank.

    The ranks gather one tensor of each file in turn: while a GPU copies its own tensor, those of
    the other ranks are gathered and copied.
    """
    own: dict[str, Tensor] = {}
    with HostCopies(ranks.device) as copies:
        for turn in zip_longest(*files.values()):
            for rank, name in zip(files, turn, strict=True):
                if name is not None:
                    whole = whole_tensor(tensors[name], dtype)
                    if rank == ranks.rank:
                        own[name] = copies.copy(whole)
    return own


class HostCopies:
    """Copies tensors to main memory through pinned memory, while the device computes; all copies
    are complete when the block ends.

    One copy is in progress at a time, and its tensor stays on the device until it is complete.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._last: Future[None] | None = None
        if not self._on_cpu:
            self._stream = torch.cuda.Stream(device)
            self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self._thread = ThreadPoolExecutor(1, "copies")

    def __enter__(self) -> HostCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None and self._last is not None:
            self._last.result()

    def copy(self, tensor: Tensor) -> Tensor:
        """Copies a tensor; the result is contiguous. Trap: a contiguous CPU tensor is returned
        itself, so with one rank the result is a view of the live weights.
        """
        if self._on_cpu:
            return tensor.contiguous()
        if self._last is not None:
            self._last.result()
        made = torch.cuda.Event()
        made.record()
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._last = self._thread.submit(self._copy, tensor.contiguous(), target, made)
        return target

    def _copy(self, tensor: Tensor, target: Tensor, made: torch.cuda.Event) -> None:
        pieces, places = (flat.reshape(-1).view(torch.uint8).split(BUFFER_BYTES) for flat in (tensor, target))
        going: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            for index, (piece, place) in enumerate(zip(pieces, places, strict=True)):
                if len(going) == BUFFERS:
                    _land(*going.popleft())
                buffer, copied = self._buffers[index % BUFFERS][: len(piece)], torch.cuda.Event()
                buffer.copy_(piece, non_blocking=True)
                copied.record()
                going.append((copied, buffer, place))
            for landing in going:
                _land(*landing)


def _land(copied: torch.cuda.Event, buffer: Tensor, place: Tensor) -> None:
    copied.synchronize()
    place.copy_(buffer)
