"""Ranks that share rows, as threads of one process: what they
exchange lies on a table between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlpipe.models.context_parallel import ContextGroup
from tests.deadlines import DEADLINE_S

Result = TypeVar("Result")


@dataclass
class Table:
    """Where every rank lays a tensor, and then sees those of all."""

    ranks: int
    laid: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks)

    def all_of(self, rank: int, values: Tensor) -> list[Tensor]:
        self.laid[rank] = values
        self.barrier.wait(DEADLINE_S)
        seen = [self.laid[other] for other in range(self.ranks)]
        self.barrier.wait(DEADLINE_S)
        return seen


@dataclass(frozen=True)
class ThreadGroup(ContextGroup):
    table: Any = None

    def send(self, parts_C: Tensor) -> Tensor:
        return torch.stack([other[self.rank] for other in self.table.all_of(self.rank, parts_C)])

    def add(self, values: Tensor) -> Tensor:
        return torch.stack(self.table.all_of(self.rank, values)).sum(0)


def on_ranks(count: int, work: Callable[[ContextGroup], Result]) -> list[Result]:
    """What each of so many ranks comes to."""
    table = Table(count)

    def at_rank(rank: int) -> Result:
        try:
            return work(ThreadGroup(group=None, ranks=count, rank=rank, table=table))  # pyright: ignore[reportArgumentType]
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(at_rank, rank) for rank in range(count)]
    faults = [
        fault for job in jobs if (fault := job.exception()) and not isinstance(fault, threading.BrokenBarrierError)
    ]
    if faults:
        raise faults[0]
    return [job.result() for job in jobs]
