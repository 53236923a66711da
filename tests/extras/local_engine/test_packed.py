"""Linear layers with packed weights give the bits of plain ones, before and after new weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlpipe.extras.local_engine.packed import Packed, PackedLinear
from rlpipe.models.amx import has_amx

needs_amx = pytest.mark.skipif(not has_amx(), reason="needs a processor with AMX")


@needs_amx
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64, 200])
def test_packed_layers_give_the_bits_of_plain_ones(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        layer = nn.Linear(192, 320, bias=bias, dtype=torch.bfloat16)
        input = torch.randn(rows, 192, dtype=torch.bfloat16)
        plain = layer(input)
        packed = Packed(layer)
        packed.take()
        assert type(layer) is PackedLinear and torch.equal(layer(input), plain)
        layer.weight.mul_(-2)
        packed.drop()
        packed.take()
        expected = nn.functional.linear(input, layer.weight, layer.bias)
        assert torch.equal(layer(input), expected) and not torch.equal(expected, plain)


def test_other_number_types_stay_as_they_are() -> None:
    layer = nn.Linear(4, 4)
    Packed(layer).take()
    assert type(layer) is nn.Linear
