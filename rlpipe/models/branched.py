"""Attention over rows of texts on a CPU, piece by piece, so that a mask of L x L never exists, but
of a text that is longer than a window.

A piece is a run of tokens that see each other and, as far as they branch from a prompt, the prompt.
Pieces of similar lengths are computed together: their tokens are gathered into a batch, filled up
to the longest of them.

Legend: R rows, L tokens of a row, N = R x L tokens, S pieces of a batch, Q queries of a piece, P
tokens of its prompt, K = P + Q keys, A heads, H heads of keys, D head dimension.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlpipe.models.flex import choose_attention

BRANCHED = "rlpipe_branched"
# pairs of tokens that cost as much time as one more batch; measured with heads of 32 and of 64
BATCH_PAIRS = 2**12
WASTE = 0.25  # the share of pairs with filling that a batch may have, beyond BATCH_PAIRS
# a batch of several pieces has no more keys and pairs than this; so many numbers of keys, values
# and scores of a batch, 4 MiB, are kept for the backward pass and not computed again
KEYS_MAX, PAIRS_MAX, KEPT = 2**16, 2**21, 2**20
# pairs of a piece up to which two products and a softmax are faster than torch's flash attention
PRODUCT_PAIRS = 2**15


@dataclass(frozen=True, eq=False)
class PieceBatch:
    """Pieces of similar lengths.

    `mask`: S x Q x K, or 1 x Q x K where it is the same for all: of short pieces 0 where a query
    sees a key and -inf elsewhere, fp32; of long ones True where it does. None where each query sees
    all keys up to its own place.
    """

    query_SQ: Tensor  # places in N
    key_SK: Tensor
    mask: Tensor | None


class BranchedMask(Tensor):
    """The batches of some rows in the form of a mask: transformers passes a tensor of four
    dimensions on as it is.
    """

    batches: list[PieceBatch]
    place_N: Tensor  # of each token among the queries of all batches


def use_branched(lm: Any) -> None:
    """Switches the attention of `lm` to this one."""
    choose_attention(lm, BRANCHED)


def supports_branched(lm: Any) -> bool:
    """True when the family's code of `lm` calls torch's attention by its own interface."""
    own = lm.config.get_text_config()._attn_implementation
    return own == "sdpa" and lm._can_set_attn_implementation()


def uses_branched(lm: Any) -> bool:
    """True when `lm` computes its attention by batches of pieces."""
    return lm.config.get_text_config()._attn_implementation == BRANCHED


def branched_mask(own_RL: Tensor, root_RL: Tensor, positions_RL: Tensor, first_RL: Tensor) -> BranchedMask:
    """The mask with which a token sees itself and the earlier tokens of its branch `own` and of
    its prompt `root`, from position `first` on.
    """
    pieces = _pieces(own_RL.numpy(), root_RL.numpy())
    positions, first = positions_RL.numpy().ravel(), first_RL.numpy().ravel()
    batches, place_N, num_queries = [], np.zeros(own_RL.numel(), dtype=np.int64), 0
    for chosen in _similar(pieces.length, pieces.num_shared):
        part = pieces.of(chosen)
        query_SQ = part.start[:, None] + np.arange(part.length.max())
        is_query = query_SQ < (part.start + part.length)[:, None]
        place_N[query_SQ[is_query]] = num_queries + np.flatnonzero(is_query)
        num_queries += query_SQ.size
        shared_SP = part.root[:, None] + np.arange(part.num_shared.max())
        places = [
            np.minimum(part_places, place_N.size - 1)
            for part_places in (query_SQ, np.concatenate([shared_SP, query_SQ], 1))
        ]
        mask, (query, key) = _mask(part, places, positions, first), map(torch.from_numpy, places)
        batches.append(PieceBatch(query, key, None if mask is None else torch.from_numpy(mask)))
    # bool: FSDP makes a copy of other numbers in the dtype of the forward pass
    made = torch.zeros((len(own_RL), 1, 1, 1), dtype=torch.bool).as_subclass(BranchedMask)
    made.batches, made.place_N = batches, torch.from_numpy(place_N)
    return made


@dataclass(frozen=True, eq=False)
class _Pieces:
    start: np.ndarray  # the place of its first token
    length: np.ndarray
    root: np.ndarray  # the place of its prompt's first token
    num_shared: np.ndarray  # the tokens of its prompt; 0 without one

    def of(self, chosen: np.ndarray) -> _Pieces:
        return _Pieces(*(part[chosen] for part in (self.start, self.length, self.root, self.num_shared)))


def _pieces(own_RL: np.ndarray, root_RL: np.ndarray) -> _Pieces:
    row_RL = np.arange(len(own_RL))[:, None] * (own_RL.max(initial=0) + 1)  # no piece goes over the end of a row
    own_N, root_N = (own_RL + row_RL).ravel(), (root_RL + row_RL).ravel()
    start = np.flatnonzero(np.diff(own_N, prepend=own_N[:1] - 1))
    length = np.diff(start, append=own_N.size)
    by_branch = np.argsort(own_N[start], kind="stable")
    sorted_own = own_N[start][by_branch]
    at_root = np.searchsorted(sorted_own, root_N[start]).clip(max=len(start) - 1)
    has_root = (sorted_own[at_root] == root_N[start]) & (own_N[start] != root_N[start])
    root = by_branch[at_root]
    return _Pieces(start, length, np.where(has_root, start[root], 0), np.where(has_root, length[root], 0))


def _similar(length: np.ndarray, num_shared: np.ndarray) -> list[np.ndarray]:
    """The indices of the pieces of each batch: in the order of their lengths, as many as have
    little filling.
    """
    order, begun, needed, most_shared = np.lexsort((num_shared, length)), 0, 0, 0
    batches: list[np.ndarray] = []
    for place, (own, shared) in enumerate(zip(length[order].tolist(), num_shared[order].tolist(), strict=True)):
        needed, most_shared = needed + own * (shared + own), max(most_shared, shared)
        filled = (place + 1 - begun) * own * (most_shared + own)
        is_full = filled > PAIRS_MAX or (place + 1 - begun) * (most_shared + own) > KEYS_MAX
        if place > begun and (is_full or filled - needed > BATCH_PAIRS + WASTE * needed):
            batches.append(order[begun:place])
            begun, needed, most_shared = place, own * (shared + own), shared
    return [*batches, order[begun:]]


def _mask(part: _Pieces, places: list[np.ndarray], positions: np.ndarray, first: np.ndarray) -> np.ndarray | None:
    """See `PieceBatch.mask`."""
    (query_SQ, key_SK), num_queries = places, places[0].shape[1]
    num_shared, is_bounded = key_SK.shape[1] - num_queries, (first[query_SQ] > 0).any()
    if not (num_shared or is_bounded):
        return None
    key_K = np.arange(key_SK.shape[1])
    sees = key_K <= np.arange(num_queries)[:, None] + num_shared
    if not is_bounded and (part.num_shared == num_shared).all():
        return _for_kernel(sees[None])
    sees = sees & ((key_K >= num_shared) | (key_K < part.num_shared[:, None]))[:, None]
    if is_bounded:
        # a query that is filling sees at least itself, as a softmax needs
        itself = key_K == np.arange(num_queries)[:, None] + num_shared
        sees &= (positions[key_SK][:, None] >= first[query_SQ][:, :, None]) | itself
    return _for_kernel(sees)


def _for_kernel(sees: np.ndarray) -> np.ndarray:
    is_short = sees[0].size <= PRODUCT_PAIRS
    return np.where(sees, np.float32(0), np.float32(-np.inf)) if is_short else sees


def attend(
    _module: nn.Module,
    query_RALD: Tensor,
    key_RHLD: Tensor,
    value_RHLD: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer; it returns R x L x A x D.
    ValueError for a layer without such a mask, or with more than a mask.
    """
    more = [name for name in ("softcap", "s_aux", "position_bias", "cache") if others.get(name) is not None]
    if not isinstance(attention_mask, BranchedMask) or more or others.get("dropout"):
        raise ValueError(f"an attention layer takes no mask of pieces, or more than a mask ({more})")
    rows, heads, length, _ = query_RALD.shape
    query_N, key_N, value_N = (
        part.transpose(1, 2).reshape(rows * length, -1) for part in (query_RALD, key_RHLD, value_RHLD)
    )
    scale = query_RALD.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    for batch in attention_mask.batches:
        pairs = batch.query_SQ.numel() * batch.key_SK.shape[1] * heads
        is_kept = 2 * batch.key_SK.numel() * key_N.shape[1] + pairs <= KEPT or not torch.is_grad_enabled()
        given = query_N, key_N, value_N, batch, heads, key_RHLD.shape[1], scale
        again = functools.partial(checkpoint, _of_batch, use_reentrant=False, preserve_rng_state=False)
        parts.append((_of_batch if is_kept else again)(*given))
    out_N = torch.cat(parts).index_select(0, attention_mask.place_N)
    return out_N.view(rows, length, heads, -1), None


