"""Forward passes recorded as graphs, so that a step of a small model does not spend its time in
Python.

A graph holds the same operations that the model's code called, in their order, so its results have
the same bits. That is verified on the data of a request, after every load of weights. A model whose
code reads values is not recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlpipe.models.causal import MODEL_FAULTS

RECORD_AFTER = 32  # calls: to record costs about as much as a graph saves in as many


class Recorded:
    """A function of tensors of fixed shapes that returns one tensor, and may be called twice with
    the same ones. `graph`: of a call with other shapes, which is tried before one is recorded.
    """

    def __init__(self, function: Callable[..., Tensor], graph: Any = None) -> None:
        self._function = function
        self.graph: Any = graph
        self._is_borrowed = graph is not None
        self._calls = RECORD_AFTER - 1 if self._is_borrowed else 0
        self.proven = False

    def __call__(self, *tensors: Tensor) -> Tensor:
        # optimised, a graph would fuse operations, which gives other bits, and fold
        # weights, which are loaded anew
        with torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]
            if self.proven:
                return self.graph(*tensors)
            outcome = self._function(*tensors)
            self._calls += 1
            if self._calls == RECORD_AFTER:
                self._prove(tensors, outcome)
            return outcome

    def weights_changed(self) -> None:
        """Makes the next call verify the graph again."""
        if self.graph is not None:
            self.proven, self._calls = False, RECORD_AFTER - 1

    def _prove(self, tensors: tuple[Tensor, ...], expected: Tensor) -> None:
        """Records the function if need be; the graph is used from now on if it computes the
        expected bits.
        """
        try:
            if self.graph is None:
                with _ValuesUnseen():
                    self._function(*tensors)
                with warnings.catch_warnings():
                    # where shapes become numbers, the graph serves these alone
                    warnings.simplefilter("ignore")
                    self.graph = torch.jit.trace(self._function, tensors, check_trace=False)
            self.proven = torch.equal(self.graph(*tensors), expected)
        except MODEL_FAULTS:
            self.proven = False
        if not self.proven:
            self._function(*tensors)  # what it writes stays
        if self._is_borrowed and not self.proven:  # shapes are numbers in it: one of its own comes later
            self.graph, self._is_borrowed, self._calls = None, False, 0


class _ValuesUnseen(TorchDispatchMode):
    """RuntimeError where a tensor's values become a number or a bool in Python: a graph would keep
    those of one call.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} looks at values")
        return func(*args, **(kwargs or {}))
