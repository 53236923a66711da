"""The ranks of one gang and how they agree: on a job, on sums, on a failure that only one of them saw."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlpipe.store.backend import Store, open_store
from rlpipe.trainer.options import TrainerOptions
from rlpipe.types import StoreError, UserError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # the longest that one rank may wait for another (an upload of rank 0)
SCRATCH = ("fetched", "saving")
LOCAL_FAULTS = (StoreError, ValueError, OSError, SafetensorError)


@dataclass
class Gang:
    """This rank's view of the gang. `control` is a gloo group: it carries host tensors on every device."""

    options: TrainerOptions
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup
    store: Store
    report: Callable[[int, int], None] = field(default=lambda done, total: None)

    def scratch(self, name: str) -> Path:
        """A folder of this node's scratch; `name` is one of SCRATCH."""
        assert name in SCRATCH, name
        folder = Path(self.options.work_dir) / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, on all ranks: torch's own gather would unpickle whatever comes in at the port."""
        data = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.control)
        longest = max(int(length) for length in lengths)
        boxes = [_bytes(b"", longest) for _ in range(self.size)]
        dist.all_gather(boxes, _bytes(data, longest), group=self.control)
        return [json.loads(box.numpy().tobytes()[: int(length)]) for box, length in zip(boxes, lengths, strict=True)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a float64 host tensor."""
        assert values.dtype == torch.float64 and values.device.type == "cpu", f"{values.dtype} on {values.device}"
        if self.size > 1:
            dist.all_reduce(values, group=self.control)
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A body without collectives that may fail on some ranks: then all ranks raise, and none is left waiting.

        UserError when the fault is the user's, StoreError otherwise.
        """
        fault: tuple[bool, str] | None = None
        try:
            yield
        except LOCAL_FAULTS as error:
            fault = (isinstance(error, UserError), f"{error}" if isinstance(error, StoreError | UserError) else repr(error))
        faults = [entry for entry in self.gather(fault) if entry is not None]
        if faults:
            users, message = faults[0]
            raise UserError(message) if users else StoreError(message)


def _bytes(data: bytes, length: int) -> torch.Tensor:
    """`data`, filled up with zeros to `length`."""
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def clear_scratch(options: TrainerOptions) -> None:
    """Removes what a killed gang left on this node; before the ranks meet, so that none uses it yet."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for name in SCRATCH:
            shutil.rmtree(Path(options.work_dir) / name, ignore_errors=True)


def _keep_to_interface(address: str) -> None:
    """The ranks' own connections stay on the interface of `address`: torch would take that of the host's name."""
    address = socket.gethostbyname(address)
    here = [name for name, held in psutil.net_if_addrs().items() if address in (each.address for each in held)]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if here:
            os.environ.setdefault(variable, here[0])


def join_gang(options: TrainerOptions) -> Gang:
    """Joins the gang that torchrun started (or that the caller initialised), with reproducible arithmetic."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    # a debugging aid that would fill every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _keep_to_interface(options.host)
        backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    assert isinstance(control, dist.ProcessGroup), "this rank is in no group"
    rank, size = dist.get_rank(), dist.get_world_size()
    return Gang(options, rank, size, device, init_device_mesh(options.device, (size,)), control, open_store(options.store))
