"""flex_attention beside the attention of a model's own code: the same logprobs and gradients,
without a mask of L x L."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torchs
from transformers import AutoConfig

from rlpipe.base.errors import UserError
from rlpipe.extras.plan.trial import LiveBytes
from rlpipe.models import flex
from rlpipe.models.flex import BLOCK, block_mask, leave_flex, texts_of, use_flex, uses_flex
from rlpipe.models.masks import Masks, own_branch
from rlpipe.models.small import VOCABULARY, small_config, small_model
from rlpipe.trainer import selftest
from rlpipe.trainer.batches import Microbatch, collate
from rlpipe.trainer.flops import attention_tokens
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import (
    BRANCHES,
    Row,
    Rows,
    Text,
    TrainSequence,
    plan_texts,
    sequence_of,
    shapes,
    text_tokens,
)
from rlpipe.trainer.probe_rows import behind, own_logprobs, row_logprobs, sequence
from rlpipe.trainer.selftest import PROMPT
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world

LONG = (140, 90, 33, 29, 17, 5, 3)  # more than a block, and less
CPU = torch.device("cpu")
Placed = tuple[list[Text], list[Row]]


pytestmark = [  # what torch says of itself where it is not compiled
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch has the backward pass for a CPU, all scores at once, and
    refuses it: there is no kernel."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    yield
    torch._dynamo.reset()


def packed() -> Placed:
    return [[sequence(length, VOCABULARY, 0)] for length in LONG], [[0, 2, 4], [1, 3, 5, 6]]


def shared() -> Placed:
    """One text of three completions of a prompt, and one of a single sequence, in a row."""
    prompt = sequence(PROMPT, VOCABULARY, 2).tokens
    return [
        [behind(prompt, sequence(length, VOCABULARY, 0)) for length in LONG[1:4]],
        [sequence(140, VOCABULARY, 0)],
    ], [[0, 1]]


def chosen(count_R1Q: Tensor | None, index_R1QK: Tensor | None) -> Tensor:
    """Of a list of blocks which are in it, R x Q x K."""
    assert count_R1Q is not None and index_R1QK is not None
    listed = (torch.arange(index_R1QK.shape[-1]) < count_R1Q[..., None])[:, 0]
    return torch.zeros_like(listed).scatter(-1, index_R1QK[:, 0].long(), listed)


def small_policy(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> PolicyModel:
    return PolicyModel(small_model(small_config(AutoConfig.for_model(family), **changes)).to(dtype))


def passes(policy: PolicyModel, batch: Microbatch) -> tuple[Tensor, Tensor]:
    """The logprobs of both passes over a microbatch, and the whole
    gradient of their weighted sum."""
    logprobs_N, _ = policy(
        batch.tokens_RL, batch.positions_RL, batch.source_N, batch.target_N, temperature=1.0, branch_RL=batch.branch_RL
    )
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N), device=logprobs_N.device)).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])
    policy.zero_grad(set_to_none=True)
    return logprobs_N.detach(), gradient


def check_as_own(family: str, rows: Placed, switch: Callable[[Any], None]) -> None:
    """Checks that after the switch of its attention a model gives the logprobs and gradients of its
    own, in rows of such texts."""
    # the product of experts has no float64; logprobs are float32 in any case
    policy = small_policy(family, torch.float32 if family == "qwen3_moe" else torch.float64)
    batch = collate(*rows)
    own = batch
    # with our mask: transformers 5.17 counts chunks from the beginning of the row
    if family == "llama4_text" and batch.branch_RL is None:
        own = replace(batch, branch_RL=texts_of(batch.positions_RL) * BRANCHES)
    expected, expected_gradient = passes(policy, own)
    switch(policy.lm)
    logprobs, gradient = passes(policy, batch)
    assert (logprobs - expected).abs().max() / expected.abs().max() < 1e-6
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-6


# plain, windows, windows of some layers, chunks of some layers, capped scores
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe", "mistral", "gemma3_text", "llama4_text", "gemma2"])
@pytest.mark.parametrize("rows", [packed, shared])
def test_logprobs_and_gradients_are_those_of_the_models_own_attention(family: str, rows: Callable[[], Placed]) -> None:
    check_as_own(family, rows(), use_flex)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_shared_as_planned_for_flex_is_the_same_as_each_with_its_own_prompt(family: str) -> None:
    """float32.

    Texts of many blocks: two prompts of 600 and 250 tokens, six completions of up to 200 each, that
    the plan for flex_attention puts into two texts, and that for a mask of L x L into more.
    """
    policy = small_policy(family)
    use_flex(policy.lm)
    sequences: list[TrainSequence] = []
    for prompt, lengths in ((600, (200, 30, 1, 90, 5, 128)), (250, (7, 199, 64, 129, 2, 33))):
        begin = np.concatenate([sequence(100, VOCABULARY, salt).tokens for salt in range(2, 2 + prompt // 50)])[:prompt]
        sequences += [behind(begin, sequence(length, VOCABULARY, 50 + length)) for length in lengths]
    found: list[tuple[dict[int, Tensor], Tensor, int]] = []
    for rows in (Rows.PACKED, Rows.SHARED):
        texts, plans = plan_texts(sequences, 1, 2048, rows, 1, attention_tokens(policy))
        lengths = [*map(text_tokens, texts)]
        logprobs: dict[int, Tensor] = {}
        gradient = torch.zeros(())
        for placed in plans[0]:
            batch = collate(texts, placed)
            own_N, _ = policy(
                batch.tokens_RL,
                batch.positions_RL,
                batch.source_N,
                batch.target_N,
                temperature=1.0,
                branch_RL=batch.branch_RL,
            )
            own_N.sum().backward()
            order = [each for row in placed for index in row for each in texts[index]]
            parts = own_N.detach().split([len(each.scored) for each in order])
            logprobs |= {id(each): part for each, part in zip(order, parts, strict=True)}
        gradient = torch.cat(
            [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
        )
        policy.zero_grad(set_to_none=True)
        found.append((logprobs, gradient, sum(slots for slots, _ in shapes(plans, lengths))))
    (apart, apart_gradient, apart_slots), (shared, gradient, slots) = found
    assert (apart_slots, slots) == (5988, 1738), "prompts were not shared"
    for each in sequences:
        assert (shared[id(each)] - apart[id(each)]).abs().max() <= 1e-6 * apart[id(each)].abs().max()
    assert (gradient - apart_gradient).norm() / apart_gradient.norm() < 1e-6


def test_sinks_take_their_share() -> None:
    """gpt_oss cannot be packed by its own code: each of its packed sequences is
    compared with the sequence alone."""
    policy = small_policy("gpt_oss")
    own, own_gradient = passes(policy, collate(packed()[0], [[index] for index in range(len(LONG))]))
    use_flex(policy.lm)
    batch = collate(packed()[0], [list(range(len(LONG)))])
    logprobs, gradient = passes(policy, batch)
    assert (logprobs - own).abs().max() / own.abs().max() < 1e-6
    assert (gradient - own_gradient).norm() / own_gradient.norm() < 2e-6


@pytest.mark.parametrize("rows", [packed, shared])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama4_text"])
def test_the_blocks_that_are_named_are_those_that_are_seen(family: str, rows: Callable[[], Placed]) -> None:
    """A block that is not named is not seen by any token, and one that is named
    whole is seen by all of its tokens."""
    lm = small_policy(family, sliding_window=150, attention_chunk_size=100).lm
    batch = collate(*rows(), padding=9)
    dense = Masks(lm)
    own_RL = texts_of(batch.positions_RL) if batch.branch_RL is None else batch.branch_RL
    root_branch_RL = (
        own_RL * BRANCHES if batch.branch_RL is None else batch.branch_RL
    )  # no siblings where nothing branches
    visible = {
        kind: dense._visible(kind, batch.positions_RL[:, :, None], batch.positions_RL[:, None, :])
        & own_branch(root_branch_RL, BRANCHES)
        for kind in dense.kinds
    }
    use_flex(lm)
    made = Masks(lm).of_rows(batch.positions_RL, batch.branch_RL, BRANCHES)
    for kind, mask in (made if isinstance(made, dict) else {dense.kinds[0]: made}).items():
        assert isinstance(mask, torchs.BlockMask)
        rows_R, length = batch.tokens_RL.shape
        blocks = mask.shape[-1] // BLOCK
        row, query, key = torch.meshgrid(*(torch.arange(size) for size in (rows_R, length, length)), indexing="ij")
        seen = mask.mask_mod(row, row, query, key)
        # padding of rows that branch is of one text, at one position: it sees itself,
        # and what it sees is never used
        text = torch.ones_like(own_RL, dtype=torch.bool) if batch.branch_RL is None else batch.branch_RL > 0
        assert torch.equal(seen & text[:, :, None], visible[kind] & text[:, :, None])
        filled = torch.zeros(rows_R, mask.shape[-1], mask.shape[-1], dtype=torch.bool)
        filled[:, :length, :length] = seen
        tiles = filled.unflatten(2, (blocks, BLOCK)).unflatten(1, (blocks, BLOCK)).transpose(2, 3)
        named, whole = (
            chosen(mask.kv_num_blocks, mask.kv_indices),
            chosen(mask.full_kv_num_blocks, mask.full_kv_indices),
        )
        assert not (named & whole).any() and bool((named | whole)[tiles.any(-1).any(-1)].all())
        assert bool(tiles.all(-1).all(-1)[whole].all())
        assert mask.kv_indices.numel() == rows_R * blocks**2


def test_a_text_of_many_blocks_names_whole_ones() -> None:
    """Of a row of 32k tokens the mask is 256 x 256 numbers, and all blocks
    below the diagonal need no rule."""
    positions_RL = torch.arange(32768)[None]
    text_RL = texts_of(positions_RL)
    with LiveBytes([]) as live:
        mask = block_mask(text_RL, text_RL, positions_RL, torch.zeros_like(positions_RL))
    assert 2**20 < live.most < 2**23, "256 x 256 numbers and 32k tokens; L x L would be 2**30"
    named, whole = chosen(mask.kv_num_blocks, mask.kv_indices), chosen(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert int(named.sum()) == 256 and int(whole.sum()) == 256 * 255 // 2
    mask = block_mask(text_RL, text_RL, positions_RL, positions_RL - 1024 + 1)
    named, whole = chosen(mask.kv_num_blocks, mask.kv_indices), chosen(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert int((named | whole).sum(-1).max()) == 1024 // BLOCK + 1


@pytest.mark.slow
def test_lengths_do_not_make_new_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with and without windows, capped scores: traced as for a GPU, both passes, and
    computed without kernels."""
    policy = small_policy("gemma2")
    counters.clear()
    traced = flex.compiled("aot_eager")
    made: list[int] = []
    for lengths in ((90, 33), (140, 90, 33, 29), (150, 140, 70, 21, 5), (200, 180, 170, 160, 100, 3)):
        texts = [[sequence(length, VOCABULARY, 0)] for length in lengths]
        single, packed = [[index] for index in range(len(lengths))], [[*range(len(lengths))]]
        expected, expected_gradient = passes(policy, collate(texts, single))
        use_flex(policy.lm)
        for rows in (single, packed):
            with monkeypatch.context() as patch:
                patch.setattr(flex, "flex_attention", traced)
                logprobs, gradient = passes(policy, collate(texts, rows))
            assert (logprobs - expected).abs().max() / expected.abs().max() < 1e-6
            assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 2e-6
        leave_flex(policy.lm)
        made.append(counters["stats"]["unique_graphs"])
    assert 0 < made[-1] == made[-2] <= 8, f"kernels after more lengths: {made}"


