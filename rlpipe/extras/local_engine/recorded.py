"""Forward passes recorded as graphs, so that a step of a small model does not spend its time in
Python.

A graph holds the same operations that the model's code called, in their order, so its results have
the same bits. That is verified on the data of a request, once for each shape, and once after every
load of weights. A model whose code reads values is not recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlpipe.models.causal import MODEL_FAULTS

RECORD_AFTER = 32  # calls: to record costs about as much as a graph saves in as many


@dataclass(eq=False)
class Graph:
    """A recorded graph, which may serve several shapes, and whether it had the right bits since
    weights were loaded: it could keep what was computed of the old ones.
    """

    compute: Any
    is_verified: bool = False


class Recorded:
    """A function of tensors of fixed shapes that returns one tensor, and may be called twice with
    the same ones. `graph`: of a call with other shapes, which is tried before one is recorded.
    """

    def __init__(self, function: Callable[..., Tensor], graph: Graph | None = None) -> None:
        self._function = function
        self.graph = graph
        self._is_borrowed = graph is not None
        self._calls = RECORD_AFTER - 1 if self._is_borrowed else 0
        self.proven = False

    def __call__(self, *tensors: Tensor) -> Tensor:
        # optimised, a graph would fuse operations, which gives other bits, and fold
        # weights, which are loaded anew
        with torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]
            if self.proven and self.graph is not None and self.graph.is_verified:
                return self.graph.compute(*tensors)
            outcome = self._function(*tensors)
            self._calls += 1
            if self.proven or self._calls == RECORD_AFTER:
                self._prove(tensors, outcome)
            return outcome

    def weights_changed(self) -> None:
        """Makes the next call of one of the graph's shapes verify it again."""
        if self.graph is not None:
            self.graph.is_verified = False
            self._calls = RECORD_AFTER - 1

    def _prove(self, tensors: tuple[Tensor, ...], expected: Tensor) -> None:
        """Records the function if need be; the graph is used from now on if it computes the
        expected bits.
        """
        try:
            if self.graph is None:
                self.graph = self._recorded(tensors)
            self.proven = torch.equal(self.graph.compute(*tensors), expected)
            self.graph.is_verified |= self.proven
        except MODEL_FAULTS:
            self.proven = False
        if not self.proven:
            self._function(*tensors)  # what it writes stays
            if self._is_borrowed:  # shapes are numbers in it: one of its own comes later
                self.graph, self._is_borrowed, self._calls = None, False, 0

    def _recorded(self, tensors: tuple[Tensor, ...]) -> Graph:
        with _ValuesUnseen():
            self._function(*tensors)
        with warnings.catch_warnings():
            # where shapes become numbers, the graph serves these alone
            warnings.simplefilter("ignore")
            return Graph(torch.jit.trace(self._function, tensors, check_trace=False))


class _ValuesUnseen(TorchDispatchMode):
    """RuntimeError where a tensor's values become a number or a bool in Python: a graph would keep
    those of one call.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} looks at values")
        return func(*args, **(kwargs or {}))
