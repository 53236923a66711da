"""The attention masks that we make ourselves: for a key cache, for texts that branch, and for
flex_attention.

A model makes all other masks itself, from positions.

Legend: R rows, L tokens of a row, Q queries, K keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig

from rlpipe.base.errors import UserError
from rlpipe.models.branched import branched_mask, uses_branched
from rlpipe.models.flex import block_mask, texts_of, uses_flex

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# one for all layers, or one for each kind of layer
AttentionMask = Tensor | BlockMask | dict[str, Tensor] | dict[str, BlockMask]


def own_branch(branch_RL: Tensor, branches: int) -> Tensor:
    """True where a key is in the query's own branch, or in branch 0 of its text, R x L x L.

    `branch_RL`: `branches` times the index of the text, plus the index of the branch in it.
    """
    key_R1L, query_RL1 = branch_RL[:, None, :], branch_RL[:, :, None]
    return (key_R1L == query_RL1) | (key_R1L == query_RL1 // branches * branches)


class Masks:
    """Makes the masks of the keys that a query may see, per kind of attention layer of a model, in
    the form that its code takes.

    Windows are read from the config at every call. Legend: R rows, Q queries, K keys.
    """

    def __init__(self, lm: Any) -> None:
        self._flex, self._branched = uses_flex(lm), uses_branched(lm)
        self._config: PretrainedConfig = lm.config.get_text_config()
        self._additive = lm.config._attn_implementation == "eager"
        self._dtype = lm.dtype
        text = self._config
        window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
        self.kinds: list[str] = sorted(set(getattr(text, "layer_types", None) or [SLIDING if window else FULL]))
        if odd := set(self.kinds) - {FULL, SLIDING, CHUNKED}:
            raise UserError(f"layers of type {sorted(odd)} keep more than keys and values")
        self.named = len(self.kinds) > 1  # the model takes a dict of masks

    def of(self, query_RQ1: Tensor, key_K: Tensor, seen_RQK: Tensor | None = None) -> AttentionMask:
        """The attention mask of queries at these positions, R x 1 x Q x K; `seen_RQK` restricts it
        further.
        """
        visible = {kind: self._visible(kind, query_RQ1, key_K) for kind in self.kinds}
        masks = {
            kind: self._form((seen if seen_RQK is None else seen & seen_RQK)[:, None]) for kind, seen in visible.items()
        }
        return masks if self.named else masks[self.kinds[0]]

    @property
    def whole(self) -> bool:
        """True when all layers see all earlier tokens: rows of one text each then need no mask."""
        return self.kinds == [FULL]

    def of_rows(self, positions_RL: Tensor, branch_RL: Tensor | None, branches: int) -> AttentionMask:
        """The attention mask of rows of texts. In a text that branches, a token sees the earlier
        tokens of its own branch, and of branch 0 of its text.
        """
        own_RL = texts_of(positions_RL) * branches if branch_RL is None else branch_RL
        if not (self._flex or self._branched):
            return self.of(positions_RL[:, :, None], positions_RL[:, None, :], own_branch(own_RL, branches))
        root_RL = own_RL // branches * branches
        by_kind = {kind: (own_RL, root_RL, positions_RL, self._first(kind, positions_RL)) for kind in self.kinds}
        if self._flex:
            blocks = {kind: block_mask(*given) for kind, given in by_kind.items()}
            return blocks if self.named else blocks[self.kinds[0]]
        pieces: dict[str, Tensor] = {kind: branched_mask(*given) for kind, given in by_kind.items()}
        return pieces if self.named else pieces[self.kinds[0]]

    def _visible(self, kind: str, query_RQ1: Tensor, key_K: Tensor) -> Tensor:
        visible = key_K <= query_RQ1
        return visible if kind == FULL else visible & (key_K >= self._first(kind, query_RQ1))

    def _first(self, kind: str, positions: Tensor) -> Tensor:
        """The first position that a query at each of these positions sees."""
        if kind == SLIDING:
            return positions - self._config.sliding_window + 1
        if kind == CHUNKED:
            return positions // self._config.attention_chunk_size * self._config.attention_chunk_size
        return torch.zeros_like(positions)

    def _form(self, visible: Tensor) -> Tensor:
        if not self._additive:
            return visible
        nothing = torch.zeros((), dtype=self._dtype, device=visible.device)
        return torch.where(visible, nothing, torch.finfo(self._dtype).min)