def _gathered(part_N: Tensor, places: Tensor, heads: int) -> Tensor:
    """The rows at these places, as places x heads x D."""
    return part_N.index_select(0, places.view(-1)).view(*places.shape, heads, -1)


def _of_batch(
    query_N: Tensor, key_N: Tensor, value_N: Tensor, batch: PieceBatch, heads: int, key_heads: int, scale: float
) -> Tensor:
    """The outputs of all queries of a batch, one after the other, each A D."""
    query_SQAD = _gathered(query_N, batch.query_SQ, heads)
    key_SKHD, value_SKHD = (_gathered(part, batch.key_SK, key_heads) for part in (key_N, value_N))
    mask, (pieces, queries), keys = batch.mask, batch.query_SQ.shape, batch.key_SK.shape[1]
    if queries * keys > PRODUCT_PAIRS:
        out_SAQD = functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (query_SQAD, key_SKHD, value_SKHD)),
            attn_mask=None if mask is None else mask[:, None],
            is_causal=mask is None,
            scale=scale,
            enable_gqa=heads != key_heads,
        )
        return out_SAQD.transpose(1, 2).reshape(pieces * queries, -1)
    # the queries of all heads that share a head of keys are rows of one product; scores are fp32,
    # as bf16 has 8 bits
    exact = torch.promote_types(query_SQAD.dtype, torch.float32)
    query = (query_SQAD.to(exact) * scale).view(pieces, queries, key_heads, -1, query_SQAD.shape[-1])
    query = query.permute(0, 2, 3, 1, 4).reshape(pieces * key_heads, -1, query.shape[-1])
    key, value = (part.transpose(1, 2).reshape(pieces * key_heads, keys, -1) for part in (key_SKHD, value_SKHD))
    scores = torch.bmm(query, key.to(exact).transpose(1, 2))
    if mask is None:
        mask = scores.new_full((queries, keys), -torch.inf).triu(1)[None]
    shares = (scores.view(pieces, heads, queries, keys) + mask[:, None]).softmax(-1)
    out = torch.bmm(shares.to(value.dtype).view(scores.shape), value).view(pieces, heads, queries, -1)
    return out.transpose(1, 2).reshape(pieces * queries, -1)


AttentionInterface.register(BRANCHED, attend)
