"""Models with experts and windows through the whole pipeline on a CPU: SFT, RL, and a
policy that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.models.small import small_config, small_model
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import open_existing
from rlpipe.trainer.packing import TrainSequence
from tests.batches import read_conversations
from tests.pipeline import MINI, Folder

pytestmark = pytest.mark.e2e


@torch.no_grad()
def mean_loss(base: Path, sequences: list[TrainSequence]) -> float:
    """Of the trained tokens, each sequence alone, as transformers computes it."""
    lm, total = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), 0.0
    for sequence in sequences:
        tokens, labels = torch.tensor(sequence.tokens).long(), torch.full([len(sequence.tokens)], -100)
        labels[sequence.scored] = tokens[sequence.scored]
        total += lm(input_ids=tokens[None], labels=labels[None]).loss.item() * len(sequence.scored)
    return total / sum(len(sequence.scored) for sequence in sequences)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_sft_and_rl_of_a_model_with_experts(folder: Folder, family: str) -> None:
    base = folder.path / "base"
    base.mkdir()
    build_tokenizer(["Spell the word backward: stone", "Spell the word backward: river"], base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = small_config(AutoConfig.for_model(family), vocab_size=len(tokenizer), **ends)
    small_model(config).save_pretrained(base)
    folder.complete(
        "a", *MINI, f"model.path={base}", "model.context_tokens_max=128", "rl.mismatch_max=0.001", "rl.on_mismatch=stop"
    )
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0 and "0 faults" in output, output
    run = open_existing(folder.open_store(), "a")
    (data, _), (_, first) = run.committed("data", 0, "data"), run.committed("sft", 0, "policy")
    own = mean_loss(base, read_conversations(run.store, data, "conversations.parquet")[: run.config.sft.batch_size])
    assert first.metrics["losses"][0] == pytest.approx(own, abs=1e-5), "the first step's loss is transformers' own"
    assert 1 <= first.metrics["train/expert_load_max"] <= config.get_text_config().num_local_experts
    ref, _ = run.policy(5)
    policy = materialise(folder.open_store(), ref, Path(folder.path) / "policy")
    lm, before = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (policy, base))
    assert json.loads((policy / "config.json").read_text())["model_type"] == family
    moved = [name for name, tensor in lm.state_dict().items() if not torch.equal(tensor, before.state_dict()[name])]
    assert any("experts" in name for name in moved), "experts are trained"
