"""Context parallelism (Ulysses): each rank of a group has a slice of every row's tokens, and in
attention all tokens of a part of the heads.

Attention, its masks and its kernels are the same as without context parallelism. Legend: R rows, L
tokens of a row, S tokens of a slice, A heads, D head dimension, N scored positions, M scored
positions of a slice.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlpipe.base.errors import UserError
from rlpipe.models.causal import other_windows
from rlpipe.models.flex import CONTEXT, FLEX, choose_attention, supports_flex

SDPA = "sdpa"
HEADS, TOKENS = 1, 2  # dimensions of queries, keys and values
OUT_TOKENS, OUT_HEADS = 1, 2  # and of the output of attention


@dataclass(frozen=True)
class Slice:
    """One rank's slice of a microbatch. `place_M`: the indices of its scored positions among all
    N.
    """

    tokens_RS: Tensor
    positions_RS: Tensor
    source_M: Tensor
    target_M: Tensor
    place_M: Tensor


@dataclass(frozen=True)
class ContextGroup:
    """A context-parallel group of `ranks` ranks, and this rank's index in it, which is also the
    index of its slice.
    """

    group: dist.ProcessGroup | None  # None in a plan or a test, which send nothing
    ranks: int
    rank: int

    def send(self, parts_C: Tensor) -> Tensor:
        """All-to-all: sends part i to rank i; part i of the result is from rank i."""
        received_C = torch.empty_like(parts_C)
        dist.all_to_all_single(received_C, parts_C, group=self.group)
        return received_C

    def add(self, values: Tensor) -> Tensor:
        """The sum over the group."""
        dist.all_reduce(values, group=self.group)
        return values

    def own(self, slice_N: Tensor) -> Tensor:
        """The indices of this rank's positions. `slice_N`: the index of the slice of each
        position.
        """
        return (slice_N == self.rank).nonzero().squeeze(-1)

    def is_single(self, positions_RL: Tensor) -> bool:
        """True when every row is one text."""
        return bool((positions_RL == torch.arange(positions_RL.shape[1], device=positions_RL.device)).all())

    def filled(
        self, tokens_RL: Tensor, positions_RL: Tensor, branch_RL: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Pads rows to a length that slices of equal length divide.

        The padding continues the positions of the last text: no token sees it, and nothing is
        scored there.
        """
        room = -tokens_RL.shape[1] % self.ranks
        behind = positions_RL[:, -1:] + torch.arange(1, room + 1, device=positions_RL.device)
        positions_RL = torch.cat([positions_RL, behind], 1)
        return (
            functional.pad(tokens_RL, (0, room)),
            positions_RL,
            None if branch_RL is None else functional.pad(branch_RL, (0, room)),
        )

    def slice(self, tokens_RL: Tensor, positions_RL: Tensor, source_N: Tensor, target_N: Tensor, length: int) -> Slice:
        """This rank's slice of padded rows.

        `source_N`: flat positions in the rows before padding, of `length` tokens each.
        """
        width = tokens_RL.shape[1] // self.ranks
        columns = slice(self.rank * width, (self.rank + 1) * width)
        row_N, column_N = source_N // length, source_N % length
        place_M = self.own(column_N // width)
        source_M = (row_N * width + column_N - columns.start).index_select(0, place_M)
        own = tokens_RL[:, columns].contiguous(), positions_RL[:, columns].contiguous()
        return Slice(*own, source_M, target_N.index_select(0, place_M), place_M)

    def joined(self, first_M: Tensor, second_M: Tensor, place_M: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Joins the values that each rank has at its scored positions, to values at all N, on all
        ranks.

        The gradient of a value goes only to the rank that computed it, from that rank's own loss:
        so all ranks of the group must compute the same loss of the values, and their gradients must
        be summed.
        """
        values_M2 = torch.stack([first_M, second_M], -1)
        joined_N2 = _Sum.apply(values_M2.new_zeros(count, 2).index_put((place_M,), values_M2), self)
        # clone: FSDP puts hooks on what a policy returns, and warns about views
        return joined_N2[:, 0].clone(), joined_N2[:, 1].clone()


def join_context_group(size: int, ranks: int, rank: int, device: torch.device) -> ContextGroup | None:
    """Returns the context-parallel group of this rank, `ranks` neighbouring ranks; None for `ranks`
    = 1.

    A collective of all ranks.
    """
    assert size % ranks == 0, f"context-parallel groups of {ranks} of {size} ranks"
    if ranks == 1:
        return None
    mesh = init_device_mesh(device.type, (size // ranks, ranks), mesh_dim_names=("group", "member"))
    return ContextGroup(mesh.get_group("member"), ranks, rank % ranks)


def check_context_group(config: PretrainedConfig, ranks: int) -> None:
    """Raises UserError, naming the heads, for a model whose heads `ranks` ranks cannot share
    evenly.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if ranks > 1 and isinstance(heads, int) and heads % ranks:
        shares = [str(count) for count in range(1, ranks + 1) if heads % count == 0]
        raise UserError(
            f"trainer.context_ranks={ranks}: the {heads} attention heads (num_attention_heads) of {config.model_type}"
            f" cannot be divided evenly among {ranks} ranks; use {' or '.join(shares)}"
        )


def use_context_group(lm: Any, context: ContextGroup) -> None:
    """Switches the attention layers of `lm` to context parallelism.

    UserError naming a family whose attention is not called through transformers' registry, or does
    not take our masks.
    """
    check_context_group(lm.config, context.ranks)
    own, family = lm.config.get_text_config()._attn_implementation, lm.config.model_type
    fault = f"its own code bounds attention ({', '.join(windows)})" if (windows := other_windows(lm.config)) else ""
    if not lm._can_set_attn_implementation() or not (own == SDPA or supports_flex(lm)):
        fault = f"its attention ({own}) is computed in its own way"
    if fault:
        raise UserError(
            f"trainer.context_ranks={context.ranks}: rows of {family} cannot be split over a context-parallel group:"
            f" {fault}; use trainer.context_ranks = 1"
        )
    for layer in lm.modules():  # `attend` gets the layer as an argument
        layer._context = context
    choose_attention(lm, CONTEXT + (SDPA if own == SDPA else FLEX))


def uses_context_group(lm: Any) -> bool:
    """True when the attention layers of `lm` use context parallelism."""
    return lm.config.get_text_config()._attn_implementation.startswith(CONTEXT)


class _Part:
    """An attention layer with a part of the heads; all other attributes are the layer's."""

    def __init__(self, layer: nn.Module, num_key_value_groups: int) -> None:
        self._layer, self.num_key_value_groups = layer, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def attend(
    inner: str,
    layer: Any,
    query_RASD: Tensor,
    key_RASD: Tensor,
    value_RASD: Tensor,
    attention_mask: object,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer; it returns R x S x A x D.
    ValueError for a layer that a context-parallel group cannot share.

    `attention_mask`: of whole rows; `inner`: the name of the attention that computes them. Key
    heads that the ranks cannot share evenly are repeated first.
    """
    context: ContextGroup = layer._context
    heads, kept = query_RASD.shape[HEADS], key_RASD.shape[HEADS]
    if heads % context.ranks or heads % kept or others.get("position_bias") is not None:
        raise ValueError(f"an attention layer of {heads} heads cannot be split over {context.ranks} ranks")
    times = math.lcm(kept, context.ranks) // kept
    if times > 1:
        key_RASD, value_RASD = (part.repeat_interleave(times, HEADS) for part in (key_RASD, value_RASD))
    query, key, value = _Exchange.apply(context, HEADS, TOKENS, query_RASD, key_RASD, value_RASD)
    if others.get("s_aux") is not None:
        others["s_aux"] = others["s_aux"].chunk(context.ranks)[context.rank]
    part = _Part(layer, query.shape[HEADS] // key.shape[HEADS])
    out, _ = ALL_ATTENTION_FUNCTIONS[inner](part, query, key, value, attention_mask, **others)
    return _Exchange.apply(context, OUT_TOKENS, OUT_HEADS, out)[0], None


def exchanged(context: ContextGroup, parts: tuple[Tensor, ...], split: int, joined: int) -> tuple[Tensor, ...]:
    """All-to-all of each part: splits it along the dimension `split`, sends share i to rank i, and
    concatenates the received shares along the dimension `joined`.
    """
    shares = [torch.stack(part.chunk(context.ranks, split)) for part in parts]
    sizes = [share[0].numel() for share in shares]
    received = context.send(torch.cat([share.flatten(1) for share in shares], 1))
    came = [piece.reshape(share.shape) for piece, share in zip(received.split(sizes, 1), shares, strict=True)]
    return tuple(torch.cat(piece.unbind(), joined) for piece in came)


class _Exchange(torch.autograd.Function):
    """Exchanges all parts in one collective: with several, ranks whose gradients are ready in
    different orders could deadlock.
    """

    @staticmethod
    def forward(ctx: Any, context: ContextGroup, split: int, joined: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.context, ctx.split, ctx.joined = context, split, joined
        return exchanged(context, parts, split, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *exchanged(ctx.context, gradients, ctx.joined, ctx.split)


class _Sum(torch.autograd.Function):
    """The sum over the group; its gradient is this rank's own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, context: ContextGroup) -> Tensor:
        return context.add(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


for attention in (SDPA, FLEX):
    AttentionInterface.register(CONTEXT + attention, functools.partial(attend, attention))
