"""Keys and values: the slots that transformers writes to while it decodes, and the store of computed prompts.

Legend: N layers, R rows of a prefill block, S slots, H key-value heads, P padded prompt, L bucket length, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PREFIX_BYTES_MAX = 256 << 20


class SlotCache:
    """One row of keys and values per slot; every decode step writes each row at its own position and reads whole rows."""

    def __init__(self, layers: int, heads: int, head_size: int, shape: tuple[int, int], like: Tensor) -> None:
        slots, length = shape
        # zeros and not empty: a masked NaN still poisons a row, 0 * NaN = NaN
        self.kv_N2SHLD = torch.zeros(layers, 2, slots, heads, length, head_size, dtype=like.dtype, device=like.device)
        self.rows_S = torch.arange(slots, device=like.device)
        self.position_S = torch.zeros(slots, dtype=torch.long, device=like.device)

    def update(self, key_SH1D: Tensor, value_SH1D: Tensor, layer_index: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys_SHLD, values_SHLD = self.kv_N2SHLD[layer_index, 0], self.kv_N2SHLD[layer_index, 1]
        keys_SHLD[self.rows_S, :, self.position_S] = key_SH1D[:, :, 0]
        values_SHLD[self.rows_S, :, self.position_S] = value_SH1D[:, :, 0]
        return keys_SHLD, values_SHLD

    def get_seq_length(self, *_: Any) -> int:
        return self.kv_N2SHLD.shape[4]

    def fill(self, slots: list[int], block: PrefixBlock, rows: list[int]) -> None:
        """Copies computed prompts into slots."""
        assert len(slots) == len(rows) and block.padded <= self.kv_N2SHLD.shape[4], "a prompt longer than its bucket"
        device = self.rows_S.device
        slots_index, rows_index = torch.tensor(slots, device=device), torch.tensor(rows, device=device)
        self.kv_N2SHLD[:, :, slots_index, :, : block.padded] = block.kv_N2RHPD[:, :, rows_index]


@dataclass(frozen=True, eq=False)
class PrefixBlock:
    """Prompts computed together: their keys and values, and the logits after each."""

    kv_N2RHPD: Tensor
    logits_RV: Tensor

    @property
    def padded(self) -> int:
        return self.kv_N2RHPD.shape[4]

    @property
    def num_bytes(self) -> int:
        return self.kv_N2RHPD.nbytes + self.logits_RV.nbytes


class PrefixStore:
    """Computed prompts by their tokens, bounded in bytes, oldest out first. Exact prompts only: a prefix would be another shape."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[tuple[int, ...], ...], PrefixBlock] = OrderedDict()
        self._rows: dict[tuple[int, ...], tuple[PrefixBlock, int]] = {}
        self._bytes = 0

    def get(self, prompt: tuple[int, ...]) -> tuple[PrefixBlock, int] | None:
        return self._rows.get(prompt)

    def add(self, prompts: list[tuple[int, ...]], block: PrefixBlock) -> None:
        """Keeps a block; the oldest ones make room, never the new one."""
        assert not any(prompt in self._rows for prompt in prompts), "a prompt is computed once"
        while self._blocks and self._bytes + block.num_bytes > PREFIX_BYTES_MAX:
            old_prompts, old = self._blocks.popitem(last=False)
            self._bytes -= old.num_bytes
            for prompt in old_prompts:
                del self._rows[prompt]
        self._blocks[tuple(prompts)] = block
        self._bytes += block.num_bytes
        for row, prompt in enumerate(prompts):
            self._rows[prompt] = (block, row)
        assert self._bytes <= max(PREFIX_BYTES_MAX, block.num_bytes), "the store outgrew its bound"

    def clear(self) -> None:
        self._blocks.clear()
        self._rows.clear()
        self._bytes = 0
