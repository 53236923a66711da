"""Norms, rotary positions and MLPs of a family's code, each compiled to kernels of its own on a
GPU.

As transformers writes them every operation is a kernel that reads and writes all activations: of a
step of 1.7B parameters half the time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

KINDS = ("Norm", "MLP")  # how families end the names of these modules
ROTARY = "apply_rotary_pos_emb"  # and what most call the function, in the file of their modules
KERNELS_MAX = 64  # for each of: a width, with or without gradient, trained or frozen
# not empty: what is compiled is computed as it is written. Threads of backward passes see it, too
_PLAIN: list[None] = []


class Fused:
    """A function of a family's code, compiled once for all lengths."""

    def __init__(self, function: Callable[..., Any], backend: str) -> None:
        self.written = function
        self._kernels = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    def __call__(self, *given: Any, **named: Any) -> Any:
        if _PLAIN:
            return self.written(*given, **named)
        with torch._dynamo.config.patch(recompile_limit=KERNELS_MAX):
            return self._kernels(*given, **named)


@functools.cache
def fused(function: Callable[..., Any], backend: str = "inductor") -> Fused:
    """The same for every module that has the function."""
    return Fused(function, backend)


def use_fused(lm: Any, backend: str = "inductor") -> None:
    """From here on `lm` computes these by their kernels."""
    for module in _modules(lm):
        module.forward = functools.partial(fused(type(module).forward, backend), module)
    for file in _files(lm):
        function = getattr(file, ROTARY)
        setattr(file, ROTARY, function if isinstance(function, Fused) else fused(function, backend))


def leave_fused(lm: Any) -> None:
    """From here on `lm` computes them as its own code has it; so do others of its family with
    rotary positions.
    """
    for module in _modules(lm):
        vars(module).pop("forward", None)
    for file in _files(lm):
        function = getattr(file, ROTARY)
        setattr(file, ROTARY, function.written if isinstance(function, Fused) else function)


def uses_fused(lm: Any) -> bool:
    """True when `lm` computes its norms and MLPs by compiled kernels."""
    return any("forward" in vars(module) for module in _modules(lm))


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Meanwhile nothing is computed by such a kernel, in any thread."""
    _PLAIN.append(None)
    try:
        yield
    finally:
        _PLAIN.pop()


def _modules(lm: Any) -> list[nn.Module]:
    """The modules of KINDS that are transformers' own. Those of torch have a kernel, and what was
    put in their place is not known."""
    return [
        module
        for module in lm.modules()
        if type(module).__module__.startswith("transformers.") and type(module).__name__.endswith(KINDS)
    ]


def _files(lm: Any) -> list[Any]:
    """The files of its modules in which there is such a function."""
    names = dict.fromkeys(type(module).__module__ for module in lm.modules())
    return [
        sys.modules[name]
        for name in names
        if name.startswith("transformers.models.") and hasattr(sys.modules[name], ROTARY)
    ]
