"""Computes the norms and rotary embeddings of a family's code in fewer passes over memory, for
CPUs, where each operation reads and writes all activations.

A function is replaced only where ours gives the same on random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from rlpipe.models.causal import MODEL_FAULTS
from rlpipe.models.fused import Replaced, replace_rotary, small_modules

NEAR = 1e-5  # of numbers of size 1, in float32


def use_passes(lm: Any) -> None:
    """Switches the norms of `lm`, and the rotary function of all models of its family, to ours;
    what computes something else stays as it is. `leave_fused` restores them.
    """
    for module in small_modules(lm):
        ours = _norm_of(module)
        if ours is not None:
            module.forward = functools.partial(Replaced(type(module).forward, ours), module)
    replace_rotary(lm, _rotary_of)


class RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * (shift + weight), over the last dimension (Zhang and Sennrich
    2019, https://arxiv.org/abs/1910.07467). `shift`: 1 for families that store the weight minus 1.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, weight: Tensor, eps: float, shift: float
    ) -> Tensor:
        scale = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
        scale.square_().div_(input.shape[-1]).add_(eps).rsqrt_()
        whole = weight + shift if shift else weight
        ctx.save_for_backward(input, whole, scale)
        return (input * scale).mul_(whole)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        # scale x gradient x weight - input x scale^3 x mean(gradient x weight x input)
        input, whole, scale = ctx.saved_tensors
        product = (gradient * input).reshape(-1, input.shape[-1])
        scale_N = scale.reshape(-1)
        of_weight = scale_N @ product if ctx.needs_input_grad[1] else None
        factor = (product @ whole).mul_(scale_N.pow(3)).div_(-input.shape[-1]).view(scale.shape)
        of_input = (gradient * whole).mul_(scale).addcmul_(input, factor)
        return of_input, of_weight, None, None


def _norm_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """Ours in the place of a module's forward; None where the module is another norm."""
    parameters = dict(module.named_parameters())
    eps = next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), None)
    if parameters.keys() != {"weight"} or parameters["weight"].ndim != 1 or not isinstance(eps, float):
        return None
    random = torch.Generator().manual_seed(0)
    weight, input = (torch.randn(size, generator=random) for size in (parameters["weight"].shape, (3, 1, 1)))
    input = input * torch.randn(weight.shape, generator=random)
    try:
        written = functional_call(module, {"weight": weight}, (input,))
    except MODEL_FAULTS:  # takes something else
        return None
    for shift in (0.0, 1.0):
        if _is_near(RmsNorm.apply(input, weight, eps, shift), written):
            return functools.partial(rms_norm, type(module).forward, eps, shift)
    return None


def rms_norm(written: Callable[..., Tensor], eps: float, shift: float, module: Any, input: Tensor) -> Tensor:
    """The forward of a norm; as it is `written` for other numbers than float32 of a CPU."""
    if not (_is_plain(input) and _is_plain(module.weight)):
        return written(module, input)
    return RmsNorm.apply(input, module.weight, eps, shift)  # pyright: ignore[reportReturnType]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, -1)
        return _rotated(input, cos, first, second, 1.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return _rotated(gradient, cos, second, first, -1.0), None, None


def _rotated(input: Tensor, cos: Tensor, first: Tensor, second: Tensor, sign: float) -> Tensor:
    """The two halves of the last dimension, a and b, as a cos - b first and b cos + a second, for
    the sign 1.
    """
    half, result = input.shape[-1] // 2, input * cos
    result[..., :half].addcmul_(input[..., half:], first, value=-sign)
    result[..., half:].addcmul_(input[..., :half], second, value=sign)
    return result


def rotary(written: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The rotary function of a family's source file, as (query, key, cos, sin) with cos and sin
    without heads (Su et al. 2021, https://arxiv.org/abs/2104.09864); as it is `written` for other
    arguments, and for other numbers than float32 of a CPU.
    """
    axis = named.get("unsqueeze_dim", 1)
    if len(given) != 4 or named.keys() - {"unsqueeze_dim"} or not all(map(_is_plain, given)):
        return written(*given, **named)
    query, key, cos, sin = given
    if not query.shape[-1] == key.shape[-1] == cos.shape[-1]:  # it rotates a part of each head
        return written(*given, **named)
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32 and value.device.type == "cpu"


def _rotary_of(function: Callable[..., Any]) -> Replaced | None:
    """Ours in the place of a rotary function; None where the function computes something else."""
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn((2, heads, 3, 8), generator=random) for heads in (4, 2))
    angles = torch.randn((2, 3, 8), generator=random)
    given = query, key, angles.cos(), angles.sin()
    try:
        written = function(*given)
    except MODEL_FAULTS:
        return None
    is_near = all(map(_is_near, rotary(function, *given), written))
    return Replaced(function, functools.partial(rotary, function)) if is_near else None


def _is_near(ours: Tensor, written: Any) -> bool:
    return isinstance(written, Tensor) and ours.shape == written.shape and torch.allclose(ours, written, NEAR, NEAR)
