"""Linear layers in bfloat16 whose weights are copied once into the order in which a CPU with AMX
reads them.

oneDNN, which computes them, otherwise copies a weight into that order at each product: of few rows
that takes longer than the product. The bits are the same. The copy takes the memory of the weights
again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlpipe.models.amx import has_amx

ROWS = 64  # for which oneDNN chooses the order
# in a list, and named by their places: a recorded graph (recorded.py)
# cannot have a tensor of oneDNN's
_WEIGHTS: list[Tensor] = []


class PackedLinear(nn.Linear):
    """A linear layer whose weight is `_WEIGHTS[place]` once it is taken."""

    place: int

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype is not torch.bfloat16:
            return super().forward(input)
        return _product(input, self.bias, self.place)


class Packed:
    """The linear layers of `lm` that compute by copies; none on another machine, or with another
    number type. `take` after each load, `drop` when the memory of the weights is freed.
    """

    def __init__(self, lm: Any) -> None:
        self._layers: list[PackedLinear] = []
        for module in lm.modules() if has_amx() else []:
            if type(module) is nn.Linear and _is_packable(module.weight):
                module.__class__ = PackedLinear  # the same object, under all its names
                assert isinstance(module, PackedLinear)
                module.place = len(_WEIGHTS)
                _WEIGHTS.append(torch.empty(0))
                self._layers.append(module)

    def take(self) -> None:
        """Copies the weights as they are now."""
        for layer in self._layers:
            _WEIGHTS[layer.place] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)

    def drop(self) -> None:
        """Frees the copies: only `take` may follow."""
        for layer in self._layers:
            _WEIGHTS[layer.place] = torch.empty(0)


def _is_packable(weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.numel() > 0


def _by_place(input: Tensor, bias: Tensor | None, place: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(input, _WEIGHTS[place], bias, "none", [], "")


OPERATORS = torch.library.Library("rlpipe", "FRAGMENT")
OPERATORS.define("packed_product(Tensor input, Tensor? bias, int place) -> Tensor")
OPERATORS.impl("packed_product", _by_place, "CPU")
_product = torch.ops.rlpipe.packed_product.default  # input @ _WEIGHTS[place].T + bias
