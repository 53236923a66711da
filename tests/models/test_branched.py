"""Attention over pieces beside the attention of a model's own code: the same logprobs and gradients
without a mask of L x L."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlpipe.models import branched
from rlpipe.models.branched import BranchedMask, branched_mask, use_branched, uses_branched
from rlpipe.models.flex import texts_of
from rlpipe.models.fused import uses_fused
from rlpipe.models.masks import own_branch
from rlpipe.trainer import selftest
from rlpipe.trainer.batches import collate
from rlpipe.trainer.packing import BRANCHES, Rows, TrainSequence, plan_texts, text_tokens
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.models.test_flex import Placed, check_as_own, packed, passes, shared, small_policy
from tests.trainer.test_packing import steps_of_groups


def seen(mask: BranchedMask, length: int) -> Tensor:
    """The pairs of places that see each other, N x N, by the batches of a mask."""
    pairs = torch.zeros(length, length, dtype=torch.bool)
    places = mask.place_N.tolist()
    begun = 0
    for part in mask.batches:
        pieces, queries = part.query_SQ.shape
        if part.mask is None:
            assert part.key_SK.shape == part.query_SQ.shape
            sees = torch.ones(queries, queries, dtype=torch.bool).tril().expand(pieces, -1, -1)
        else:
            short = part.mask.dtype is torch.float32
            sees = (part.mask == 0 if short else part.mask).expand(pieces, -1, -1)
        assert sees.any(-1).all(), "a softmax over nothing"
        for piece in range(pieces):
            for query in range(queries):
                place = int(part.query_SQ[piece, query])
                if places[place] == begun + piece * queries + query:  # else it is filling
                    pairs[place, part.key_SK[piece][sees[piece, query]]] = True
        begun += pieces * queries
    return pairs


@given(
    sequences=steps_of_groups(), tokens_max=st.integers(60, 400), padding=st.integers(0, 3),
    window=st.sampled_from([1, 3, 8, 1000]), batch_pairs=st.sampled_from([0, 50, 4096]),
    product_pairs=st.sampled_from([0, 200, 2**15]),
)  # fmt: skip
def test_a_token_sees_the_earlier_ones_of_its_branch_and_of_its_prompt(
    sequences: list[TrainSequence], tokens_max: int, padding: int, window: int, batch_pairs: int, product_pairs: int
) -> None:
    texts, (plan,) = plan_texts(sequences, 1, tokens_max, Rows.SHARED, 1, 40.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branched, "BATCH_PAIRS", batch_pairs)
        patch.setattr(branched, "PRODUCT_PAIRS", product_pairs)
        for rows in filter(None, plan):
            batch = collate(texts, rows, padding)
            positions = batch.positions_RL
            own = texts_of(positions) * BRANCHES if batch.branch_RL is None else batch.branch_RL
            first = positions - window + 1
            pairs = seen(branched_mask(own, own // BRANCHES * BRANCHES, positions, first), positions.numel())
            order = torch.arange(positions.shape[1])
            expected = own_branch(own, BRANCHES) & (order[None, :, None] >= order[None, None, :])
            expected &= positions[:, None, :] >= first[:, :, None]
            expected |= torch.eye(positions.shape[1], dtype=torch.bool)
            for row, (row_pairs, row_expected) in enumerate(zip(pairs.split(len(order)), expected, strict=True)):
                inside = row_pairs[:, row * len(order) : (row + 1) * len(order)]
                assert int(inside.sum()) == int(row_pairs.sum()), "it sees another row"
                number = sum(text_tokens(texts[index]) for index in rows[row])  # behind it padding
                assert torch.equal(inside[:number], row_expected[:number])


def test_a_shared_prompt_costs_what_is_seen_and_little_more() -> None:
    """64 completions of about 60 tokens of 8 prompts of about 200, in one row: the pairs that are
    computed, beside those that are seen, and those of a mask."""
    random = np.random.default_rng(0)
    texts = []
    for _ in range(8):
        prompt = random.integers(1, 99, random.integers(180, 220))
        bodies = [random.integers(1, 99, random.integers(30, 61)) for _ in range(8)]
        whole = [np.concatenate([prompt, body]) for body in bodies]
        texts.append([
            TrainSequence(prompt, tokens[len(prompt):], np.ones(len(tokens) - len(prompt), np.int8),
                          np.zeros(0, np.float32), len(tokens) - len(prompt)) for tokens in whole
        ])  # fmt: skip
    batch = collate(texts, [[*range(len(texts))]])
    own, positions = batch.branch_RL, batch.positions_RL
    assert own is not None
    mask = branched_mask(own, own // BRANCHES * BRANCHES, positions, torch.zeros_like(positions))
    computed = sum(len(part.query_SQ) * part.query_SQ.shape[1] * part.key_SK.shape[1] for part in mask.batches)
    needed = int((own_branch(own, BRANCHES)[0] & (positions[0, None, :] <= positions[0, :, None])).sum())
    assert needed < computed < 2 * needed < positions.numel() ** 2 / 10
    held = [tensor for part in mask.batches for tensor in vars(part).values() if tensor is not None]
    assert sum(tensor.nbytes for tensor in held) < positions.numel() ** 2, "a mask of L x L, a byte a pair"


# plain, windows, windows of some layers, chunks of some layers
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow)
                          for name in ("qwen2", "llama", "qwen3_moe", "mistral", "gemma3_text", "llama4_text"))]
)  # fmt: skip
@pytest.mark.parametrize("rows", [packed, shared])
@pytest.mark.parametrize("by_products", [True, False])
def test_logprobs_and_gradients_are_those_of_the_models_own_attention(
    family: str, rows: Callable[[], Placed], by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branched, "PRODUCT_PAIRS", 2**30 if by_products else 0)
    check_as_own(family, rows(), use_branched)


@pytest.mark.parametrize("rows", [packed, shared])
def test_what_is_computed_again_in_the_backward_pass_has_the_same_bits(
    rows: Callable[[], Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch, outcomes = small_policy("qwen3"), collate(*rows()), list[tuple[Tensor, Tensor]]()
    use_branched(policy.lm)
    for kept in (0, 2**30):
        monkeypatch.setattr(branched, "KEPT", kept)
        outcomes.append(passes(policy, batch))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_is_loaded_on_a_cpu_computes_attention_by_pieces(dtype: str, tmp_path: Path) -> None:
    """In bfloat16 FSDP makes copies of the inputs of a layer."""
    trainer = Trainer(world.one_rank(tmp_path, dtype=dtype))
    world.run(trainer, "load", world.load_new())
    assert trainer.resident is not None and trainer.resident.rows is Rows.SHARED
    assert uses_branched(trainer.resident.policy.lm) and uses_fused(trainer.resident.policy.lm)
    data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(6, 4))
    assert world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]["train/onpolicy_abs"] == 0


def test_scores_in_bfloat16_are_no_further_from_the_truth_than_those_of_torch() -> None:
    torch.manual_seed(0)
    query, key, value = (4 * torch.randn(1, heads, 60, 32) for heads in (4, 2, 2))
    own = torch.zeros(1, 60, dtype=torch.long)
    mask = branched_mask(own, own, torch.arange(60)[None], torch.zeros_like(own))
    exact, ours = (
        branched.attend(torch.nn.Identity(), query.to(dtype), key.to(dtype), value.to(dtype), mask)[0].double()
        for dtype in (torch.float64, torch.bfloat16)
    )
    rounded = [part.bfloat16() for part in (query, key, value)]
    torchs = torch.nn.functional.scaled_dot_product_attention(*rounded, is_causal=True, enable_gqa=True)
    assert (ours - exact).abs().mean() <= 1.1 * (torchs.transpose(1, 2).double() - exact).abs().mean()


@pytest.mark.parametrize("family", ["qwen3", "bloom", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_family_with_another_attention_keeps_its_own(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlpipe")
    policy = small_policy(family)
    own = policy.lm.config._attn_implementation
    rows = selftest.proven_rows(world.one_rank(tmp_path), policy)
    assert uses_branched(policy.lm) == uses_fused(policy.lm) == (family == "qwen3")
    assert rows is (Rows.SINGLE if family == "bloom" else Rows.SHARED)
    assert family == "qwen3" or policy.lm.config._attn_implementation == own


def test_a_layer_that_needs_more_than_a_mask_is_refused() -> None:
    query, key, value = torch.zeros(3, 1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"takes no mask of pieces, or more than a mask \(\['s_aux'\]\)"):
        branched.attend(torch.nn.Identity(), query, key, value, torch.zeros(1, 1, 2, 2), s_aux=torch.zeros(1))
