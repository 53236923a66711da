"""LoRA: what an adapter computes is what peft computes of the same files; only the adapter is
trained, kept and stored."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.source import read_config
from rlpipe.extras.local_engine.model import LocalModel
from rlpipe.extras.plan.memory import adapter_lines, training_bytes
from rlpipe.extras.plan.sizes import ModelSizes
from rlpipe.extras.plan.trial import size_model
from rlpipe.models.adapter import is_adapter, merged, new_adapter_rows, put_adapter, target_names
from rlpipe.models.merge import AdapterFolder, merge
from rlpipe.models.small import small_config, small_model
from rlpipe.models.whole import whole_policy
from rlpipe.store.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
    PREFIX,
    Adapter,
    adapter_of,
    config_document,
)
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.policy_files import base_of
from rlpipe.trainer import trainer as memory
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.paths import PRESETS

ADAPTER = Adapter(4, 6.0)
FAMILIES = ["qwen2", "llama", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v3", "mamba", "falcon_h1"]
OTHERS = ["qwen3", "qwen3_next", "qwen3_5", "llama4_text", "mistral", "mixtral", "gemma2", "gpt_oss",
          "olmo3", "exaone4", "cohere2", "granite",
          "lfm2", "jamba", "falcon_mamba", "glm4_moe", "opt", "bloom", "recurrent_gemma", "smollm3",
          "apertus", "afmoe", "jetmoe"]  # fmt: skip
TOKENS = torch.arange(24)[None] * 7 % 96


def with_values(lm: Any, adapter: Adapter, seed: int = 0) -> dict[str, torch.Tensor]:
    """Puts an adapter with random matrices into a model; returns them by name."""
    put_adapter(lm, adapter)
    random = torch.Generator().manual_seed(seed)
    values = {}
    for name, parameter in lm.named_parameters():
        if is_adapter(name):
            values[name] = parameter.data = 0.2 * torch.randn(parameter.shape, generator=random, dtype=torch.float32)
    return values


def adapter_folder(folder: Path, lm: Any, adapter: Adapter, values: dict[str, torch.Tensor]) -> Path:
    """An adapter's files, as the trainer writes them."""
    folder.mkdir(parents=True)
    save_file({PREFIX + name: value for name, value in values.items()}, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config_document(adapter, target_names(lm))))
    config = json.loads(lm.config.to_json_string()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def logits(lm: Any) -> torch.Tensor:
    return lm(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft, by transformers
@pytest.mark.parametrize("targets", [(), ("o_proj", "down_proj")])
def test_the_merge_and_the_layers_beside_are_peft_s(
    tmp_path: Path, family: str, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(AutoConfig.for_model(family))
    lm, adapter = small_model(config), dataclasses.replace(ADAPTER, targets=targets)
    lm.save_pretrained(tmp_path / "base")
    folder = adapter_folder(tmp_path / "adapter", lm, adapter, with_values(lm, adapter))
    (whole := tmp_path / "merged").mkdir()
    merge(tmp_path / "base", folder, whole)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    assert {
        name.replace(".default", "").removeprefix(PREFIX) for name, _ in theirs.named_parameters() if "lora_" in name
    } == {name for name, _ in lm.named_parameters() if is_adapter(name)}
    for faster in (False, hasattr(torch.ops.mkldnn, "_linear_pointwise")):  # as on another machine's processor
        monkeypatch.setattr("rlpipe.models.adapter.onednn_is_faster", partial(bool, faster))
        assert float((logits(lm) - logits(theirs)).abs().max()) < 1e-5, f"by oneDNN: {faster}"
    unloaded: Any = theirs.merge_and_unload()
    own = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    assert own.state_dict().keys() == unloaded.state_dict().keys()
    assert (
        max(float((tensor - unloaded.state_dict()[name]).abs().max()) for name, tensor in own.state_dict().items())
        < 1e-6
    )
    assert float((logits(own) - logits(unloaded)).abs().max()) < 1e-5
    assert float((logits(own) - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))).abs().max()) > 0.1


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**16))
def test_a_merge_is_that_of_float64(outputs: int, inputs: int, rank: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weight, a, b = (
        torch.randn(shape, generator=random) for shape in ((outputs, inputs), (rank, inputs), (outputs, rank))
    )
    exact = weight.double() + 1.5 * b.double() @ a.double()
    assert float((merged(weight, a, b, 1.5, torch.float32).double() - exact).abs().max()) < 1e-5
    coarse = merged(weight.bfloat16(), a.bfloat16(), b.bfloat16(), 1.5, torch.bfloat16)
    assert coarse.dtype is torch.bfloat16 and float((coarse.double() - exact).abs().max()) < 0.02 * (
        1 + float(exact.abs().max())
    )


def test_a_new_adapter_changes_nothing_and_is_the_same_on_any_number_of_ranks() -> None:
    name, shape = "model.layers.0.self_attn.q_proj.lora_A.weight", [8, 64]
    whole = new_adapter_rows(5, name, shape, 0, 8)
    assert torch.equal(torch.cat([new_adapter_rows(5, name, shape, *rows) for rows in ((0, 3), (3, 6), (6, 8))]), whole)
    assert 0.11 < float(whole.abs().max()) <= 1 / 8 and abs(float(whole.mean())) < 0.02
    assert not torch.equal(new_adapter_rows(6, name, shape, 0, 8), whole)
    assert not new_adapter_rows(5, name.replace("lora_A", "lora_B"), [64, 8], 2, 9).any()
    lm = small_model(small_config(AutoConfig.for_model("llama")))
    before = logits(lm)
    put_adapter(lm, ADAPTER)
    for part, parameter in lm.named_parameters():
        if is_adapter(part):
            parameter.data = new_adapter_rows(0, part, [*parameter.shape], 0, len(parameter))
    assert torch.equal(logits(lm), before)


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_a_family_s_layers_all_use_what_is_beside_them(tmp_path: Path, family: str) -> None:
    """With the adapter beside it computes what it computes with the adapter merged into its
    weights: none is read past the layer."""
    lm = small_model(small_config(AutoConfig.for_model(family)))
    lm.save_pretrained(tmp_path / "base")
    values = with_values(lm, ADAPTER)
    folder = adapter_folder(tmp_path / "adapter", lm, ADAPTER, values)
    (tmp_path / "merged").mkdir()
    merge(tmp_path / "base", folder, tmp_path / "merged")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    difference = float((logits(lm).log_softmax(-1) - logits(own).log_softmax(-1)).abs().max())
    assert difference < 1e-3, f"{difference:.3g}"
    assert not any("experts." in name and "shared" not in name for name in values if family == "qwen3_moe")


def test_what_cannot_have_an_adapter_is_refused_by_name() -> None:
    lm = small_model(small_config(AutoConfig.for_model("llama")))
    with pytest.raises(
        UserError, match=r"model\.adapter_targets: llama has no linear layer 'w_proj'; it has down_proj, gate_proj"
    ):
        put_adapter(lm, Adapter(4, 8.0, ("q_proj", "w_proj")))
    with pytest.raises(UserError, match=r"model\.adapter_targets: llama has no linear layer 'lm_head'"):
        put_adapter(lm, Adapter(4, 8.0, ("lm_head",)))
    with pytest.raises(UserError, match=r"model\.adapter='lora': gpt2 has no linear layer of torch"):
        put_adapter(small_model(small_config(AutoConfig.for_model("gpt2"))), ADAPTER)
    assert all(parameter.requires_grad for parameter in lm.parameters()), "a refusal changes nothing"


def test_targets_are_the_ends_of_names_where_these_are_unique() -> None:
    lm = small_model(small_config(AutoConfig.for_model("llama")))
    put_adapter(lm, Adapter(4, 8.0, ("model.layers.1.self_attn.q_proj",)))
    assert target_names(lm) == ["model.layers.1.self_attn.q_proj"]
    lm = small_model(small_config(AutoConfig.for_model("llama")))
    put_adapter(lm, ADAPTER)
    assert target_names(lm) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_another_kind_of_adapter_is_refused_with_the_field() -> None:
    document = config_document(Adapter(8, 16.0), ["q_proj"])
    assert adapter_of("x", document) == Adapter(8, 16.0, ("q_proj",)) and document["lora_alpha"] == 16
    assert adapter_of("x", document | {"unknown": 1}) == adapter_of("x", document)
    assert not {"rank_pattern", "modules_to_save"} & document.keys()
    empty = {
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "target_parameters": [],
        "lora_bias": False,
    }
    assert adapter_of("x", document | empty) == adapter_of("x", document)  # as peft writes them
    patterns = (
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"layers_to_transform": [0]},
        {"lora_bias": True},
    )
    for change in (
        {"use_dora": True},
        {"r": 0},
        {"target_modules": []},
        {"bias": "all"},
        {"peft_type": "IA3"},
        *patterns,
    ):
        (name,) = change
        with pytest.raises(StoreError, match=rf"^x: {name}"):
            adapter_of("x", document | change)


