"""The trainer processes as a rank sees them, and their collectives: a job, sums, a failure that
only one rank saw.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlpipe.base.errors import StoreError, UserError
from rlpipe.models.context_parallel import ContextGroup, join_context_group
from rlpipe.models.linear import cpu_maker, onednn_is_faster
from rlpipe.services.registration import FILES
from rlpipe.store.backend import Store, open_store
from rlpipe.trainer.process import TrainerOptions

log = logging.getLogger(__name__)
DATA_TIMEOUT = timedelta(minutes=5)  # of the collectives of a step
# of collectives that follow reading or writing the store on one rank
CONTROL_TIMEOUT = timedelta(hours=2)
LOCAL_FAULTS = (StoreError, ValueError, OSError, SafetensorError)
Found = TypeVar("Found")


@dataclass
class Ranks:
    """This rank's view of the trainer processes.

    `control`: a gloo group with a long timeout, for collectives that follow reading or writing.

    `mesh`: one dimension of all ranks, or (copies of the model, parts of a copy); in the latter
    `rank // parts` is this rank's copy.
    """

    options: TrainerOptions
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup
    store: Store
    # this rank's context-parallel group; None without context parallelism
    context: ContextGroup | None = None
    report: Callable[[int, int], None] = field(default=lambda done, total: None)
    _warnings: list[str] = field(default_factory=list)

    @property
    def parts(self) -> int:
        """The number of parts that a copy of the model is sharded into, one per rank."""
        return self.mesh.shape[-1]

    @property
    def part(self) -> int:
        """The index of the part of the model that this rank has."""
        return self.rank % self.parts

    @property
    def copies(self) -> int:
        """The number of copies of the model: that many ranks have the same part, and update it
        alike.
        """
        return self.size // self.parts

    @property
    def context_ranks(self) -> int:
        """The number of ranks of a context-parallel group; 1 without one."""
        return self.context.ranks if self.context else 1

    def once(self, values: torch.Tensor) -> torch.Tensor:
        """Prepares values that are equal on all ranks of a context-parallel group for a sum over
        ranks: zeros on all ranks of the group but the first.
        """
        return torch.zeros_like(values) if self.context and self.context.rank else values

    def scratch(self, name: str) -> Path:
        """The folder `name` in this node's scratch, created."""
        folder = Path(self.options.work_dir) / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def published(self) -> Path:
        """The folder with the files that this node has published, by their store keys, before the
        store has them.
        """
        return self.scratch("published")

    @property
    def files_url(self) -> str:
        """The URL at which this node serves the files that it has published."""
        return f"http://{self.options.host}:{self.options.port}{FILES}"

    @property
    def node_ranks(self) -> int:
        """The number of ranks per node: they share its disk, and the first of them serves and
        uploads the files that are published there.
        """
        return min(self.options.trainer.ranks, self.size)

    @property
    def nodes(self) -> int:
        return self.size // self.node_ranks

    @property
    def node(self) -> int:
        """The index of this rank's node."""
        return self.rank // self.node_ranks

    @property
    def leads_node(self) -> bool:
        return self.rank % self.node_ranks == 0

    def by_node(self, number: int) -> int:
        """The rank that has the turn `number`: the nodes take turns, and on each node its ranks do;
        `size` turns are a round.
        """
        local, node = divmod(number % self.size, self.nodes)
        return node * self.node_ranks + local

    def gather(self, value: Any) -> list[Any]:
        """Gathers a JSON value of each rank, on all ranks. torch's own `all_gather_object` would
        unpickle whatever arrives at the port.
        """
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
        dist.all_reduce(values)
        return values

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Joins a float32 host tensor of which each element is on one rank, and 0 on the others;
        returns it whole on all ranks. The sum is exact, as only one summand is not 0.
        """
        assert values.dtype == torch.float32 and values.device.type == "cpu", f"{values.dtype} on {values.device}"
        dist.all_reduce(values)
        return values

    def to_first(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Returns the values of all ranks, in the order of ranks, on rank 0, and an empty list on
        the others. `values`: host tensors of one dimension and any length.
        """
        counts = self.gather(len(values))
        of_ranks = [values] if self.rank == 0 else []
        # one by one: nothing is sent before rank 0 receives it
        for rank in range(1, self.size):
            part = values.contiguous() if self.rank == rank else values.new_empty(counts[rank])
            if counts[rank] and self.rank == rank:
                dist.send(part.view(torch.uint8), 0, group=self.control)
            elif counts[rank] and self.rank == 0:
                dist.recv(part.view(torch.uint8), rank, group=self.control)
            of_ranks += [part] if self.rank == 0 else []
        return of_ranks

    def fingerprint(self) -> dict[str, str]:
        """The facts, beside the code, that the bits of a result depend on: equal on machines of one
        kind with equal libraries.
        """
        if self.device.type == "cpu":
            device, library = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}", "none"
            products = f"{'oneDNN' if onednn_is_faster() else 'torch'} on {cpu_maker()}"
        else:
            products = "the GPU's"
            device, library = torch.cuda.get_device_name(self.device), ".".join(map(str, nccl.version()))
            if (chosen := os.environ.get("NCCL_ALGO", "")) != "Ring":
                library = f"{library} by {chosen or 'its own choice'}"
        cuda, threads = str(torch.version.cuda).lower(), self.options.trainer.threads
        of_ranks = {"torch": torch.__version__, "cuda": cuda, "nccl": library, "device": device, "products": products}
        shape = {"ranks": self.size, "copies": self.copies, "context_ranks": self.context_ranks, "threads": threads}
        return of_ranks | {name: str(count) for name, count in shape.items()}

    def warn(self, text: str) -> None:
        """Logs a warning on this rank; those of rank 0 also go to the flow, with the result of the
        current job.
        """
        log.warning("%s", text)
        self._warnings.append(text)

    def told_users(self) -> list[str]:
        """Returns the warnings since the last call, and forgets them."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def peak_memory_gib(self) -> float:
        """The largest peak memory of a rank since it started, in GiB: of its GPU, else of main
        memory. A collective.
        """
        held = (
            torch.cuda.max_memory_allocated(self.device)
            if self.device.type == "cuda"
            else 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        )
        return round(max(self.gather(held)) / 2**30, 3)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context for a body without collectives that may fail on some ranks: all ranks then
        raise, and none waits for ever.

        UserError when the fault is the user's, StoreError otherwise.
        """
        fault: tuple[bool, str] | None = None
        try:
            yield
        except LOCAL_FAULTS as error:
            fault = (
                isinstance(error, UserError),
                f"{error}" if isinstance(error, StoreError | UserError) else repr(error),
            )
        faults = [entry for entry in self.gather(fault) if entry is not None]
        if faults:
            users, message = faults[0]
            raise UserError(message) if users else StoreError(message)

    def in_turn(self, read: Callable[[Path], Found]) -> Found:
        """Calls `read` with a new folder of this node and returns its result. A collective; faults
        as in `together`.

        One rank of the node calls it first; the other ranks then find in the folder the files that
        the first has written. The folder is deleted afterwards.
        """
        first, folder, result = os.environ.get("LOCAL_RANK", "0") == "0", self.scratch("in-turn"), None
        for is_turn in (first, True):
            with self.together():
                if is_turn:
                    result = read(folder) if result is None else result
        if first:
            shutil.rmtree(folder, ignore_errors=True)
        assert result is not None, "an error is raised"
        return result