@pytest.mark.parametrize(("dtype", "far"), [("float32", 1e-4), pytest.param("bfloat16", 0.1, marks=pytest.mark.slow)])
def test_the_proof_chooses_flex_where_it_is_right(
    dtype: str, far: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selftest, "FLEX_DEVICES", ("cpu",))
    caplog.set_level(logging.INFO, "rlpipe")
    trainer = Trainer(world.one_rank(tmp_path, dtype=dtype, activation_checkpointing=True))
    world.run(trainer, "load", world.load_new())
    assert (
        trainer.resident is not None and uses_flex(trainer.resident.policy.lm) and trainer.resident.rows is Rows.SHARED
    )
    assert "qwen3: attention is computed by flex_attention, rows are shared" in caplog.text
    data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(6, 4))
    by_flex = world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]
    assert by_flex["train/onpolicy_abs"] == 0
    saved = world.run(trainer, "save", world.save("b", "policy", None))
    monkeypatch.setattr(selftest, "FLEX_DEVICES", ())
    world.run(trainer, "load", world.load_new())
    plain = world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]
    assert trainer.resident is not None and not uses_flex(trainer.resident.policy.lm)
    assert by_flex["train/loss"] == pytest.approx(plain["train/loss"], rel=far, abs=far / 100)
    assert by_flex["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=far)
    again = world.run(trainer, "save", world.save("b", "policy-2", None))  # flex_attention is no part of what is saved
    assert world.digests(saved["policy"])["config.json"] == world.digests(again["policy"])["config.json"]


@pytest.mark.parametrize(
    ("family", "why"),
    [("bloom", "does not support flex_attention"), ("mamba", "does not support"), ("gpt_neo", "window_size")],
)
def test_a_family_that_flex_does_not_fit_keeps_its_own_attention(
    family: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlpipe")
    policy = small_policy(family)
    before, ranks = policy.lm.config._attn_implementation, world.one_rank(tmp_path)
    assert selftest.flex_rows(ranks, policy) is None
    assert policy.lm.config._attn_implementation == before
    (record,) = [record for record in caplog.records if record.name == "rlpipe.trainer.ranks"]
    assert (
        record.levelno == logging.WARNING
        and "attention is computed as its own code has it, not by flex_attention" in caplog.text
    )
    assert why in caplog.text and ranks.told_users() == [record.getMessage()] and ranks.told_users() == []


def test_flex_that_computes_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy("mistral")
    monkeypatch.setattr(
        Masks, "_first", lambda _masks, _kind, positions: torch.zeros_like(positions)
    )  # windows are forgotten
    assert selftest.flex_rows(world.one_rank(tmp_path), policy) is None and not uses_flex(policy.lm)


class NoRoom(torch.autograd.Function):
    """What triton says of a backward kernel that takes more shared memory than a card has: heads of
    256 on sm_89 and sm_120."""

    @staticmethod
    def forward(ctx: object, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: object, *grad_outputs: Tensor) -> Tensor:
        raise RuntimeError(
            "No valid triton configs. OutOfResources: shared memory, Required: 163840, Hardware limit: 101376"
        )


def test_a_backward_pass_without_a_kernel_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy is then trained as if flex_attention had never been tried, to the bit: in a
    backward pass of sharded weights, gradients stayed."""
    caplog.set_level(logging.INFO, "rlpipe")
    real: Callable[..., Any] = flex.flex_attention
    shas: list[str] = []

    def without_backward(*given: object, **how: object) -> object:
        out, aux = real(*given, **how)
        return NoRoom.apply(out), aux

    for tried in (False, True):
        if tried:
            monkeypatch.setattr(selftest, "FLEX_DEVICES", ("cpu",))
            monkeypatch.setattr(flex, "flex_attention", without_backward)
        trainer = Trainer(world.one_rank(tmp_path))
        world.run(trainer, "load", world.load_new())
        assert trainer.resident is not None and not uses_flex(trainer.resident.policy.lm)
        data = world.batch(trainer.ranks.store, f"batch-{tried}", world.rollout_rows(6, 4))
        world.run(trainer, "train", world.train("a", "b", "rl", data))
        saved = world.run(trainer, "save", world.save("b", f"policy-{tried}", None))
        shas.append(world.digests(saved["policy"])["model.safetensors"])
    assert shas[0] == shas[1]
    assert (
        "has no kernel for heads of 16 in float32 (No valid triton configs. OutOfResources: shared memory"
        in caplog.text
    )


def test_a_gradient_that_fails_all_the_same_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr(selftest, "try_kernels", lambda *_: None)
    real: Callable[..., Any] = flex.flex_attention
    monkeypatch.setattr(
        flex, "flex_attention", lambda *given, **how: (NoRoom.apply((made := real(*given, **how))[0]), made[1])
    )
    with pytest.raises(UserError, match=r"qwen3 has no gradient here .*OutOfResources"):
        world.run(Trainer(world.one_rank(tmp_path)), "load", world.load_new())


@pytest.mark.slow
def test_flex_whose_gradient_is_another_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, policy = world.one_rank(tmp_path), small_policy("qwen3")
    distances: list[float] = []
    distance = selftest.gradient_distance
    monkeypatch.setattr(selftest, "gradient_distance", lambda *given: distances.append(distance(*given)) or 0.5)
    assert selftest.flex_rows(ranks, policy) is None and not uses_flex(policy.lm) and distances[0] < 1e-5


def test_own_attention_is_what_packed_rows_are_compared_with() -> None:
    policy, texts = small_policy("qwen3"), [sequence(length, VOCABULARY, 0) for length in LONG]
    before = own_logprobs(policy, texts, CPU)
    use_flex(policy.lm)
    assert all(map(torch.equal, own_logprobs(policy, texts, CPU), before)) and uses_flex(policy.lm)
    for one, other in zip(row_logprobs(policy, texts, Rows.PACKED, CPU), before, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    leave_flex(policy.lm)
    assert not uses_flex(policy.lm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("rows", [packed, shared])
def test_the_kernel_on_cuda_gives_the_same(family: str, rows: Callable[[], Placed]) -> None:
    """Compared with the attention of the family's own code, each sequence in a row of its own."""
    policy, texts = small_policy(family, head_dim=16), rows()[0]
    policy.cuda()
    alone = [[sequence_of(sequence.tokens, sequence.scored)] for text in texts for sequence in text]
    expected, expected_gradient = passes(
        policy, collate(alone, [[index] for index in range(len(alone))]).to(torch.device("cuda"))
    )
    use_flex(policy.lm)
    # in the order of `alone`: the rows of `packed` hold them in another
    logprobs, gradient = passes(policy, collate(texts, [list(range(len(texts)))]).to(torch.device("cuda")))
    assert (logprobs - expected).abs().max() / expected.abs().max() < 1e-5
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_long_row_takes_no_memory_of_its_square_on_cuda() -> None:
    """A mask of 32k x 32k would be 1 GiB, the scores of its heads 16 GiB."""
    policy = small_policy("qwen3", head_dim=16).cuda()
    use_flex(policy.lm)
    tokens = np.arange(32768) % VOCABULARY
    long = sequence_of(tokens, np.arange(1, len(tokens)))
    batch = collate([[long]], [[0]]).to(torch.device("cuda"))
    passes(policy, batch)
    torch.cuda.reset_peak_memory_stats()
    passes(policy, batch)
    assert torch.cuda.max_memory_allocated() < 2**30  # 0.57 GiB on an H200 with torch 2.11
