"""Sends the resident policy from the ranks to engines: the ranks gather it bucket by bucket, and
rank 0 broadcasts each bucket in a process group that it makes with the engines for this one policy.

What was sent is hashed as the files that the policy is saved in, so that a policy has the same
hashes whether engines got it from memory or from files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _abort_process_group, _new_process_group_helper, _world

from rlpipe.base.errors import StoreError
from rlpipe.base.references import FileRecord
from rlpipe.models.checkpoint import LENGTH_BYTES, hub_tensors, tensors_of
from rlpipe.records.sending import Offer, TensorBucket
from rlpipe.trainer.jobs import JobResult, OfferJob, SendJob
from rlpipe.trainer.model import saved_as, whole_tensor
from rlpipe.trainer.policy_files import METADATA, HostCopies, layout_of
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.step import Resident

Made = TypeVar("Made")
# at most so much per bucket; a larger block of layers is a bucket of its own
BUCKET_BYTES = 256 << 20
STALL_S = 60.0  # for all receivers to join, and for a bucket to reach them
ABORT_S = 15.0  # for a call to end after its group was aborted
HASHERS = 4  # files that a rank hashes at the same time


class Sending:
    """Sends policies to engines. Only rank 0 is in the group with engines; all ranks gather the
    tensors, and each hashes the files that it would write.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._position = ""  # the position of the policy that was offered last
        self._meetings: dict[str, TCPStore] = {}  # by group, the store at which the group meets

    def offer(self, resident: Resident, job: OfferJob) -> JobResult:
        """Returns the names, dtypes and shapes of the tensors that `send` will send, and the
        address at which the group meets. The address belongs to these trainer processes alone, and
        is open until another policy is offered.
        """
        offer: Offer | None = None
        with self._ranks.together():
            if self._ranks.rank == 0:
                host = self._ranks.options.host
                listener = socket.create_server((host, 0))
                port, wait = listener.getsockname()[1], timedelta(seconds=STALL_S)
                # a socket of torch's own would listen on every interface of the machine
                store = TCPStore(
                    host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach()
                )
                if job.position != self._position:
                    self._position, self._meetings = job.position, {}
                self._meetings[job.group] = store
                buckets = [bucket for _, in_file in _plan(self._ranks, resident) for bucket in in_file]
                offer = Offer(host, port, [_described(self._ranks, resident, names) for names in buckets])
        return JobResult(offer=offer)

    def send(self, resident: Resident, job: SendJob) -> JobResult:
        """Sends the policy; returns the records of the files that it would be saved in.

        StoreError, on all ranks, when a receiver did not get it.
        """
        ranks, lm, dtype = self._ranks, resident.policy.lm, getattr(torch, self._ranks.options.dtype)
        tensors, group = tensors_of(lm), None
        with ranks.together():
            if ranks.rank == 0:
                group = self._group(job)
        with (
            contextlib.closing(group) if group else contextlib.nullcontext(),
            ThreadPoolExecutor(HASHERS, "hashing") as threads,
        ):
            hashed = []
            for index, (file, buckets) in enumerate(_plan(ranks, resident)):
                own: dict[str, Tensor] = {}
                with HostCopies(ranks.device) as copies:
                    for names in buckets:
                        sent = hub_tensors(lm, {name: whole_tensor(tensors[name], dtype) for name in names})
                        with ranks.together():
                            if group is not None:
                                group.broadcast([*sent.values()])
                        # this rank writes the file when the policy is saved
                        if ranks.by_node(index) == ranks.rank:
                            own |= {name: copies.copy(tensor) for name, tensor in sent.items()}
                if own:
                    hashed.append(threads.submit(file_of, file, own))
            records = [asdict(record.result()) for record in hashed]
        return JobResult(sent=[FileRecord(**record) for own in ranks.gather(records) for record in own])

    def _group(self, job: SendJob) -> ReceiverGroup:
        if job.position != self._position or job.group not in self._meetings:
            raise StoreError(f"the trainer did not offer {job.position} to group {job.group} of engines")
        return ReceiverGroup(self._meetings[job.group], job, self._ranks.device)


