"""Jobs in one process: what is trained, saved and loaded again is the same to the bit; bad input
leaves nothing resident."""

from __future__ import annotations

import gc
import json
import os
import weakref
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlpipe.base.errors import StepRefused, StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.models.small import small_config
from rlpipe.stages.policy import first_step_faults
from rlpipe.stages.training import warn_of_differences
from rlpipe.store.artifacts import blocks_of, file_sha256
from rlpipe.store.local_copy import materialise
from rlpipe.store.transfer import PART_BYTES
from rlpipe.trainer import trainer as memory
from rlpipe.trainer.jobs import LoadJob, job_of
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.state import load
from rlpipe.trainer.step import Resident
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return world.one_rank(tmp_path, tokens_max=512)


@pytest.fixture
def trainer(ranks: Ranks) -> Trainer:
    trainer = Trainer(ranks)
    world.run(trainer, "load", world.load_new())
    return trainer


@pytest.mark.parametrize(
    ("field", "environment", "chosen"),
    [("Ring", None, "Ring"), ("", None, None), ("Tree", None, "Tree"), ("Ring", "NVLS", "NVLS")],
)
def test_how_nccl_adds_up_is_the_configs_unless_the_environment_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, environment: str | None, chosen: str | None
) -> None:
    monkeypatch.setenv("NCCL_ALGO", environment or "")
    if environment is None:
        monkeypatch.delenv("NCCL_ALGO")
    world.one_rank(tmp_path, nccl_algo=field)
    assert os.environ.get("NCCL_ALGO") == chosen


def policy_sha(trainer: Trainer, folder: str = "final") -> str:
    records = world.run(trainer, "save", world.save("any", folder, None))["policy"]
    return world.digests(records)["model.safetensors"]


def test_a_save_tells_the_hashes_of_the_parts_of_each_file_of_weights(trainer: Trainer) -> None:
    saved = world.run(trainer, "save", world.save("new", "policy", None))
    (record,) = (record for record in saved["policy"] if record["name"].endswith(".safetensors"))
    path = trainer.ranks.published / "policy" / record["name"]
    assert saved["parts"] == {record["name"]: asdict(blocks_of(path, PART_BYTES))}
    assert saved["parts"][record["name"]]["sha256s"] == [record["sha256"]], "a file of one part"


def test_rl_is_on_policy_at_its_first_step_and_learns(trainer: Trainer) -> None:
    data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(6, 4))
    plain = {"objective": "reinforce", "importance": "none"}
    jobs = [world.train("a", "b", "rl", data, {**plain, "first_step": step}) for step in (0, 2, 4, 6)]
    metrics = [world.run(trainer, "train", job)["metrics"] for job in jobs]
    assert first_step_faults(metrics[0]["first_step"], 1, anchored=False) == []
    assert metrics[0]["train/clip_fraction_low"] == 0 and metrics[0]["train/proximal_kl"] > 0, (
        "the second step is off-policy"
    )
    assert 0.02 < metrics[0]["train/mismatch_abs_mean"] < 1
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]
    assert metrics[0]["train/num_tokens"] == sum(sum(row["loss_mask"]) for row in world.rollout_rows(6, 4))
    assert 1 < metrics[0]["train/packing_efficiency"] < 3, "a prompt is computed once for some of its completions"
    assert metrics[0]["train/learning_rate"] == 1e-3


def test_rollouts_without_logprobs_are_trained_as_if_the_policy_had_sampled_them(trainer: Trainer) -> None:
    rows, found = world.rollout_rows(6, 4), {}
    unknown = [row | {"rollout_logprobs": [float("inf")] * len(row["rollout_logprobs"])} for row in rows]
    for importance, told in (("none", rows), ("token_truncate", unknown), ("sequence_mask", unknown)):
        world.run(trainer, "load", world.load_new())
        data = world.batch(trainer.ranks.store, f"batch-{importance}", told)
        metrics = world.run(trainer, "train", world.train("a", "b", "rl", data, {"importance": importance}))["metrics"]
        found[importance] = policy_sha(trainer, f"final-{importance}")
        if told is unknown:
            assert (metrics["train/mismatch_abs_mean"], metrics["train/importance_mean"]) == (0.0, 1.0)
    assert len(set(found.values())) == 1


