"""Attention of the rows that have requests, beside that of all rows."""

from __future__ import annotations

from typing import get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlpipe.config.model import Dtype
from rlpipe.extras.local_engine.slot_attention import SlotCache, attend, use_slot_attention
from rlpipe.extras.local_engine.slots import attended_rows
from rlpipe.models.small import small_config, small_model

ROWS, HEADS, SIZE = 16, 2, 8


class Layer(nn.Module):
    num_key_value_groups = 3


@settings(max_examples=20, deadline=None, derandomize=True)
@given(used=st.integers(1, ROWS), length=st.sampled_from([64, 128]), dtype=st.sampled_from(get_args(Dtype)))
def test_used_rows_are_those_of_all_rows_and_others_are_zeros(used: int, length: int, dtype: Dtype) -> None:
    random, number = torch.Generator().manual_seed(used), getattr(torch, dtype)
    query_SAQD = torch.randn(ROWS, 3 * HEADS, 1, SIZE, generator=random).to(number)
    kv_2SHLD = torch.randn(2, ROWS, HEADS, length, SIZE, generator=random).to(number)
    mask_SAQL = torch.arange(length) <= torch.randint(0, length, (ROWS, 1, 1, 1), generator=random)
    whole, _ = sdpa_attention_forward(Layer(), query_SAQD, kv_2SHLD[0], kv_2SHLD[1], mask_SAQL)
    given, _ = attend(Layer(), query_SAQD, kv_2SHLD[0, :used], kv_2SHLD[1, :used], mask_SAQL[:used])
    assert given.shape == whole.shape and torch.equal(given[:used], whole[:used]) and not given[used:].any()


def test_a_step_writes_the_used_rows_alone() -> None:
    kv_N2SHLD = torch.zeros(1, 2, ROWS, HEADS, 64, SIZE)
    cache = SlotCache(kv_N2SHLD[:, :, :3], torch.arange(ROWS))
    keys, values = cache.update(torch.ones(ROWS, HEADS, 1, SIZE), torch.full((ROWS, HEADS, 1, SIZE), 2.0), 0)
    assert keys.shape[0] == values.shape[0] == 3
    written = kv_N2SHLD.sum((0, 3, 5)) / (HEADS * SIZE)  # keys and values, rows, positions
    expected = torch.zeros(2, ROWS, 64)
    for row in range(3):
        expected[0, row, row], expected[1, row, row] = 1.0, 2.0
    assert torch.equal(written, expected)


def test_a_family_with_attention_of_its_own_keeps_it() -> None:
    changed = {
        family: use_slot_attention(small_model(small_config(AutoConfig.for_model(family))))
        for family in ("qwen3", "gemma3_text", "gpt_oss", "falcon")
    }
    assert changed == {"qwen3": True, "gemma3_text": True, "gpt_oss": False, "falcon": False}


def test_attended_rows_hold_all_jobs_and_are_few_numbers() -> None:
    assert all(num_jobs <= attended_rows(num_jobs) < num_jobs + ROWS for num_jobs in range(1, 129))
    assert sorted({attended_rows(num_jobs) for num_jobs in range(1, 49)}) == [1, 2, 4, 8, 16, 32, 48]