def test_torn_and_foreign_adapters_are_named(tmp_path: Path) -> None:
    lm = small_model(small_config(AutoConfig.for_model("llama")))
    lm.save_pretrained(tmp_path / "base")
    folder = adapter_folder(tmp_path / "adapter", lm, ADAPTER, with_values(lm, ADAPTER))
    other = small_model(small_config(AutoConfig.for_model("opt")))
    strange = adapter_folder(tmp_path / "strange", lm, ADAPTER, with_values(other, ADAPTER))
    (tmp_path / "merged").mkdir()
    with pytest.raises(StoreError, match=r"strange: it is of another model: .*base has no model\.decoder"):
        merge(tmp_path / "base", strange, tmp_path / "merged")
    data = (folder / ADAPTER_WEIGHTS).read_bytes()
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    first = min(tensors)
    for change, said in (
        ({}, "is no half of two matrices"),
        ({first: torch.full_like(tensors[first], torch.nan)}, f"{first} holds values that are NaN"),
        ({first: tensors[first], "other": tensors[first].clone()}, "other is no half of two matrices"),
    ):
        others = {name: tensor for name, tensor in tensors.items() if name != first}
        save_file(others | change, folder / ADAPTER_WEIGHTS)
        with pytest.raises(StoreError, match=said):
            AdapterFolder(folder)
    (folder / ADAPTER_WEIGHTS).write_bytes(data[:-40])
    with pytest.raises(StoreError, match=r"adapter_model\.safetensors is torn or missing"):
        AdapterFolder(folder)


