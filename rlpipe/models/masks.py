"""Attention masks that we make: where keys are kept, and where texts branch. All others a model makes itself, from positions.

Legend: R rows, L tokens of a row, Q queries, K keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rlpipe.types import UserError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
AttentionMask = Tensor | dict[str, Tensor]  # one, or one for every kind of layers


def own_branch(branch_RL: Tensor, branches: int) -> Tensor:
    """Which keys are of a query's own branch, or of the branch 0 of its text, R x L x L. A branch is `branches` times its text, and its number."""
    key_R1L, query_RL1 = branch_RL[:, None, :], branch_RL[:, :, None]
    return (key_R1L == query_RL1) | (key_R1L == query_RL1 // branches * branches)


class Masks:
    """Which keys a query may see, by the kinds of a model's attention layers, in the form that its code takes.

    Windows are read from the config at every call. Legend: R rows, Q queries, K keys.
    """

    def __init__(self, lm: Any) -> None:
        self._config: PretrainedConfig = lm.config.get_text_config()
        self._additive = lm.config._attn_implementation == "eager"
        self._dtype = lm.dtype
        text = self._config
        window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
        self.kinds: list[str] = sorted(set(getattr(text, "layer_types", None) or [SLIDING if window else FULL]))
        if odd := set(self.kinds) - {FULL, SLIDING, CHUNKED}:
            raise UserError(f"layers of type {sorted(odd)} keep more than keys and values")
        self.named = len(self.kinds) > 1  # whether the model wants a dict of masks

    def of(self, query_RQ1: Tensor, key_K: Tensor, seen_RQK: Tensor | None = None) -> AttentionMask:
        """The attention mask of queries at these positions, R x 1 x Q x K; only of what else is `seen`."""
        visible = {kind: self._visible(kind, query_RQ1, key_K) for kind in self.kinds}
        masks = {kind: self._form((seen if seen_RQK is None else seen & seen_RQK)[:, None]) for kind, seen in visible.items()}
        return masks if self.named else masks[self.kinds[0]]

    def of_branches(self, positions_RL: Tensor, branch_RL: Tensor, branches: int) -> AttentionMask:
        """That of rows in which texts branch: a token sees those before it in its own branch, and in the branch 0 of its text."""
        return self.of(positions_RL[:, :, None], positions_RL[:, None, :], own_branch(branch_RL, branches))

    def _visible(self, kind: str, query_RQ1: Tensor, key_K: Tensor) -> Tensor:
        visible = key_K <= query_RQ1
        if kind == SLIDING:
            return visible & (key_K > query_RQ1 - self._config.sliding_window)
        if kind == CHUNKED:
            return visible & (key_K // self._config.attention_chunk_size == query_RQ1 // self._config.attention_chunk_size)
        return visible

    def _form(self, visible: Tensor) -> Tensor:
        if not self._additive:
            return visible
        nothing = torch.zeros((), dtype=self._dtype, device=visible.device)
        return torch.where(visible, nothing, torch.finfo(self._dtype).min)
