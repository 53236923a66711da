"""Attention by torch's flex_attention, which computes the mask tile by tile, so that an L x L mask
never exists.

The block mask lists the pairs of blocks that see each other, B x B numbers for L = 128 B tokens;
within a block a rule on four numbers per token decides.

Legend: R rows, L tokens of a row, P tokens of a row filled up to whole blocks, B blocks, Q query
blocks, K key blocks, A heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface

from rlpipe.base.errors import UserError

# for a name with flex_attention in it transformers checks that the family supports flex_attention
FLEX = "rlpipe_flex_attention"
CONTEXT = "rlpipe_context_"  # prefix of the attention of a context-parallel group (context_parallel.py)
BLOCK = 128
# there is a kernel for each of: one row or several, one block or several, with or without gradient;
# for a policy, its reference and the tests at load
KERNELS_MAX = 64


def use_flex(lm: Any) -> None:
    """Switches the attention of `lm` to flex_attention.

    UserError naming a family whose code does not support it.
    """
    if not supports_flex(lm):
        raise UserError(f"model config: {lm.config.model_type} does not support flex_attention")
    before = lm.config._attn_implementation
    lm._before_flex = before
    choose_attention(lm, CONTEXT + FLEX if before.startswith(CONTEXT) else FLEX)


def supports_flex(lm: Any) -> bool:
    """True when the family's code of `lm` supports flex_attention."""
    return lm._supports_flex_attn and lm._can_set_attn_implementation()


def uses_flex(lm: Any) -> bool:
    """True when `lm` computes its attention by flex_attention."""
    return lm.config.get_text_config()._attn_implementation.endswith(FLEX)


def leave_flex(lm: Any) -> None:
    """Restores the attention that `lm` had before `use_flex`."""
    if uses_flex(lm):
        lm.set_attn_implementation(lm._before_flex)


def choose_attention(lm: Any, name: str) -> None:
    """Switches the attention of `lm` to the implementation `name`; its own one is remembered for
    `own_attention`.
    """
    if not hasattr(lm, "_own_attention"):
        lm._own_attention = lm.config._attn_implementation
    lm.set_attn_implementation(name)


def leave_attention(lm: Any) -> None:
    """Restores the attention that `lm` had before `choose_attention`."""
    lm.set_attn_implementation(lm._own_attention)


@contextlib.contextmanager
def own_attention(lm: Any) -> Iterator[None]:
    """Within the body `lm` computes attention by its own code."""
    chosen = lm.config._attn_implementation
    own = getattr(lm, "_own_attention", chosen)
    if own != chosen:
        lm.set_attn_implementation(own)
    try:
        yield
    finally:
        if own != chosen:
            lm.set_attn_implementation(chosen)


def texts_of(positions_RL: Tensor) -> Tensor:
    """The index of each token's text in its row: a text begins at each position that is not the
    previous one plus 1.
    """
    return (positions_RL.diff(dim=-1, prepend=positions_RL[:, :1] - 1) != 1).cumsum(-1)


def block_mask(own_RL: Tensor, root_RL: Tensor, positions_RL: Tensor, first_RL: Tensor) -> BlockMask:
    """The block mask with which a token sees itself and the earlier tokens of its branch `own` and
    of its prompt `root`, from position `first` on.
    """
    room = -own_RL.shape[1] % BLOCK
    # the padding of the last block is a text of its own
    own_RP, root_RP = (functional.pad(part, (0, room), value=-1) for part in (own_RL, root_RL))
    positions_RP, first_RP = (functional.pad(part, (0, room)) for part in (positions_RL, first_RL))

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = own_RP[row, key]
        related = (own == own_RP[row, query]) | (own == root_RP[row, query])
        return related & (key <= query) & (positions_RP[row, key] >= first_RP[row, query])

    own_low, own_high = _bounds(own_RP)
    root_low, root_high = _bounds(root_RP)
    position_low, position_high = _bounds(positions_RP)
    first_low, first_high = _bounds(first_RP)
    row = torch.arange(own_low.shape[1], device=own_RL.device)
    key, query = row[None, None, :], row[None, :, None]

    def meet(low_RB: Tensor, high_RB: Tensor) -> Tensor:
        """True where a key block may have a branch between `low_RB` and `high_RB`, R x Q x K."""
        return (own_high[:, None, :] >= low_RB[:, :, None]) & (own_low[:, None, :] <= high_RB[:, :, None])

    def same(low_RB: Tensor, high_RB: Tensor) -> Tensor:
        """True where all tokens of a key block and of a query block are of one branch, R x Q x
        K.
        """
        one = (own_low == own_high)[:, None, :] & (low_RB == high_RB)[:, :, None]
        return one & (own_low[:, None, :] == low_RB[:, :, None])

    some = (key <= query) & (meet(own_low, own_high) | meet(root_low, root_high))
    some &= position_high[:, None, :] >= first_low[:, :, None]
    whole = (key < query) & (same(own_low, own_high) | same(root_low, root_high))
    whole &= position_low[:, None, :] >= first_high[:, :, None]
    return BlockMask.from_kv_blocks(*_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees)


