"""A whole pipeline on the engine that RLPIPE_TEST_ENGINE names: local, a real SGLang or a real
vLLM. A sampling process is killed in it.

The model is of the layout of Qwen's base models: text ends with <|endoftext|>, a turn with another
token, which SFT has to teach.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from rlpipe.data.new_tokenizer import END, PAD, build_tokenizer
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.store.artifacts import read_records
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from tests.deadlines import PIPELINE_S
from tests.engine_fixtures import ENGINE_KIND
from tests.engine_world import KINDS, SAMPLERS
from tests.living import descendants
from tests.pipeline import Folder, kill_group

pytestmark = pytest.mark.contract
EOS = "<|endoftext|>"
ITERATIONS = 3
SETS = [
    "model.context_tokens_max=128", "sft.num_steps=60", "sft.segment_steps=30", "sft.decay_steps=60",
    "data.short_words.rows_max=4000", "data.all_words.rows_max=1000", "data.words.rows_max=400",
    f"rl.num_iterations={ITERATIONS}", "rl.num_prompts=12", "rl.group_size=8", "rl.shard_prompts=6", "rl.num_steps=2",
    "rl.completion_tokens_max=40", "rl.filters={}", "evaluation.every=0", "evaluation.prompts_max=8",
    "checkpoint.state_every=1",
    "rl.mismatch_max=0.001", "rl.on_mismatch=stop", "engines.count=2", "engines.hung_timeout_s=20",
]  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model that was taught nothing, whose generation_config knows of EOS alone."""
    path = tmp_path / "base"
    build_tokenizer(["Spell the word backward: stone", "Spell the word backward: river"], path)
    words = Tokenizer.from_file(str(path / "tokenizer.json"))
    words.add_special_tokens([AddedToken(EOS, normalized=False, special=True)])
    words.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": EOS}))
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.eos_token_id not in (None, tokenizer.convert_tokens_to_ids(END))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=128,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.convert_tokens_to_ids(PAD), bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    return path


def sampled_in(run: Run, iteration: int) -> list[Rollout]:
    return list(
        read_records(run.store, run.committed("rl", iteration, "scores/round-0")[0], "scores.parquet", Rollout, SCORES)
    )


def test_a_base_model_learns_to_end_its_turns_and_a_killed_engine_loses_nothing(folder: Folder, base: Path) -> None:
    told = [*SETS, *KINDS[ENGINE_KIND], f"model.path={base}"]
    process = folder.start(*folder.run_arguments("a", *told))
    try:
        folder.wait_for("a", "rl/00000/iteration.json", process)
        samplers = descendants(process, SAMPLERS.get(ENGINE_KIND, "rlpipe.extras.local_engine.server"))
        assert len(samplers) == 2, samplers
        samplers[0].kill()
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0 and " 0 faults" in output, output
    run = open_existing(folder.open_store(), "a")
    end = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(END)
    for iteration in range(ITERATIONS):
        rollouts = sampled_in(run, iteration)
        assert len(rollouts) == 96
        ended = [
            rollout for rollout in rollouts if rollout.finish_reason == "stop" and rollout.completion_tokens[-1] == end
        ]
        print(f"{ENGINE_KIND}: iteration {iteration}: {len(ended)} of {len(rollouts)} completions end with {END}")
        assert len(ended) >= 0.95 * len(rollouts)
        assert all(rollout.loss_mask[-1] == 1 for rollout in ended), "the end of a turn is trained"
    policy = materialise(run.store, run.policy(ITERATIONS)[0], folder.path / "policy")
    told_stops = json.loads((policy / "generation_config.json").read_text())["eos_token_id"]
    assert end in told_stops, "whoever serves the policy stops where it was taught to"


@pytest.mark.skipif(ENGINE_KIND == "local", reason="e2e/test_lora.py")
def test_an_adapter_is_loaded_beside_its_base_and_proved(folder: Folder, base: Path) -> None:
    """The first version is the base as it is, the next one an adapter beside it; each
    is served once its probe holds."""
    lora = ["model.adapter=lora", "model.adapter_rank=4", "sft.num_steps=0", "rl.num_iterations=2", "engines.count=1"]
    folder.complete("a", *SETS, *KINDS[ENGINE_KIND], f"model.path={base}", *lora)
    run = open_existing(folder.open_store(), "a")
    assert [record.metrics["train/mismatch_abs_mean"] < 1e-4 for record in Progress(run).iterations(2)] == [True, True]
    assert (
        run.policy(2)[1].file("adapter_model.safetensors").bytes
        < 0.1 * run.policy(0)[1].file("model.safetensors").bytes
    )
    (log,) = folder.path.rglob("engine-0.log")
    loaded = [line for line in log.read_text().splitlines() if "/load_lora_adapter" in line and "200" in line]
    assert loaded and "/update_weights_from_disk" not in log.read_text() and "reload_weights" not in log.read_text(), (
        loaded
    )
