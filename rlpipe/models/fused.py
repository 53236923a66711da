"""Compiles the norms, rotary embeddings and MLPs of a family's code to fused kernels on a GPU.

Uncompiled, every operation is a kernel that reads and writes all activations: with 1.7B parameters
half the time of a step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

KINDS = ("Norm", "MLP")  # the endings of the class names of these modules
# the name of the rotary function in the source file of most families
ROTARY = "apply_rotary_pos_emb"
KERNELS_MAX = 64  # there is one for each of: a width, with or without gradient, trained or frozen
# while not empty, functions run uncompiled; threads of backward passes see it, too
_PLAIN: list[None] = []


class Replaced:
    """A function of a family's code as it is `written`, and ours in its place."""

    def __init__(self, written: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self.written = written
        self._ours = ours

    def __call__(self, *given: Any, **named: Any) -> Any:
        return (self.written if _PLAIN else self._ours)(*given, **named)


@functools.cache
def fused(function: Callable[..., Any], backend: str = "inductor") -> Replaced:
    """The function compiled for all lengths, one object for all modules that use it."""
    kernels = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    def call(*given: Any, **named: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=KERNELS_MAX):
            return kernels(*given, **named)

    return Replaced(function, call)


def use_fused(lm: Any, backend: str = "inductor") -> None:
    """Switches the norms, rotary embeddings and MLPs of `lm` to compiled kernels."""
    for module in small_modules(lm):
        module.forward = functools.partial(fused(type(module).forward, backend), module)
    replace_rotary(lm, lambda function: fused(function, backend))


def replace_rotary(lm: Any, replaced: Callable[[Callable[..., Any]], Replaced | None]) -> None:
    """Puts ours in the place of the rotary function in the family's source files, for all models
    that use them; None leaves a function as it is.
    """
    for file in _files(lm):
        function = getattr(file, ROTARY)
        if not isinstance(function, Replaced) and (ours := replaced(function)) is not None:
            setattr(file, ROTARY, ours)


def leave_fused(lm: Any) -> None:
    """Restores the family's own code in `lm`; the rotary function is restored for all models of the
    family.
    """
    for module in small_modules(lm):
        vars(module).pop("forward", None)
    for file in _files(lm):
        function = getattr(file, ROTARY)
        setattr(file, ROTARY, function.written if isinstance(function, Replaced) else function)


def uses_fused(lm: Any) -> bool:
    """True when `lm` computes its norms by ours."""
    return any("forward" in vars(module) for module in small_modules(lm))


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within the body all threads compute by the family's code."""
    _PLAIN.append(None)
    try:
        yield
    finally:
        _PLAIN.pop()


def small_modules(lm: Any) -> list[nn.Module]:
    """The modules of KINDS that are of transformers. Those of torch have a fused kernel already,
    and replaced ones are unknown code.
    """
    return [
        module
        for module in lm.modules()
        if type(module).__module__.startswith("transformers.") and type(module).__name__.endswith(KINDS)
    ]


def _files(lm: Any) -> list[Any]:
    """The Python modules of the model's classes that have a rotary function."""
    names = dict.fromkeys(type(module).__module__ for module in lm.modules())
    return [
        sys.modules[name]
        for name in names
        if name.startswith("transformers.models.") and hasattr(sys.modules[name], ROTARY)
    ]