@pytest.mark.parametrize(
    ("sets", "fault"),
    [
        (
            ["model.adapter_rank=4"],
            r"model\.adapter_rank=4: no adapter is trained \(model\.adapter = 'none'\); set model\.adapter = 'lora'",
        ),
        (["model.adapter_targets=['q_proj']"], r"model\.adapter_targets=\['q_proj'\]: no adapter is trained"),
        (["model.adapter=lora", "model.adapter_rank=0"], r"model\.adapter_rank=0"),
        (["model.adapter=dora"], r"model\.adapter='?dora"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(sets: list[str], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        read_config("tiny", sets, PRESETS)


def test_a_plan_counts_the_adapter_and_a_trial_refuses_a_wrong_name() -> None:
    config = json.loads(small_config(AutoConfig.for_model("llama")).to_json_string())
    training = {"tokens_max": 64, "activation_checkpointing": False, "dtype": "bfloat16"}
    hello = {
        "config": config,
        "context_tokens_max": 32,
        "training": training,
        "adapter": {"rank": 4, "alpha": 8.0, "targets": []},
    }
    sizes = ModelSizes(**size_model(hello)["sizes"])
    lm = small_model(small_config(AutoConfig.for_model("llama")))
    before = sum(parameter.numel() for parameter in lm.parameters())
    assert (sizes.parameters, sizes.adapter) == (
        before,
        sum(value.numel() for value in with_values(lm, ADAPTER).values()),
    )
    with pytest.raises(UserError, match=r"llama has no linear layer 'w'"):
        size_model(hello | {"adapter": {"rank": 4, "alpha": 8.0, "targets": ["w"]}})
    run = read_config("tiny", ["model.adapter=lora", "model.dtype=bfloat16"], PRESETS)
    whole, adapted = (training_bytes(run, dataclasses.replace(sizes, adapter=count)) for count in (0, sizes.adapter))
    assert (whole[0], adapted[0]) == (16 * sizes.parameters, 2 * sizes.parameters + 16 * sizes.adapter)
    assert adapted[1] < whole[1] and adapter_lines(sizes, 2)[0].startswith("adapter: 0.0")
    kl = read_config("tiny", ["model.adapter=lora", "model.dtype=bfloat16", "rl.kl=loss", "rl.kl_coef=0.1"], PRESETS)
    assert training_bytes(kl, sizes)[0] == adapted[0], "the reference is the policy with another adapter"


# in the trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(world.one_rank(tmp_path, tokens_max=512))


def base(trainer: Trainer) -> ArtifactRef:
    """A whole policy in the store."""
    world.run(trainer, "load", world.load_new(model=world.MODEL | {"tie_word_embeddings": False}))
    return world.saved(
        trainer.ranks.store, "base", world.run(trainer, "save", world.save("new", "base", None))["policy"]
    )


def fresh(ref: ArtifactRef, **settings: Any) -> JsonDict:
    adapter = {"settings": {"rank": 4, "alpha": 8.0, **settings}, "seed": 1}
    return {**world.load_ref("fresh", "policy", ref), "adapter": adapter}


def trained(trainer: Trainer, ref: ArtifactRef, kind: str = "sft", **settings: Any) -> dict[str, ArtifactRef]:
    """Trains a new adapter; the policy and the state that it becomes."""
    store = trainer.ranks.store
    world.run(trainer, "load", fresh(ref))
    data = (
        world.conversations(store, "data", 48)
        if kind == "sft"
        else world.batch(store, "data", world.rollout_rows(6, 4))
    )
    world.run(trainer, "train", world.train("fresh", "trained", kind, data, {"learning_rate": 1e-2, **settings}))
    saved = world.run(trainer, "save", world.save("trained", "policy", "state"))
    return {kind: world.saved(store, kind, saved[kind]) for kind in ("policy", "state")}


def test_only_the_adapter_is_trained_kept_and_stored(trainer: Trainer, tmp_path: Path) -> None:
    store, ref = trainer.ranks.store, base(trainer)
    made = trained(trainer, ref)
    resident = trainer.resident
    assert resident is not None and all(is_adapter(name) for name in resident.shards)
    assert len(resident.shards) == 2 * 7 * 2  # halves of seven layers in each of two blocks
    assert len(resident.optimizer.state) == len(resident.shards)
    folder = whole_policy(store, made["policy"], tmp_path / "whole")
    adapter = tmp_path / "whole" / folder.name.removesuffix("-merged")
    assert sorted(path.name for path in adapter.iterdir()) == [
        ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, "config.json", "generation_config.json",
    ]  # fmt: skip
    assert base_of(store, made["policy"]) == ref and base_of(store, ref) is None
    before = load_file(whole_policy(store, ref, tmp_path / "base") / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed == {name for name in before if "proj" in name}
    state = json.loads(next((tmp_path / "store" / "state").rglob("state.json")).read_text())
    assert state["tensors"].keys() == resident.shards.keys() and state["adapted"]["base"] == ref.as_json()


def test_an_engine_with_the_merge_gives_the_trainer_s_logprobs(trainer: Trainer, tmp_path: Path) -> None:
    made = trained(trainer, base(trainer))
    probe = world.run(trainer, "save", world.save("trained", None, None))["probe"]
    model = LocalModel(str(whole_policy(trainer.ranks.store, made["policy"], tmp_path / "whole")), "cpu")
    scored, _ = model.score(tuple(probe["tokens"]), len(probe["tokens"]) - 1 - len(probe["logprobs"]))
    differences = [abs(own - logprob) for own, logprob in zip(scored, probe["logprobs"], strict=True)]
    assert max(differences) < 1e-5
    model.reload(
        str(whole_policy(trainer.ranks.store, base_of(trainer.ranks.store, made["policy"]) or made["policy"], tmp_path))
    )
    other, _ = model.score(tuple(probe["tokens"]), len(probe["tokens"]) - 1 - len(probe["logprobs"]))
    assert max(abs(own - logprob) for own, logprob in zip(other, probe["logprobs"], strict=True)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_what_is_loaded_again_is_what_was_saved(trainer: Trainer, kind: str) -> None:
    store, ref = trainer.ranks.store, base(trainer)
    made = trained(trainer, ref, kind)
    data = world.batch(store, "more", world.rollout_rows(6, 4, seed=3))
    finals = []
    for attempt in range(2):
        world.run(trainer, "load", world.load_ref("trained", "state", made["state"]))
        saved = world.run(trainer, "save", world.save("trained", f"again-{attempt}", f"again-state-{attempt}"))
        policy, state = (world.digests(saved[name]) for name in ("policy", "state"))
        assert policy == {file.plain_name: file.sha256 for file in files_of(trainer, made["policy"])}
        assert state == {file.plain_name: file.sha256 for file in files_of(trainer, made["state"])}
        world.run(trainer, "train", world.train("trained", "more", "rl", data))
        finals.append(world.digests(world.run(trainer, "save", world.save("more", f"more-{attempt}", None))["policy"]))
    assert finals[0] == finals[1] and finals[0][ADAPTER_WEIGHTS] != policy[ADAPTER_WEIGHTS]
    world.run(trainer, "load", world.load_ref("start", "policy", made["policy"]))
    assert trainer.resident is not None and trainer.resident.policy.adapted is not None
    assert trainer.resident.policy.adapted.base == ref, "an adapter of an adapter would be of the base"
    again = world.digests(world.run(trainer, "save", world.save("start", "start", None))["policy"])
    assert again == {file.plain_name: file.sha256 for file in files_of(trainer, made["policy"])}


def files_of(trainer: Trainer, ref: ArtifactRef) -> list[Any]:
    return read_manifest(trainer.ranks.store, ref.folder, ref.sha256).files


@pytest.mark.slow
@pytest.mark.parametrize("after_sft", [False, True])
def test_the_reference_is_the_resident_policy_with_another_adapter(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, after_sft: bool
) -> None:
    """Off where RL starts from the base, that of version 0 after SFT: no second
    model, and the numbers of one."""
    store, ref = trainer.ranks.store, base(trainer)
    start = trained(trainer, ref)["policy"] if after_sft else ref
    data = world.batch(store, "batch", world.rollout_rows(6, 4))
    settings: JsonDict = {"kl": "loss", "kl_coef": 0.1, "num_steps": 2, "learning_rate": 1e-2}
    jobs = [
        world.train(f"rl-{step}", f"rl-{step + 1}", "rl", data, settings) | {"reference": start.as_json()}
        for step in range(2)
    ]
    results = []
    for own in (False, True):
        if own:
            monkeypatch.setattr(memory, "adapter_of_reference", lambda *_: [])
        world.run(trainer, "load", world.load_ref("rl-0", "policy", start) if after_sft else fresh(ref))
        metrics = [world.run(trainer, "train", job)["metrics"] for job in jobs]
        reference = trainer._frozen["reference"]
        assert trainer.resident is not None
        assert (reference[1].policy is trainer.resident.policy) == (not own)
        assert metrics[0]["first_step"]["reference_abs"] == 0.0 < metrics[1]["first_step"]["reference_abs"]
        results.append([{name: metric[name] for name in metric if "_s" not in name[-2:]} for metric in metrics])
    for here, there in zip(*results, strict=True):
        assert here["train/kl"] == pytest.approx(there["train/kl"], rel=1e-4)
        assert here["train/loss"] == pytest.approx(there["train/loss"], rel=1e-5, abs=1e-6)


def test_in_bfloat16_the_base_is_held_so_and_the_adapter_has_masters(tmp_path: Path) -> None:
    trainer = Trainer(world.one_rank(tmp_path, tokens_max=512, dtype="bfloat16"))
    made = trained(trainer, base(trainer), "rl")
    assert trainer.resident is not None
    kinds = {is_adapter(name): set() for name in ("x.lora_A.weight", "x")}
    for name, parameter in trainer.resident.policy.named_parameters():
        kinds[is_adapter(name)].add(parameter.dtype)
    assert kinds == {True: {torch.float32}, False: {torch.bfloat16}}
    folder = whole_policy(trainer.ranks.store, made["policy"], tmp_path / "whole")
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    probe = world.run(trainer, "save", world.save("trained", None, None))["probe"]
    scored, _ = LocalModel(str(folder), "cpu").score(
        tuple(probe["tokens"]), len(probe["tokens"]) - 1 - len(probe["logprobs"])
    )
    assert sum(abs(own - logprob) for own, logprob in zip(scored, probe["logprobs"], strict=True)) / len(scored) < 0.05


def test_a_load_of_a_new_adapter_is_refused_without_a_whole_policy(trainer: Trainer) -> None:
    adapter = {"settings": {"rank": 4, "alpha": 8.0}, "seed": 1}
    with pytest.raises(UserError, match="a new adapter is beside a policy"):
        world.run(trainer, "load", {**world.load_new(), "adapter": adapter})
    with pytest.raises(UserError, match=r"adapter\.settings\.rank=0"):
        world.run(trainer, "load", fresh(ArtifactRef("base", "0" * 64), rank=0))
    with pytest.raises(UserError, match=r"no linear layer 'w'"):
        world.run(trainer, "load", fresh(base(trainer), targets=["w"]))