def test_kl_to_the_reference_is_zero_at_its_own_weights(trainer: Trainer) -> None:
    store = trainer.ranks.store
    start = world.saved(store, "start", world.run(trainer, "save", world.save("new", "start", None))["policy"])
    data = world.batch(store, "batch", world.rollout_rows(6, 4))
    settings: JsonDict = {"kl": "loss", "kl_coef": 0.1, "num_steps": 1}
    job = {**world.train("a", "b", "rl", data, settings), "reference": start.as_json()}
    first, second = (world.run(trainer, "train", job)["metrics"] for _ in range(2))
    assert first["train/kl"] == 0.0 < second["train/kl"]
    assert first_step_faults(first["first_step"], 0, anchored=False) == []
    (fault,) = first_step_faults(second["first_step"], 0, anchored=False)
    assert "differs from the reference" in fault and first_step_faults(second["first_step"], 1, anchored=False) == []
    with pytest.raises(UserError, match=r"settings\.kl=loss needs a reference"):
        world.run(trainer, "train", {**job, "reference": None})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_a_reference_in_bfloat16_gives_the_bits_of_fp32_masters(family: str, tmp_path: Path) -> None:
    trainer = Trainer(world.one_rank(tmp_path, tokens_max=512, dtype="bfloat16"))
    model = json.loads(small_config(AutoConfig.for_model(family), vocab_size=world.VOCAB).to_json_string())
    world.run(trainer, "load", world.load_new(model=model))
    start = world.saved(
        trainer.ranks.store, "start", world.run(trainer, "save", world.save("new", "start", None))["policy"]
    )
    data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(6, 4))
    job = world.train("a", "b", "rl", data, {"kl": "loss", "kl_coef": 0.1, "num_steps": 1}) | {
        "reference": start.as_json()
    }
    metrics = world.run(trainer, "train", job)["metrics"]
    assert metrics["train/kl"] == metrics["first_step"]["reference_abs"] == 0.0
    assert trainer._frozen and trainer.resident is not None
    kinds = [
        {parameter.dtype for parameter in policy.parameters()}
        for policy in (trainer.resident.policy, trainer._frozen["reference"][1].policy)
    ]
    assert kinds == [{torch.float32}, {torch.bfloat16}]


def test_a_kl_in_the_reward_changes_the_advantages_and_not_the_loss(trainer: Trainer) -> None:
    store = trainer.ranks.store
    world.run(trainer, "load", world.load_new("other", seed=9))
    other = world.saved(store, "other", world.run(trainer, "save", world.save("other", "other", None))["policy"])
    data = world.batch(store, "batch", world.rollout_rows(6, 4))
    found = {}
    for kl, kl_coef in (("none", 0.0), ("reward", 0.5), ("loss", 0.5)):
        world.run(trainer, "load", world.load_new())
        settings: JsonDict = {"kl": kl, "kl_coef": kl_coef, "num_steps": 1, "kl_estimator": "k2"}
        job = {**world.train("a", "b", "rl", data, settings), "reference": None if kl == "none" else other.as_json()}
        found[kl] = world.run(trainer, "train", job)["metrics"]
    assert found["reward"]["train/kl"] == found["loss"]["train/kl"] > 0 and "train/kl" not in found["none"]
    assert found["reward"]["train/loss"] == found["reward"]["train/policy_loss"] != found["none"]["train/policy_loss"]
    assert found["loss"]["train/policy_loss"] == found["none"]["train/policy_loss"] != found["loss"]["train/loss"]
    assert found["reward"]["first_step"]["reference_abs"] > 0.01 and found["none"]["first_step"]["reference_abs"] == 0


def test_a_kl_of_weight_0_is_logged_and_changes_no_bit(trainer: Trainer) -> None:
    store = trainer.ranks.store
    world.run(trainer, "load", world.load_new("other", seed=9))
    other = world.saved(store, "other", world.run(trainer, "save", world.save("other", "other", None))["policy"])
    data = world.batch(store, "batch", world.rollout_rows(6, 4))
    metrics, policies = {}, {}
    for kl, estimator in (("none", "k3"), ("loss", "k3"), ("loss", "k1"), ("reward", "k3")):
        world.run(trainer, "load", world.load_new())
        job = world.train("a", "b", "rl", data, {"kl": kl, "kl_coef": 0.0, "kl_estimator": estimator})
        name = f"{kl} {estimator}"
        metrics[name] = world.run(trainer, "train", job | {"reference": None if kl == "none" else other.as_json()})[
            "metrics"
        ]
        policies[name] = policy_sha(trainer, name)
    assert len(set(policies.values())) == 1 and "train/kl" not in metrics["none k3"]
    assert metrics["loss k3"]["train/kl"] == metrics["reward k3"]["train/kl"] > 0.0
    assert metrics["loss k3"]["train/loss"] == metrics["none k3"]["train/loss"]


