"""LoRA: two low-rank matrices beside each linear layer of a model, under peft's names. A layer
computes `W x + (alpha / rank) B A x`.

The layers are our own, not peft's. peft wraps each linear layer in another module, which renames
its weight; here the base keeps the names by which its files are read in parts, its weights are tied
and its experts are converted.

Legend: I inputs and O outputs of a linear layer, R rank of the adapter.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlpipe.base.errors import UserError
from rlpipe.base.seeds import data_seed
from rlpipe.models.checkpoint import tied_names
from rlpipe.models.linear import fast_linear, onednn_is_faster
from rlpipe.store.adapter_files import Adapter

OF_ADAPTER = re.compile(r"(.+)\.lora_[AB]\.weight")
NAMES_SHOWN = 8
# mamba, falcon_mamba and jamba read this layer's weight and never call the layer; all other
# families in docs/models.md call theirs
PASSED_BY = "dt_proj"


class AdaptedLinear(nn.Linear):
    """A linear layer with `lora_A` (R x I) and `lora_B` (O x R) beside its weight."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        linear = fast_linear if onednn_is_faster() else functional.linear
        beside = linear(linear(input, self.lora_A.weight), self.lora_B.weight)
        return linear(input, self.weight, self.bias) + beside * self.scale


def is_adapter(name: str) -> bool:
    """True when `name` is that of an adapter's parameter."""
    return OF_ADAPTER.fullmatch(name) is not None


def put_adapter(lm: Any, adapter: Adapter) -> None:
    """Adds an adapter, without values yet, to the layers of `lm` that it names, and freezes all
    other parameters.

    UserError for a name that no linear layer has, or when there is no linear layer at all.
    """
    layers = linear_layers(lm)
    wanted = {name: layer for name, layer in layers.items() if _is_named(name, adapter.targets)}
    unmatched = [target for target in adapter.targets if not any(_is_named(name, (target,)) for name in layers)]
    family = lm.config.model_type
    if unmatched:
        ends = sorted({name.rpartition(".")[2] for name in layers})
        raise UserError(
            f"model.adapter_targets: {family} has no linear layer {unmatched[0]!r:.80}; "
            f"it has {', '.join(ends[:NAMES_SHOWN]) or 'none that can be adapted'}"
        )
    if not wanted:
        raise UserError(
            f"model.adapter='lora': {family} has no linear layer of torch (nn.Linear) but its head, and nothing else is"
            " adapted (experts that are one tensor, Conv1D); use model.adapter = 'none'"
        )
    lm.requires_grad_(False)
    for layer in wanted.values():
        _adapt(layer, adapter)


def _adapt(layer: nn.Linear, adapter: Adapter) -> None:
    # as FSDP does: the module stays the same object, under all its names, and only its forward is
    # replaced
    layer.__class__ = AdaptedLinear
    assert isinstance(layer, AdaptedLinear)
    with torch.device(layer.weight.device):
        layer.lora_A = nn.Linear(layer.in_features, adapter.rank, bias=False, dtype=torch.float32)
        layer.lora_B = nn.Linear(adapter.rank, layer.out_features, bias=False, dtype=torch.float32)
    layer.scale = adapter.scale


def _is_named(name: str, targets: tuple[str, ...]) -> bool:
    """True when a layer is one of the targets, by peft's rule; without targets every layer is."""
    return not targets or any(name == target or name.endswith(f".{target}") for target in targets)


def linear_layers(lm: Any) -> dict[str, nn.Linear]:
    """The layers that can have an adapter, by name: torch's linear layers, without the head,
    PASSED_BY, and layers that share their weight with another module.
    """
    head = lm.get_output_embeddings()
    tied = {id(lm.get_parameter(name)) for name in {*tied_names(lm).values()}}
    return {
        name: module
        for name, module in lm.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and id(module.weight) not in tied
        and not name.endswith(PASSED_BY)
    }


def target_names(lm: Any) -> list[str]:
    """The names by which peft finds exactly the adapted layers of `lm`: their last parts, or full
    names where other layers have the same last part.
    """
    adapted = {name for name, module in lm.named_modules() if isinstance(module, AdaptedLinear)}
    ends = {name.rpartition(".")[2] for name in adapted}
    alike = {name for name, _ in lm.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if alike == adapted else adapted)


def new_adapter_rows(seed: int, name: str, shape: list[int], start: int, end: int) -> Tensor:
    """Rows of a new adapter's matrix, initialised as in peft: A uniform in ±1 / sqrt(I), B zero.

    The same for any number of ranks.
    """
    if name.endswith(".lora_B.weight"):
        return torch.zeros(end - start, *shape[1:])
    draws = torch.Generator().manual_seed(data_seed(seed, name))
    return ((2 * torch.rand(shape, generator=draws) - 1) / math.sqrt(shape[1]))[start:end]


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Merges an adapter into a layer's weight: `W + scale B A`, in `dtype`, in which the trainer
    has all three matrices.
    """
    weight_OI, a_RI, b_OR = (tensor.to(dtype).float() for tensor in (weight_OI, a_RI, b_OR))
    return (weight_OI + scale * (b_OR @ a_RI)).to(dtype)
