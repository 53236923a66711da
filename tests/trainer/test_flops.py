"""The arithmetic that MFU counts, beside what torch counts in the
very products of a forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from rlpipe.models.flex import use_flex
from rlpipe.models.small import VOCABULARY, small_config, small_model
from rlpipe.trainer import flops
from rlpipe.trainer.flops import Work, attention_tokens, forward_flops, mfu, peak_flops, work_of
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.probe_rows import behind, sequence
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world

TOKENS = 200


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {}), ("qwen3", {"tie_word_embeddings": True}), ("llama", {"hidden_size": 64}), ("mistral", {})],
)
def test_a_forward_pass_is_counted_as_torch_counts_it(family: str, changes: dict[str, object]) -> None:
    lm = small_model(small_config(AutoConfig.for_model(family), **changes))
    lm.set_attn_implementation("eager")  # its products are products
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        lm(input_ids=torch.zeros((1, TOKENS), dtype=torch.long), use_cache=False)
    ours = forward_flops(PolicyModel(lm), Work(TOKENS, TOKENS, TOKENS**2))
    assert ours == pytest.approx(counted.get_total_flops(), rel=0.08), "norms, biases and positions are no products"


def test_experts_count_where_tokens_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four experts: half of their parameters."""
    config = small_config(AutoConfig.for_model("qwen3_moe"))
    policy, work = PolicyModel(small_model(config)), Work(1, 0, 0)
    held = sum(parameter.numel() for name, parameter in policy.lm.named_parameters() if ".experts." in name)
    body = sum(
        parameter.numel()
        for name, parameter in policy.lm.named_parameters()
        if "embed" not in name and "lm_head" not in name
    )
    assert held > 0 and forward_flops(policy, work) == 2 * (body - held / 2)
    monkeypatch.setattr(flops, "CHOSEN", ())
    assert forward_flops(policy, work) is None


def test_attention_tokens_is_the_length_at_which_what_is_seen_costs_as_much_as_all_else() -> None:
    """Its causal half; without flex_attention, which computes no more, there is no such length."""
    policy = PolicyModel(small_model(small_config(AutoConfig.for_model("qwen3"))))
    assert attention_tokens(policy) is None
    use_flex(policy.lm)
    length = attention_tokens(policy)
    assert length is not None and 10 < length < 10_000
    layers, attention = (forward_flops(policy, Work(*work)) for work in ((1, 0, 0), (0, 0, 1)))
    assert layers is not None and attention is not None
    assert layers * length == pytest.approx(attention * length**2 / 2)


def test_a_prompt_that_is_shared_is_counted_once() -> None:
    prompt = sequence(10, VOCABULARY, 2).tokens
    text = [behind(prompt, sequence(length, VOCABULARY, 0)) for length in (5, 7)]
    assert work_of([text]) == Work(10 + 5 + 7, 12, 15**2 + 17**2 - 10**2)
    assert work_of([[one] for one in text]) == Work(15 + 17, 12, 15**2 + 17**2)


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 67), ("NVIDIA H100 PCIe", 756, 51), ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA L40S", 362, 91.6), ("NVIDIA L4", None, None), ("NVIDIA H200", 989, 67), ("NVIDIA B200", 2250, 75),
    ],
)  # fmt: skip
def test_peaks_are_of_gpus_that_are_known(
    name: str, bfloat16: float | None, float32: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    found = [peak_flops(torch.device("cuda"), dtype) for dtype in ("bfloat16", "float32")]
    assert found == [None if peak is None else 1e12 * peak for peak in (bfloat16, float32)]
    assert peak_flops(torch.device("cpu"), "bfloat16") is None


def test_a_training_says_its_mfu_where_the_peak_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(world.one_rank(tmp_path))
    data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(6, 4))
    world.run(trainer, "load", world.load_new())
    assert "train/mfu" not in world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]
    monkeypatch.setattr(flops, "peak_flops", lambda *_: 1e12)
    two = world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]
    assert 0 < two["train/mfu"] < 1
    assert trainer.resident is not None
    policy, work = trainer.resident.policy, Work(100, 50, 10_000)
    one = forward_flops(policy, work)
    assert one is not None
    assert mfu(trainer.ranks, 2.0, [(policy, work, 4)]) == {"train/mfu": pytest.approx(4 * one / 2e12)}
    conversations = world.conversations(trainer.ranks.store, "sft", 20)
    assert 0 < world.run(trainer, "train", world.train("b", "c", "sft", conversations))["metrics"]["train/mfu"] < 1