def test_a_reference_of_another_family_sets_how_rows_are_filled(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that packed rows would leak through: both policies see one sequence a row, also where the
    reference was loaded before."""
    store = trainer.ranks.store
    start = world.saved(store, "start", world.run(trainer, "save", world.save("new", "start", None))["policy"])
    data = world.batch(store, "batch", world.rollout_rows(6, 4))
    job = world.train("a", "b", "rl", data, {"kl": "loss", "kl_coef": 0.0}) | {"reference": start.as_json()}
    packed = world.run(trainer, "train", job)["metrics"]["train/packing_efficiency"]
    monkeypatch.setattr(memory, "proven_rows", lambda ranks, policy: Rows.SINGLE)
    trainer._frozen.clear()
    alone = []
    for _ in range(2):
        world.run(trainer, "load", world.load_new())
        alone.append(world.run(trainer, "train", job)["metrics"]["train/packing_efficiency"])
    assert alone[0] == alone[1] < packed


def test_sft_segments_are_one_run(trainer: Trainer) -> None:
    data = world.conversations(trainer.ranks.store, "data", 40)
    whole = world.run(trainer, "train", world.train("a", "b", "sft", data, {"num_steps": 6}))["metrics"]
    expected = policy_sha(trainer)
    world.run(trainer, "load", world.load_new())
    parts = [
        world.run(trainer, "train", world.train("a", "b", "sft", data, {"num_steps": 2, "first_step": first}))[
            "metrics"
        ]["losses"]
        for first in (0, 2, 4)
    ]
    assert [loss for part in parts for loss in part] == whole["losses"]
    assert policy_sha(trainer) == expected
    assert whole["losses"][-1] < whole["losses"][0]
    assert trainer.resident is not None and trainer.resident.optimizer_step == 6


def test_state_and_replay_end_at_the_same_bits(trainer: Trainer) -> None:
    store = trainer.ranks.store
    batches = [world.batch(store, f"batch-{seed}", world.rollout_rows(6, 4, seed=seed)) for seed in range(3)]

    def iterate(index: int) -> None:
        world.run(trainer, "train", world.train("a", "b", "rl", batches[index], {"first_step": 2 * index}))

    iterate(0)
    saved = world.run(trainer, "save", world.save("b", "policy", "state"))
    iterate(1)
    iterate(2)
    expected = policy_sha(trainer)
    for _ in range(2):
        world.run(
            trainer, "load", world.load_ref("b", "state", ArtifactRef("state", _manifest_sha(trainer, saved["state"])))
        )
        again = world.run(trainer, "save", world.save("b", "policy-again", "state-again"))
        assert world.digests(again["policy"]) == world.digests(saved["policy"])
        assert world.digests(again["state"]) == world.digests(saved["state"])
        iterate(1)
        iterate(2)
        assert policy_sha(trainer) == expected


def _manifest_sha(trainer: Trainer, records: list[JsonDict]) -> str:
    return world.saved(trainer.ranks.store, "state", records).sha256


def test_saved_policy_is_a_transformers_model_with_the_tokenizer_of_another(trainer: Trainer, tmp_path: Path) -> None:
    store = trainer.ranks.store
    tokenizer = world.artifact(
        store, "base", {"tokenizer.json": b"{}", "chat_template.jinja": b"x", "config.json": b"no"}
    )
    saved = world.run(
        trainer,
        "save",
        {**world.save("new", "policy", None), "tokenizer": tokenizer.as_json(), "stop_token_ids": [1, 3]},
    )
    ref = world.saved(store, "policy", saved["policy"])
    folder = materialise(store, ref, tmp_path / "local")
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert trainer.resident is not None
    names = dict(model.named_parameters())
    assert names.keys() == trainer.resident.shards.keys() == load_file(folder / "model.safetensors").keys()
    assert all(torch.equal(parameter, trainer.resident.shards[name]) for name, parameter in names.items())
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert set(model.generation_config.eos_token_id) >= {1, 3}, "what ends a turn is known to whoever loads the policy"
    world.run(trainer, "load", world.load_ref("policy", "policy", ref))
    assert trainer.resident.optimizer_step == 0
    assert policy_sha(trainer) == world.digests(saved["policy"])["model.safetensors"]


def test_a_large_policy_is_split_and_loads_again(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = trainer.ranks.store
    whole = world.saved(store, "whole", world.run(trainer, "save", world.save("new", "whole", None))["policy"])
    monkeypatch.setattr("rlpipe.trainer.policy_files.FILE_BYTES_MAX", 200_000)
    split = world.saved(store, "split", world.run(trainer, "save", world.save("new", "split", None))["policy"])
    folder = materialise(store, split, tmp_path / "local")
    names = sorted(path.name for path in folder.glob("model*"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors", names
    tensors = load_file(materialise(store, whole, tmp_path / "local") / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == tensors.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in tensors.items())
    world.run(trainer, "load", world.load_ref("split", "policy", split))
    monkeypatch.undo()
    assert policy_sha(trainer) == file_sha256(tmp_path / "local" / f"whole-{whole.sha256[:12]}" / "model.safetensors")


def flip(path: Path, at: int) -> None:
    """Changes one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_state_is_named_and_not_restored(trainer: Trainer) -> None:
    store = trainer.ranks.store
    saved = world.run(trainer, "save", world.save("new", "policy", "state"))
    state, policy = (world.saved(store, kind, saved[kind]) for kind in ("state", "policy"))
    flip(Path(store.address("state/a1/state-00000-of-00001.safetensors")), -5)
    with pytest.raises(StoreError, match=r"state/a1/state-00000-of-00001\.safetensors is damaged between the bytes"):
        world.run(trainer, "load", world.load_ref("a", "state", state))
    flip(Path(store.address("policy/a1/model.safetensors")), -5)
    with pytest.raises(StoreError, match=r"policy/a1/model\.safetensors does not have the sha256"):
        world.run(trainer, "load", world.load_ref("a", "policy", policy))


def test_a_state_of_an_older_version_is_restored_and_hashed_whole(trainer: Trainer) -> None:
    store = trainer.ranks.store
    saved = world.run(trainer, "save", world.save("new", "policy", "state"))
    files = {name: store.read(f"state/a1/{name}") for name in world.digests(saved["state"])}
    document = {
        key: value for key, value in json.loads(files["state.json"]).items() if key not in ("blocks", "made_by")
    }
    old = world.artifact(store, "old", {**files, "state.json": json.dumps(document).encode()})
    world.run(trainer, "load", world.load_ref("a", "state", old))
    assert policy_sha(trainer) == world.digests(saved["policy"])["model.safetensors"]
    (damaged,) = Path(store.address("old")).glob("*/state-00000-of-00001.safetensors")
    flip(damaged, -5)
    with pytest.raises(StoreError, match="does not have the sha256"):
        world.run(trainer, "load", world.load_ref("a", "state", old))
    document["config"]["intermediate_size"] = 10**12  # what no memory holds is not asked for
    wide = world.artifact(store, "wide", {**files, "state.json": json.dumps(document).encode()})
    with pytest.raises(
        StoreError, match=r"wide/state.json has no tensor .*gate_proj.weight of shape \[1000000000000, 64\]"
    ):
        world.run(trainer, "load", world.load_ref("a", "state", wide))


def test_a_state_says_what_made_it_and_a_load_what_differs(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    store = trainer.ranks.store
    saved = world.run(trainer, "save", world.save("new", None, "state"))
    files = {name: store.read(f"state/a1/{name}") for name in world.digests(saved["state"])}
    document = json.loads(files["state.json"])
    made_by = document["made_by"]
    assert made_by.keys() == {
        "torch", "cuda", "nccl", "device", "products", "ranks", "context_ranks", "copies", "threads",
    }  # fmt: skip
    assert (made_by["torch"], made_by["ranks"]) == (torch.__version__, "1")
    ref = world.saved(store, "state", saved["state"])
    assert world.run(trainer, "load", world.load_ref("a", "state", ref))["differs"] == ""
    document["made_by"] = {**made_by, "device": "NVIDIA H100", "ranks": "8"}
    other = world.artifact(store, "other", {**files, "state.json": json.dumps(document).encode()})
    differs = world.run(trainer, "load", world.load_ref("a", "state", other))["differs"]
    assert differs == f"device NVIDIA H100 -> {made_by['device']}, ranks 8 -> 1"
    for _ in range(2):
        warn_of_differences("runs/a/rl/00003", differs)
        warn_of_differences("runs/a/rl/00003", "")
    (record,) = caplog.records
    assert "runs/a/rl/00003 was saved by another kind of trainer (device NVIDIA H100 ->" in record.message


def test_an_empty_batch_is_no_step(trainer: Trainer) -> None:
    before = policy_sha(trainer)
    data = world.batch(trainer.ranks.store, "batch", [])
    metrics = world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]
    assert metrics.pop("train/peak_memory_gib") > 0.05
    assert {value for name, value in metrics.items() if name.startswith("train/")} == {0}
    masked = [{**row, "loss_mask": [0] * len(row["loss_mask"])} for row in world.rollout_rows(2, 2)]
    world.run(trainer, "train", world.train("b", "c", "rl", world.batch(trainer.ranks.store, "masked", masked)))
    assert policy_sha(trainer, "after") == before
    kl: JsonDict = {"kl": "loss", "kl_coef": 0.1}
    start = world.saved(
        trainer.ranks.store, "start", world.run(trainer, "save", world.save("b", "start", None))["policy"]
    )
    job = {**world.train("b", "c", "rl", data, kl), "reference": start.as_json()}
    assert "train/kl" not in world.run(trainer, "train", job)["metrics"]


def test_refusals_leave_nothing_resident(trainer: Trainer) -> None:
    store = trainer.ranks.store
    rows = world.rollout_rows(6, 4)
    poisoned = world.batch(store, "runs/a/rl/00003/batch", world.poisoned(rows))
    with pytest.raises(StepRefused, match="runs/a/rl/00003/batch step 0"):
        world.run(trainer, "train", world.train("a", "b", "rl", poisoned))
    assert trainer.resident is None
    world.run(trainer, "load", world.load_new())
    infinite = world.batch(store, "infinite", [{**rows[0], "reward": float("inf")}, *rows[1:]])
    with pytest.raises(StoreError, match=r"infinite: row of group 0.*its reward inf is not finite"):
        world.run(trainer, "train", world.train("a", "b", "rl", infinite))
    world.run(trainer, "load", world.load_new())
    with pytest.raises(StoreError, match=r"wrong/manifest\.json"):
        world.run(trainer, "train", world.train("a", "b", "rl", ArtifactRef("wrong", "0" * 64)))
    assert trainer.resident is None
    with pytest.raises(UserError, match="model_type='nothing'"):
        world.run(trainer, "load", world.load_new(model={"model_type": "nothing"}))


def test_weights_that_do_not_fit_are_named(trainer: Trainer) -> None:
    store = trainer.ranks.store
    saved = world.run(trainer, "save", world.save("new", "policy", None))["policy"]
    folder = materialise(store, world.saved(store, "policy", saved), trainer.ranks.scratch("saving"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for size in (64, 10**12):  # what no memory holds is not asked for
        wide = {**json.loads(files["config.json"]), "intermediate_size": size}
        ref = world.artifact(store, f"unfit{size}", {**files, "config.json": json.dumps(wide).encode()})
        with pytest.raises(
            StoreError, match=rf"unfit{size}: .*down_proj\.weight has the shape .*, config.json says .*{size}"
        ):
            world.run(trainer, "load", world.load_ref("p", "policy", ref))
    torn = world.artifact(store, "torn", {**files, "model.safetensors": files["model.safetensors"][:-100]})
    with pytest.raises(StoreError, match=r"model\.safetensors is torn"):
        world.run(trainer, "load", world.load_ref("p", "policy", torn))


def test_what_a_load_replaces_has_given_its_memory_back_before_the_new_weights_are_read(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = world.batch(trainer.ranks.store, "replaced", world.rollout_rows(4, 4))
    world.run(trainer, "train", world.train("new", "one", "rl", data))
    assert trainer.resident is not None
    replaced = [weakref.ref(trainer.resident.policy), *map(weakref.ref, trainer.resident.shards.values())]
    loads: list[str] = []

    def watched(ranks: Ranks, job: LoadJob) -> tuple[Resident, str]:
        assert [each() for each in replaced] == [None] * len(replaced), "two policies at once"
        loads.append(job.position)
        return load(ranks, job)

    monkeypatch.setattr("rlpipe.trainer.trainer.load", watched)
    gc.disable()  # it may come at any time, or not at all
    gc.freeze()  # as a trainer's heap is between two loads
    try:
        trainer.run(job_of("load", json.dumps(world.load_new("again")).encode()))
    finally:
        gc.freeze()  # as tests/conftest.py left it
        gc.enable()
    assert loads == ["again"]
