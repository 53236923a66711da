"""Attention of a decode step over the slots that have requests; the products of the step have all
its rows, as their bits depend on the number of rows.

Legend: N layers, S rows of a step, U rows that have requests, A heads, H key-value heads, Q = 1
token of a row, L length, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SDPA, USED_ROWS = "sdpa", "rlpipe_used_rows"


class SlotCache:
    """One row of keys and values per slot; a decode step writes the first U rows, each at its own
    position, and reads whole rows.
    """

    def __init__(self, kv_N2UHLD: Tensor, position_S: Tensor) -> None:
        self.kv_N2UHLD = kv_N2UHLD
        self.position_U = position_S[: kv_N2UHLD.shape[2]]
        self.rows_U = torch.arange(self.position_U.shape[0], device=position_S.device)

    def update(
        self, key_SH1D: Tensor, value_SH1D: Tensor, layer_index: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of one layer; transformers calls it in each layer of a decode
        step."""
        keys_UHLD, values_UHLD = self.kv_N2UHLD[layer_index, 0], self.kv_N2UHLD[layer_index, 1]
        used = keys_UHLD.shape[0]
        keys_UHLD[self.rows_U, :, self.position_U] = key_SH1D[:used, :, 0]
        values_UHLD[self.rows_U, :, self.position_U] = value_SH1D[:used, :, 0]
        return keys_UHLD, values_UHLD

    def get_seq_length(self, *_: Any) -> int:
        return self.kv_N2UHLD.shape[4]


def use_slot_attention(lm: Any) -> bool:
    """Switches the attention of `lm` to `attend`. False, with nothing changed, where its family has
    attention of its own: a step then needs the keys of all its rows.
    """
    if lm.config.get_text_config()._attn_implementation != SDPA or not lm._can_set_attn_implementation():
        return False
    lm.set_attn_implementation(USED_ROWS)
    return True


def attend(
    module: nn.Module,
    query_SAQD: Tensor,
    key_UHLD: Tensor,
    value_UHLD: Tensor,
    attention_mask: Tensor | None,  # by this name in some families
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' function for torch's attention, over the first rows, as many as there are
    keys; it returns S x Q x A x D, with zeros in the other rows.
    """
    rows, used = query_SAQD.shape[0], key_UHLD.shape[0]
    out_UQAD, _ = sdpa_attention_forward(module, query_SAQD[:used], key_UHLD, value_UHLD, attention_mask, **others)
    return functional.pad(out_UQAD, (0, 0, 0, 0, 0, 0, 0, rows - used)), None


AttentionInterface.register(USED_ROWS, attend)
AttentionMaskInterface.register(USED_ROWS, sdpa_mask)