def _bounds(values_RP: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value of each block, R x B."""
    blocks = values_RP.unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _listed(chosen_RQK: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen key blocks of each query block, R x 1 x Q, and the indices of the key
    blocks, the chosen ones first, R x 1 x Q x K."""
    order = chosen_RQK.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_RQK.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()


def try_kernels(lm: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Computes the forward and backward pass of attention over one block, with the heads of `lm`.

    UserError naming what the device has no kernel for. Without this test the fault would occur in a
    backward pass of sharded weights, and leave a part of the gradients.
    """
    text = lm.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int) or not heads:
        return
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    positions_RL = torch.arange(BLOCK, device=device)[None]
    text_RL = texts_of(positions_RL)
    mask = block_mask(text_RL, text_RL, positions_RL, torch.zeros_like(positions_RL))
    query, key, value = (
        torch.zeros((1, count, BLOCK, head_dim), device=device, dtype=dtype, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    )
    try:
        attend(lm, query, key, value, mask, scaling=head_dim**-0.5)[0].float().sum().backward()
    except RuntimeError as error:  # errors of torch's compiler, too
        place = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise UserError(
            f"{place} has no kernel for heads of {head_dim} in {str(dtype).split('.')[-1]} ({error!s:.300})"
        ) from error


@functools.cache
def compiled(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """flex_attention, compiled once for all lengths of rows.

    More than KERNELS_MAX kernels are an error: torch would otherwise run it uncompiled, with L x L
    numbers.
    """
    whole: Any = flex_attention
    kernels = torch.compile(whole, dynamic=True, fullgraph=True, backend=backend)

    def call(*given: Any, **named: Any) -> Any:
        # a kernel is specialised to the scale and the soft-cap of scores; this setting is per
        # thread
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=KERNELS_MAX):
            return kernels(*given, **named)

    return call


def attend(
    _module: nn.Module,
    query_RALD: Tensor,
    key_RALD: Tensor,
    value_RALD: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer; it returns R x L x A x D.
    ValueError for a layer without a block mask, or with dropout or a position bias.

    `s_aux`: the attention sink of each head.
    """
    asks_for_more = bool(others.get("dropout")) or others.get("position_bias") is not None
    if not isinstance(attention_mask, BlockMask) or asks_for_more:
        raise ValueError("an attention layer takes no mask of blocks, or more than a mask")
    length = query_RALD.shape[-2]
    room = attention_mask.shape[-1] - length
    query, key, value = (functional.pad(part, (0, 0, 0, room)) for part in (query_RALD, key_RALD, value_RALD))

    def capped(score: Tensor, *_place: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    how: dict[str, Any] = {"block_mask": attention_mask, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    # lse is returned even if unused: so the passes with and without gradient run the same kernel,
    # and give the same bits
    how |= {"score_mod": capped if softcap is not None else None, "return_aux": AuxRequest(lse=True)}
    # on a CPU, for tests: uncompiled, with all L x L scores
    out, aux = (compiled() if query.device.type == "cuda" else flex_attention)(query, key, value, **how)
    if s_aux is not None:
        out = (out * torch.sigmoid(aux.lse - s_aux[:, None])[..., None]).to(value.dtype)
    return out[:, :, :length].transpose(1, 2).contiguous(), None


AttentionInterface.register(FLEX, attend)
