"""The model behind the engine: forward passes whose shape depends on nothing but the request itself.

A matrix product gives a row other bits when the number of rows changes. So a prompt is always computed in a block
of `block_rows(P)` rows of P tokens, and a decode step always runs all slots of its bucket; unused rows are padding.

Legend: R rows of a block, S slots, P padded prompt length, L bucket length, V vocabulary, K kept positions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from rlpipe.engines.local.checkpoint import check_same_architecture, copy_into, read_checkpoint, read_config
from rlpipe.engines.local.kvcache import PrefixBlock, SlotCache
from rlpipe.types import UserError

PROMPT_STEP = 32
BUCKET_STEP = 64
BLOCK_TOKENS = 128
SLOT_TOKENS_MAX = 32768
SLOTS_MIN, SLOTS_MAX = 16, 128
KEPT = 8  # logits rows per prompt: below 8 rows a product takes another code path
SCORE_ROWS = 32


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def block_rows(padded: int) -> int:
    """Prompts computed together when padded to `padded` tokens."""
    return max(1, BLOCK_TOKENS // padded)


def slot_count(bucket: int, requests_max: int = SLOTS_MAX) -> int:
    """Slots that decode together in a bucket of `bucket` tokens: a power of two, enough for `requests_max` if there may be so many."""
    fit = 1 << max(1, SLOT_TOKENS_MAX // bucket).bit_length() - 1
    wanted = 1 << (requests_max - 1).bit_length()
    return max(SLOTS_MIN, min(SLOTS_MAX, fit, wanted))


class LocalModel:
    """A causal language model in eval mode, and the folder that its weights came from."""

    def __init__(self, folder: str, device: str, requests_max: int = SLOTS_MAX) -> None:
        self.folder = folder
        self.requests_max = requests_max
        config = read_config(Path(folder))
        text_config = config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.positions_max: int = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
        self.device = torch.device(device)
        if odd := sorted(set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"}):
            raise UserError(f"model_path={folder!r}: layers of type {odd} are not supported; use SGLang for this model")
        # on a CPU bf16 is both slower and coarser than fp32
        dtype = torch.float32 if device == "cpu" else (config.dtype or torch.bfloat16)
        self.lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self.lm = self.lm.eval().requires_grad_(False)
        copy_into(self.lm, read_checkpoint(Path(folder), self.lm))
        self.lm.to(self.device)
        probe = self.prefill([(0,)], PROMPT_STEP).kv_N2RHPD
        self.layers, self.heads, self.head_size = probe.shape[0], probe.shape[3], probe.shape[5]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """From generation_config.json, else from the config."""
        path = Path(self.folder) / "generation_config.json"
        saved = json.loads(path.read_text()) if path.is_file() else {}
        value = saved.get("eos_token_id", self.lm.config.get_text_config().eos_token_id)
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    def reload(self, folder: str) -> None:
        """Puts a folder's weights in place; UserError, with the old weights untouched, when it does not fit."""
        check_same_architecture(self.lm.config, Path(folder))
        copy_into(self.lm, read_checkpoint(Path(folder), self.lm))
        self.folder = folder

    def slots(self, bucket: int) -> int:
        """Slots of a bucket: every one computes, busy or not, so there are no more than requests can come at once."""
        return slot_count(bucket, self.requests_max)

    def new_slots(self, bucket: int) -> SlotCache:
        like = next(self.lm.parameters())
        return SlotCache(self.layers, self.heads, self.head_size, (self.slots(bucket), bucket), like)

    def prefill(self, prompts: list[tuple[int, ...]], padded: int) -> PrefixBlock:
        """Keys, values and next-token logits of at most `block_rows(padded)` prompts, each right-padded to `padded`."""
        last = [len(prompt) - 1 for prompt in prompts]
        keep_K = torch.zeros(round_up(block_rows(padded), KEPT), dtype=torch.long, device=self.device)
        keep_K[: len(last)] = torch.tensor(last)
        logits_RKV, cache = self._block(prompts, padded, keep_K)
        rows = torch.arange(len(prompts), device=self.device)
        kv_N2RHPD = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
        return PrefixBlock(kv_N2RHPD, logits_RKV[rows, rows].float())

    def score(self, prompt: tuple[int, ...], start: int) -> list[float]:
        """Logprobs (temperature 1) of prompt[start + 1:], each given what precedes it."""
        logits_RPV, _ = self._block([prompt], round_up(len(prompt), PROMPT_STEP), 0)
        scores: list[float] = []
        for first in range(0, len(prompt) - 1, SCORE_ROWS):
            rows = logits_RPV[0, first : first + SCORE_ROWS].double().log_softmax(-1)
            targets = torch.tensor(prompt[first + 1 : first + 1 + SCORE_ROWS], device=self.device)
            scores += rows[: len(targets)].gather(1, targets[:, None])[:, 0].tolist()
        return scores[start:]

    def _block(self, prompts: list[tuple[int, ...]], padded: int, keep: Tensor | int) -> tuple[Tensor, Any]:
        rows = block_rows(padded)
        assert 0 < len(prompts) <= rows and max(map(len, prompts)) <= padded, "a block larger than its shape"
        tokens_RP = torch.zeros(rows, padded, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_RP[row, : len(prompt)] = torch.tensor(prompt)
        mask_PP = torch.ones(padded, padded, dtype=torch.bool, device=self.device).tril()
        cache = DynamicCache()
        output = self.lm(
            input_ids=tokens_RP.to(self.device),
            attention_mask=mask_PP.expand(rows, 1, padded, padded),
            position_ids=torch.arange(padded, device=self.device).expand(rows, padded),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits, cache

    def decode(self, cache: SlotCache, tokens_S: Tensor, position_S: Tensor) -> Tensor:
        """Logits [S, V] after one more token per slot, written at `position_S`."""
        cache.position_S = position_S
        length = cache.get_seq_length()
        mask_SL = torch.arange(length, device=self.device) <= position_S[:, None]
        output = self.lm(
            input_ids=tokens_S[:, None],
            attention_mask=mask_SL[:, None, None],
            position_ids=position_S[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, 0].float()
