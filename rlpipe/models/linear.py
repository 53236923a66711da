"""Computes linear layers by oneDNN on CPUs where torch's own library has half the speed for
float32.

torch computes float32 products by Intel's MKL. On an AMD processor MKL uses only AVX2; oneDNN,
which is part of torch as well, uses AVX-512 and is about twice as fast (docs/benchmarks.md). With
both, the bits of a row do not depend on its place in the product.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

CPU_FACTS = Path("/proc/cpuinfo")


class FastLinear(nn.Linear):
    """A linear layer whose products oneDNN computes."""

    def forward(self, input: Tensor) -> Tensor:
        return fast_linear(input, self.weight, self.bias)


def use_fast_linears(lm: Any) -> None:
    """Switches the linear layers of `lm` to oneDNN on a machine where that is faster; does nothing
    elsewhere.
    """
    for module in lm.modules() if onednn_is_faster() else []:
        # as FSDP does: the module stays the same object, under all its names
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


@functools.cache
def onednn_is_faster() -> bool:
    """True on an AMD processor with AVX-512, if torch has MKL and oneDNN."""
    has_both = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_both and cpu_maker() == "AuthenticAMD" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def cpu_maker() -> str:
    """The maker of the processor as Linux names it, such as GenuineIntel; "unknown" elsewhere.

    Libraries choose their kernels by it, so the bits of a product depend on it.
    """
    text = CPU_FACTS.read_text() if CPU_FACTS.exists() else ""
    named = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", text, re.MULTILINE)
    return named.group(1) if named else "unknown"


def fast_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`; by oneDNN for float32 on a CPU."""
    if (
        input.dtype is not torch.float32
        or weight.dtype is not torch.float32
        or input.device.type != "cpu"
        or not input.numel()
    ):
        return functional.linear(input, weight, bias)
    result = _Product.apply(input, weight) if torch.is_grad_enabled() else _product(input, weight)
    return result if bias is None else result + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # with a frozen weight the input need not be saved
        of_input, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        return _product(input, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input = None if weight is None else _product(gradient, weight.t())
        of_weight = None if input is None else _product(_rows(gradient).t(), _rows(input).t())
        return of_input, of_weight


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(left, right, None, "none", [], "")


# an operator of our own: oneDNN's takes a list, which a recorded graph
# (rlpipe/extras/local_engine/recorded.py) cannot have
OPERATORS = torch.library.Library("rlpipe", "DEF")
OPERATORS.define("product(Tensor left, Tensor right) -> Tensor")
OPERATORS.impl("product", _by_onednn, "CPU")
_product = torch.ops.rlpipe.product.default  # left @ right.T