class ReceiverGroup:
    """The process group of rank 0 and the receivers, for one policy.

    Every call has a deadline; OSError when a receiver is lost or late.

    torch's calls are made in a thread: an NCCL call that waits for a dead receiver does not end by
    itself.
    """

    def __init__(self, store: TCPStore, job: SendJob, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "sending")
        self._group: dist.ProcessGroup | None = None
        # NCCL's own timeout ends the process, so it must be later than ours
        timeout = timedelta(seconds=STALL_S if job.backend == "gloo" else 10 * STALL_S)

        def join() -> dist.ProcessGroup:
            size, backend, name = 1 + job.receivers, Backend(job.backend), cast("Any", job.group)
            met = PrefixStore(job.group, store)  # as SGLang does on its side
            made, _ = _new_process_group_helper(size, 0, [], backend, met, group_name=name, timeout=timeout)
            assert isinstance(made, dist.ProcessGroup), "rank 0 is in the group"
            _world.pg_group_ranks[made] = {rank: rank for rank in range(size)}
            return made

        with contextlib.ExitStack() as undo:
            undo.callback(self._thread.shutdown, wait=False)
            self._group = self._within(join)
            undo.pop_all()

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Sends the tensors one after the other; returns when all are sent."""

        def send() -> None:
            works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

        self._within(send)

    def close(self) -> None:
        """Leaves the group. Its connections are closed, so receivers that still wait get an
        error.
        """
        assert self._group is not None, "torch would end all groups"
        with contextlib.suppress(OSError):
            self._within(partial(dist.destroy_process_group, self._group))
        self._group = None
        self._thread.shutdown(wait=False)

    def _within(self, act: Callable[[], Made]) -> Made:
        doing = self._thread.submit(act)
        try:
            # gloo's own timeout is earlier, and its error says more
            return doing.result(STALL_S + 1)
        except TimeoutError:
            if self._group is not None:  # given None, torch would abort all groups
                with contextlib.suppress(RuntimeError, ValueError):
                    _abort_process_group(self._group)
        except (RuntimeError, ValueError) as error:
            _forget_frames(error)
            raise OSError(f"a receiver of weights was lost: {error!s:.300}") from error
        try:
            error = doing.exception(ABORT_S)
        except TimeoutError:
            # the state of this process is unknown: it ends; the trainer is rebuilt from the store
            raise RuntimeError(
                f"sending weights to engines hangs: it took more than {STALL_S:g} s, and could not be aborted"
            ) from None
        _forget_frames(error)
        raise OSError(f"a receiver of weights was late by {STALL_S:g} s")


def _forget_frames(error: BaseException | None) -> None:
    """Frees the local variables in the frames of an error. They hold gloo's connections; receivers
    would wait until these are garbage collected.
    """
    if error is not None:
        traceback.clear_frames(error.__traceback__)


def _plan(ranks: Ranks, resident: Resident) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields each file of the policy with its buckets: names of the module's tensors; a block of
    layers is never split.
    """
    tensors, dtype = tensors_of(resident.policy.lm), getattr(torch, ranks.options.dtype)
    for file, blocks in layout_of(ranks, resident).files.items():
        buckets, room = [], 0
        for block in blocks:
            size = sum(tensors[name].numel() * saved_as(tensors[name], dtype).itemsize for name in block)
            if size > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1] += block
            room -= size
        yield file, buckets


def _described(ranks: Ranks, resident: Resident, names: list[str]) -> TensorBucket:
    """The names, dtypes and shapes of the tensors that are sent for these tensors of the module."""
    lm, dtype = resident.policy.lm, getattr(torch, ranks.options.dtype)
    tensors = tensors_of(lm)
    empty = {
        name: torch.empty(tensors[name].shape, dtype=saved_as(tensors[name], dtype), device="meta") for name in names
    }
    sent = hub_tensors(lm, empty)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in sent.values()]
    return TensorBucket([*sent], dtypes, [[*tensor.shape] for tensor in sent.values()])


def file_of(name: str, tensors: dict[str, Tensor]) -> FileRecord:
    """The record (size and sha256) of the file that safetensors would write with these host
    tensors, computed without writing it. Trap: safetensors orders tensors in its own way.
    """
    head = save({key: tensor.new_empty(0) for key, tensor in tensors.items()}, METADATA)
    header, size = json.loads(head[LENGTH_BYTES:]), 0
    order = [key for key in header if key != "__metadata__"]
    for key in order:
        header[key]["shape"] = [*tensors[key].shape]
        header[key]["data_offsets"] = [size, size + tensors[key].nbytes]
        size += tensors[key].nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    digest = hashlib.sha256(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for key in order:
        digest.update(tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return FileRecord(name, LENGTH_BYTES + len(text) + size, digest.hexdigest())
