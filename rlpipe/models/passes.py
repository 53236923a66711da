"""Computes the norms and rotary embeddings of a family's code in fewer passes over memory, for
CPUs, where each operation reads and writes all activations.

A function is replaced only where ours gives the same on random numbers. Legend: D the last
dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from rlpipe.models.fused import Replaced, replace_rotary, small_modules

NEAR = 1e-5  # of numbers of size 1, in float32


def use_passes(lm: Any) -> None:
    """Switches the norms and rotary embeddings of `lm` to ours; those that compute something else
    stay as they are. `leave_fused` restores them.
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
        # with n = input x scale: gradient x weight x scale - n x scale x mean(gradient x weight x
        # n)
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
    except (RuntimeError, ValueError, TypeError):  # takes something else
        return None
    for shift in (0.0, 1.0):
        if _is_near(RmsNorm.apply(input, weight, eps, shift), written):
            return functools.partial(rms_norm, type(module).forward, eps, shift)
    return None


def rms_norm(written: Callable[..., Tensor], eps: float, shift: float, module: Any, input: Tensor) -> Tensor:
    """The forward of a norm; as it is `written` for other numbers than float32 of a CPU."""
    weight = module.weight
    if input.dtype is not torch.float32 or weight.dtype is not torch.float32 or input.device.type != "cpu":
        return written(module, input)
    return RmsNorm.apply(input, weight, eps, shift)  # pyright: ignore[reportReturnType]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(input, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, -1.0), None, None


def _rotated(input: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """The two halves of the last dimension, a and b, as a cos - b sin and b cos + a sin."""
    half, result = input.shape[-1] // 2, input * cos
    result[..., :half].addcmul_(input[..., half:], sin[..., :half], value=-sign)
    result[..., half:].addcmul_(input[..., :half], sin[..., half:], value=sign)
    return result


def rotary(
    written: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, unsqueeze_dim: int = 1, **named: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rotary function of a family's source file (Su et al. 2021,
    https://arxiv.org/abs/2104.09864); as it is `written` for other numbers than float32 of a CPU.
    """
    parts = query, key, cos, sin
    is_ours = all(part.dtype is torch.float32 and part.device.type == "cpu" for part in parts)
    if others or named or not is_ours or not query.shape[-1] == key.shape[-1] == cos.shape[-1]:
        return written(*parts, *others, unsqueeze_dim=unsqueeze_dim, **named)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)  # pyright: ignore[reportReturnType]


def _rotary_of(function: Callable[..., Any]) -> Replaced | None:
    """Ours in the place of a rotary function; None where the function computes something else."""
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn((2, heads, 3, 8), generator=random) for heads in (4, 2))
    angles = torch.randn((2, 3, 4), generator=random).repeat(1, 1, 2)
    given = query, key, angles.cos(), angles.sin()
    try:
        written = function(*given)
    except (RuntimeError, ValueError, TypeError):
        return None
    is_near = all(map(_is_near, rotary(function, *given), written))
    return Replaced(function, functools.partial(rotary, function)) if is_near else None


def _is_near(ours: Tensor, written: Any) -> bool:
    return isinstance(written, Tensor) and ours.shape == written.shape and torch.allclose(ours, written, NEAR, NEAR)