def _bytes(data: bytes, length: int) -> torch.Tensor:
    """`data` as uint8, padded with zeros to `length`."""
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def _keep_to_interface(address: str) -> None:
    """Binds the connections between ranks to the interface of `address`; torch's default is that of
    the host name.
    """
    address = socket.gethostbyname(address)
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def join_ranks(options: TrainerOptions) -> Ranks:
    """Joins the process group of the ranks that the launcher started (or that the caller
    initialised), with deterministic arithmetic.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if options.trainer.nccl_algo:
        os.environ.setdefault("NCCL_ALGO", options.trainer.nccl_algo)
    torch.set_num_threads(options.trainer.threads)
    torch.use_deterministic_algorithms(True)
    # a debugging aid that fills every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    device, backend = torch.device("cpu"), "gloo"
    if options.trainer.gpu_ids:
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _keep_to_interface(options.host)
        dist.init_process_group(backend, timeout=DATA_TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    assert isinstance(control, dist.ProcessGroup), "this rank is in no group"
    rank, size, copies = dist.get_rank(), dist.get_world_size(), options.trainer.copies
    assert size % copies == 0, f"{copies} copies on {size} ranks"
    shape, names = ((copies, size // copies), ("copy", "part")) if copies > 1 else ((size,), ("part",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    store = open_store(options.store, Path(options.cache) if options.cache else None)
    context = join_context_group(size, options.trainer.context_ranks, rank, device)
    return Ranks(options, rank, size, device, mesh, control, store, context)
