"""Models of many families: their logprobs are those of their own forward pass,
and their files those of the hub."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.checks.trial import rows_of
from rlpipe.config.model import Dtype
from rlpipe.extras.local_engine.model import LocalModel
from rlpipe.models.causal import empty_model, hf_config, probe_tokens, restore_buffers, small_windows
from rlpipe.models.small import small_config, small_model
from rlpipe.store.local_copy import materialise
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.selftest import Proof, prove
from rlpipe.trainer.trainer import Trainer
from scripts.models_table import in_page, try_family
from tests import trainer_world as world
from tests.batches import read_conversations

IN_PAGE = in_page()
FAMILIES = [
    "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "llama", "llama4_text", "mistral", "mixtral", "gemma2",
    "gemma3_text", "gpt_oss", "phi3", "olmo3", "exaone4", "cohere2", "granite", "granitemoehybrid", "lfm2", "jamba",
    "mamba", "deepseek_v3", "glm4_moe", "gpt2", "opt", "bloom", "recurrent_gemma", "smollm3", "roberta", "falcon_h1",
    "apertus", "afmoe", "jetmoe",
]  # fmt: skip
# fused experts, scaled embeddings, kept buffers, conversions, biases that are parameters without a
# gradient, numbers without a dimension
SAVED = ["gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_next", "gpt2", "ernie4_5_moe", "apertus"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_models_own_forward_pass(family: str) -> None:
    row = try_family(family)
    # transformers 5.17 counts chunks from the beginning of the row, which the trial notices
    chunks = family != "llama4_text" or hasattr(masking_utils, "remap_positions_for_packed_sequence")
    assert (row.rows, row.local) == (IN_PAGE[family] if chunks else ("one a row", True)), row
    if row.rows != "refused":
        assert isinstance(row.largest, float) and row.largest <= 1e-5, row


def test_the_page_has_every_family_that_can_be_built() -> None:
    trained = [local for rows, local in IN_PAGE.values() if rows in ("packed", "one a row")]
    assert len(trained) >= 140 and sum(trained) >= 85 and len(IN_PAGE) >= 180


def test_a_neighbour_that_is_seen_is_noticed() -> None:
    """The test of packing itself: it says packed of what is, and of nothing else."""
    policy = PolicyModel(small_model(small_config(AutoConfig.for_model("mamba"))))
    proof = prove(policy, torch.device("cpu"))
    assert proof.single < 1e-5 and proof.ahead == proof.aside == 0 and proof.leak > 0.1 and proof.packed > 0.1


@pytest.mark.parametrize(
    ("family", "rows"),
    [("qwen3", Rows.SHARED), ("qwen3_moe", Rows.SHARED), ("bloom", Rows.SINGLE), ("qwen3_next", Rows.SINGLE)],
)
def test_the_proof_holds_in_bfloat16(family: str, rows: Rows) -> None:
    """Coarse numbers hide a small leak, and no leak: other tokens aside change nothing at all."""
    policy = PolicyModel(small_model(small_config(AutoConfig.for_model(family))).bfloat16())
    assert prove(policy, torch.device("cpu")).rows(family, "bfloat16") is rows


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("mistral", Rows.SHARED),
        ("gemma3_text", Rows.SHARED),
        ("phi3", Rows.SHARED),
        ("gpt_neo", Rows.PACKED),  # its own code bounds attention by places in a row
        ("mamba", Rows.SINGLE),
    ],
)
def test_prompts_are_shared_where_the_proof_knows_every_window(family: str, rows: Rows) -> None:
    policy = PolicyModel(small_model(small_config(AutoConfig.for_model(family))))
    assert prove(policy, torch.device("cpu")).rows(family, "float32") is rows
    assert rows_of(AutoConfig.for_model(family)) == ("one sequence a row" if rows is Rows.SINGLE else "packed")


def test_logprobs_that_are_not_finite_are_said_to_be() -> None:
    with pytest.raises(UserError, match="not finite"):
        Proof(float("nan"), 0.0, 0.0, 0.0, 0.0).rows("qwen3", "float32")


@pytest.mark.parametrize("family", ["mamba2", "qwen3", "bamba", "falcon_h1", "nemotron_h"])
def test_a_config_is_read_as_transformers_writes_it(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert hf_config(json.loads(config.to_json_string())).to_json_string() == config.to_json_string()


def test_a_folder_does_not_choose_how_attention_is_computed() -> None:
    assert (
        hf_config({**world.MODEL, "attn_implementation": "flash_attention_2"})._attn_implementation
        != "flash_attention_2"
    )


def test_what_nothing_makes_again_is_named() -> None:
    lm = empty_model(small_config(AutoConfig.for_model("llama"))).to_empty(device="cpu")
    lm.register_buffer("secret", torch.ones(3), persistent=False)
    with pytest.raises(UserError, match="its code does not compute its buffers secret"):
        restore_buffers(lm)


def test_windows_are_seen_by_short_sequences() -> None:
    """A window of thousands of tokens is tried with dozens: with it the logprobs are others."""
    config = small_config(AutoConfig.for_model("mistral"), sliding_window=4096)
    lm, tokens = small_model(config), torch.arange(40)[None]
    with torch.no_grad():
        wide = lm(input_ids=tokens).logits
        with small_windows(config):
            narrow = lm(input_ids=tokens).logits
        assert torch.equal(wide, lm(input_ids=tokens).logits)
    assert torch.allclose(wide[0, :8], narrow[0, :8], atol=1e-5) and not torch.allclose(
        wide[0, 9:], narrow[0, 9:], atol=1e-2
    )


def test_the_probe_reaches_beyond_a_window_where_the_context_does() -> None:
    windowed = small_config(AutoConfig.for_model("mistral"), sliding_window=100)
    plain = small_config(AutoConfig.for_model("llama"))
    assert [len(probe_tokens(windowed, context)) for context in (4096, 132, 131, 20)] == [132, 132, 32, 20]
    assert probe_tokens(plain, 4096) == probe_tokens(plain, 40) and len(probe_tokens(plain, 40)) == 32
    assert len(set(probe_tokens(windowed, 4096))) > 60 and max(probe_tokens(windowed, 4096)) < 96


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(world.one_rank(tmp_path, tokens_max=512))


def small(family: str) -> JsonDict:
    config = json.loads(small_config(AutoConfig.for_model(family), vocab_size=world.VOCAB).to_json_string())
    return {name: value for name, value in config.items() if value is not None}


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in SAVED)])
def test_a_policy_has_the_hubs_names_and_is_the_same_after_saving(
    trainer: Trainer, tmp_path: Path, family: str
) -> None:
    store = trainer.ranks.store
    world.run(trainer, "load", world.load_new(model=small(family)))
    world.run(trainer, "train", world.train("new", "trained", "sft", world.conversations(store, "data", 32)))
    saved = world.run(trainer, "save", world.save("trained", "policy", "state"))
    policy = world.saved(store, "policy", saved["policy"])
    folder = materialise(store, policy, tmp_path / "local")
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert trainer.resident is not None
    own = dict(trainer.resident.policy.lm.state_dict())
    assert own.keys() == lm.state_dict().keys()
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in own.items()}
    assert all(torch.equal(whole[name], tensor) for name, tensor in lm.state_dict().items())
    lm.save_pretrained(tmp_path / "theirs")
    names = [sorted(_names(path)) for path in (folder, tmp_path / "theirs")]
    assert names[0] == names[1], "the names of transformers' own files"
    before = world.digests(saved["policy"])
    for kind, ref in (("policy", policy), ("state", world.saved(store, "state", saved["state"]))):
        world.run(trainer, "load", world.load_ref(kind, kind, ref))
        again = world.run(trainer, "save", world.save(kind, f"again-{kind}", None))["policy"]
        assert world.digests(again)["model.safetensors"] == before["model.safetensors"]


def _names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_a_buffer_is_saved_in_its_own_number_type(tmp_path: Path) -> None:
    """The router's biases are used in float32, in which they differ by less than bfloat16 tells."""
    trainer = Trainer(world.one_rank(tmp_path, tokens_max=512, dtype="bfloat16"))
    world.run(trainer, "load", world.load_new(model=small("deepseek_v3")))
    saved = world.run(trainer, "save", world.save("new", "policy", None))
    folder = materialise(
        trainer.ranks.store, world.saved(trainer.ranks.store, "policy", saved["policy"]), tmp_path / "local"
    )
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert {dtype for name, dtype in kinds.items() if name.endswith("e_score_correction_bias")} == {torch.float32}
    assert {dtype for name, dtype in kinds.items() if not name.endswith("e_score_correction_bias")} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["mamba", "mbart", "rwkv", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_the_trainer_trains_what_is_built_unlike_others(trainer: Trainer, family: str) -> None:
    """Layers named within layers; weights that are set anew by name, and cannot be where they are
    sharded; buffers that another module makes."""
    world.run(trainer, "load", world.load_new(model=small(family)))
    data = world.conversations(trainer.ranks.store, "data", 8)
    metrics = world.run(trainer, "train", world.train("new", "trained", "sft", data, {"num_steps": 2}))["metrics"]
    assert metrics["train/num_tokens"] > 0
    assert world.run(trainer, "save", world.save("trained", "policy", None))["policy"]


def test_the_load_of_experts_is_that_of_transformers_own_router(trainer: Trainer, tmp_path: Path) -> None:
    """Counted for the trained tokens, each as the model routes it in its text alone."""
    store, data = trainer.ranks.store, world.conversations(trainer.ranks.store, "data", 16)
    world.run(trainer, "load", world.load_new(model=small("qwen3_moe")))
    saved = world.run(trainer, "save", world.save("new", "policy", None))["policy"]
    lm = AutoModelForCausalLM.from_pretrained(
        materialise(store, world.saved(store, "policy", saved), tmp_path / "local")
    )
    metrics = world.run(trainer, "train", world.train("new", "trained", "sft", data, {"num_steps": 1}))["metrics"]
    config = lm.config
    tokens_LE = torch.zeros(config.num_hidden_layers, config.num_experts)
    entropies = []
    for sequence in read_conversations(store, data, "conversations.parquet"):
        with torch.no_grad():
            routed = lm(torch.tensor(sequence.tokens).long()[None], output_router_logits=True).router_logits
        for layer, logits in enumerate(routed):
            top = logits[sequence.scored - 1].softmax(-1).topk(config.num_experts_per_tok)
            tokens_LE[layer] += torch.bincount(top.indices.flatten(), minlength=config.num_experts)
            entropies += torch.special.entr(top.values / top.values.sum(-1, keepdim=True)).sum(-1).tolist()
    assert metrics["train/expert_load_max"] == pytest.approx(
        (tokens_LE.amax(1) / tokens_LE.mean(1)).mean().item(), rel=1e-6
    )
    assert metrics["train/experts_unused"] == (tokens_LE == 0).float().mean().item()
    assert metrics["train/router_entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    world.run(trainer, "load", world.load_new())
    plain = world.run(trainer, "train", world.train("new", "trained", "sft", data, {"num_steps": 1}))["metrics"]
    assert not [name for name in plain if "expert" in name or "router" in name]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next", "cohere2"])
def test_the_loss_of_sft_is_transformers_own(trainer: Trainer, tmp_path: Path, family: str) -> None:
    store = trainer.ranks.store
    world.run(trainer, "load", world.load_new(model=small(family)))
    saved = world.run(trainer, "save", world.save("new", "policy", None))["policy"]
    lm = AutoModelForCausalLM.from_pretrained(
        materialise(store, world.saved(store, "policy", saved), tmp_path / "local")
    )
    data = world.conversations(store, "data", 16)
    metrics = world.run(trainer, "train", world.train("new", "trained", "sft", data, {"num_steps": 1}))["metrics"]
    total, count = 0.0, 0
    for sequence in read_conversations(store, data, "conversations.parquet"):
        labels = torch.full([len(sequence.tokens)], -100)
        labels[sequence.scored] = torch.tensor(sequence.tokens[sequence.scored]).long()
        num_trained = len(sequence.scored)
        total += lm(input_ids=torch.tensor(sequence.tokens).long()[None], labels=labels[None]).loss.item() * num_trained
        count += num_trained
    assert metrics["losses"][0] == pytest.approx(total / count, abs=1e-5)


def test_what_looks_ahead_is_refused_by_name(trainer: Trainer) -> None:
    with pytest.raises(UserError, match="roberta cannot be trained here"):
        world.run(trainer, "load", world.load_new(model=small("roberta")))


def test_quantized_weights_are_refused() -> None:
    with pytest.raises(UserError, match="quantized"):
        hf_config({**world.MODEL, "quantization_config": {"quant_method": "mxfp4"}})


def test_a_head_is_not_a_second_set_of_weights() -> None:
    policy = PolicyModel(small_model(small_config(AutoConfig.for_model("granite"))))
    assert len(list(policy.parameters())) == len(list(policy.lm.parameters()))
    assert isinstance(policy.lm.get_output_embeddings(), nn.Linear)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small new model of a family, in the hub's format."""

    @functools.cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        small_model(small_config(AutoConfig.for_model(family))).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3_text"])
def test_logits_do_not_depend_on_the_neighbours(family: str, dtype: Dtype, folder_of: Callable[[str], Path]) -> None:
    """Also of models with experts, where the number of an expert's tokens depends on
    all that are computed together."""
    with torch.inference_mode():
        model = LocalModel(str(folder_of(family)), "cpu", dtype=dtype)
        prompts = [tuple(range(seed, seed + 20)) for seed in (3, 20, 31, 40)]
        blocks = [model.prefill(chosen, 32) for chosen in (prompts, [prompts[0], prompts[3]], prompts[:1])]
        assert all(torch.equal(block.logits_RV[0], blocks[0].logits_RV[0]) for block in blocks)
        decoded = []
        for seed in range(35):  # whole steps, parts that are compared with them, and parts alone
            rows, used, length = (
                (48, 48, 128), (32, 32, 128), (16, 16, 128), (32, 32, 64), (16, 16, 64), (16, 1, 64), (16, 4, 128),
            )[seed % 7]  # fmt: skip
            kv_N2SHLD = model.empty_slots(48, 128)
            kv_N2SHLD[:, :, :1, :, :32] = blocks[0].kv_N2RHPD[:, :, :1]
            random = torch.Generator().manual_seed(seed)
            tokens_S, position_S = (
                torch.randint(0, 90, (rows,), generator=random),
                torch.randint(0, 60, (rows,), generator=random),
            )
            tokens_S[0], position_S[0] = 7, 20
            decoded.append(model.decode(tokens_S, position_S, kv_N2SHLD, used, length)[0])
    assert all(torch.equal(logits_V, decoded[0]) for logits_V in decoded)


@pytest.mark.parametrize(
    ("family", "why"), [("mamba", "linear_attention"), ("qwen3_next", "linear_attention"), ("bart", "off by")]
)
def test_what_the_local_engine_cannot_serve_is_refused_by_name(
    family: str, why: str, folder_of: Callable[[str], Path]
) -> None:
    with (
        pytest.raises(UserError, match=rf"cannot serve a {family} \(.*{why}.*use engines.kind='sglang'"),
        torch.inference_mode(),
    ):
        LocalModel(str(folder_of(family)), "cpu")
