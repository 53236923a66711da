"""Jobs in one process: what is trained, saved and loaded again is the same to the bit; bad input leaves nothing resident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlpipe.stages.policy import first_step_faults
from rlpipe.store.artifacts import materialise
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.jobs import Trainer
from rlpipe.trainer.saving import files_of
from rlpipe.types import ArtifactRef, JsonDict, StepRefused, StoreError, UserError
from tests import trainer_world as world


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return world.solo_gang(tmp_path, tokens_max=512)


@pytest.fixture
def trainer(gang: Gang) -> Trainer:
    trainer = Trainer(gang)
    trainer.run("load", world.load_new())
    return trainer


def policy_sha(trainer: Trainer, folder: str = "final") -> str:
    records = trainer.run("save", world.save("any", folder, None))["policy"]
    return world.digests(records)["model.safetensors"]


def test_rl_is_on_policy_at_its_first_step_and_learns(trainer: Trainer) -> None:
    data = world.batch(trainer.gang.store, "batch", world.rollout_rows(6, 4))
    plain = {"objective": "reinforce", "importance": "none"}
    jobs = [world.train("a", "b", "rl", data, {**plain, "first_step": step}) for step in (0, 2, 4, 6)]
    metrics = [trainer.run("train", job)["metrics"] for job in jobs]
    assert first_step_faults(metrics[0]["first_step"], 1, "reinforce") == []
    assert metrics[0]["train/clip_fraction_low"] == 0 and metrics[0]["train/proximal_kl"] > 0, "the second step is off-policy"
    assert 0.02 < metrics[0]["train/mismatch_abs_mean"] < 1
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]
    assert metrics[0]["train/num_tokens"] == sum(sum(row["loss_mask"]) for row in world.rollout_rows(6, 4))
    assert 0.3 < metrics[0]["train/packing_efficiency"] <= 1
    assert metrics[0]["train/learning_rate"] == 1e-3


def test_kl_to_the_reference_is_zero_at_its_own_weights(trainer: Trainer) -> None:
    store = trainer.gang.store
    start = world.saved(store, "start", trainer.run("save", world.save("new", "start", None))["policy"])
    data = world.batch(store, "batch", world.rollout_rows(6, 4))
    settings: JsonDict = {"kl": "loss", "kl_coef": 0.1, "num_steps": 1}
    job = {**world.train("a", "b", "rl", data, settings), "reference": start.as_json()}
    first, second = (trainer.run("train", job)["metrics"] for _ in range(2))
    assert first["train/kl"] == 0.0 < second["train/kl"]
    assert first_step_faults(first["first_step"], 0, "ppo") == []
    (fault,) = first_step_faults(second["first_step"], 0, "ppo")
    assert "differs from the reference" in fault and first_step_faults(second["first_step"], 1, "ppo") == []
    with pytest.raises(UserError, match=r"settings\.kl=loss needs a reference"):
        trainer.run("train", {**job, "reference": None})


def test_a_kl_in_the_reward_changes_the_advantages_and_not_the_loss(trainer: Trainer) -> None:
    store = trainer.gang.store
    trainer.run("load", world.load_new("other", seed=9))
    other = world.saved(store, "other", trainer.run("save", world.save("other", "other", None))["policy"])
    data = world.batch(store, "batch", world.rollout_rows(6, 4))
    found = {}
    for kl, kl_coef in (("none", 0.0), ("reward", 0.5), ("loss", 0.5)):
        trainer.run("load", world.load_new())
        settings: JsonDict = {"kl": kl, "kl_coef": kl_coef, "num_steps": 1, "kl_estimator": "k2"}
        job = {**world.train("a", "b", "rl", data, settings), "reference": None if kl == "none" else other.as_json()}
        found[kl] = trainer.run("train", job)["metrics"]
    assert found["reward"]["train/kl"] == found["loss"]["train/kl"] != found["none"]["train/kl"] == 0
    assert found["reward"]["train/loss"] == found["reward"]["train/policy_loss"] != found["none"]["train/policy_loss"]
    assert found["loss"]["train/policy_loss"] == found["none"]["train/policy_loss"] != found["loss"]["train/loss"]
    assert found["reward"]["first_step"]["reference_abs"] > 0.01 and found["none"]["first_step"]["reference_abs"] == 0


def test_sft_segments_are_one_run(trainer: Trainer) -> None:
    data = world.conversations(trainer.gang.store, "data", 40)
    whole = trainer.run("train", world.train("a", "b", "sft", data, {"num_steps": 6}))["metrics"]
    expected = policy_sha(trainer)
    trainer.run("load", world.load_new())
    parts = [
        trainer.run("train", world.train("a", "b", "sft", data, {"num_steps": 2, "first_step": first}))["metrics"]["losses"]
        for first in (0, 2, 4)
    ]
    assert [loss for part in parts for loss in part] == whole["losses"]
    assert policy_sha(trainer) == expected
    assert whole["losses"][-1] < whole["losses"][0]
    assert trainer.resident is not None and trainer.resident.optimizer_step == 6


def test_state_and_replay_end_at_the_same_bits(trainer: Trainer) -> None:
    store = trainer.gang.store
    batches = [world.batch(store, f"batch-{seed}", world.rollout_rows(6, 4, seed=seed)) for seed in range(3)]

    def iterate(index: int) -> None:
        trainer.run("train", world.train("a", "b", "rl", batches[index], {"first_step": 2 * index}))

    iterate(0)
    saved = trainer.run("save", world.save("b", "policy", "state"))
    iterate(1)
    iterate(2)
    expected = policy_sha(trainer)
    for _ in range(2):
        trainer.run("load", world.load_ref("b", "state", ArtifactRef("state", _manifest_sha(trainer, saved["state"]))))
        again = trainer.run("save", world.save("b", "policy-again", "state-again"))
        assert world.digests(again["policy"]) == world.digests(saved["policy"])
        assert world.digests(again["state"]) == world.digests(saved["state"])
        iterate(1)
        iterate(2)
        assert policy_sha(trainer) == expected
    assert not list((trainer.gang.scratch("fetched")).iterdir()), "fetched files are removed"


def _manifest_sha(trainer: Trainer, records: list[JsonDict]) -> str:
    return world.saved(trainer.gang.store, "state", records).sha256


def test_saved_policy_is_a_transformers_model_with_the_tokenizer_of_another(trainer: Trainer, tmp_path: Path) -> None:
    store = trainer.gang.store
    tokenizer = world.artifact(store, "base", {"tokenizer.json": b"{}", "chat_template.jinja": b"x", "config.json": b"no"})
    saved = trainer.run("save", {**world.save("new", "policy", None), "tokenizer": tokenizer.as_json()})
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
    trainer.run("load", world.load_ref("policy", "policy", ref))
    assert trainer.resident.optimizer_step == 0
    assert policy_sha(trainer) == world.digests(saved["policy"])["model.safetensors"]


def test_large_policies_are_split_in_order() -> None:
    assert files_of({"a": 3, "b": 3, "c": 5, "d": 9}, 6) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }
    assert files_of({"a": 3, "b": 3}, 6) == {"model.safetensors": ["a", "b"]}


def test_an_empty_batch_is_no_step(trainer: Trainer) -> None:
    before = policy_sha(trainer)
    data = world.batch(trainer.gang.store, "batch", [])
    metrics = trainer.run("train", world.train("a", "b", "rl", data))["metrics"]
    assert {value for name, value in metrics.items() if name.startswith("train/")} == {0}
    masked = [{**row, "loss_mask": [0] * len(row["loss_mask"])} for row in world.rollout_rows(2, 2)]
    trainer.run("train", world.train("b", "c", "rl", world.batch(trainer.gang.store, "masked", masked)))
    assert policy_sha(trainer, "after") == before


def test_refusals_leave_nothing_resident(trainer: Trainer) -> None:
    store = trainer.gang.store
    rows = world.rollout_rows(6, 4)
    poisoned = world.batch(store, "runs/a/rl/00003/batch", world.poisoned(rows))
    with pytest.raises(StepRefused, match="runs/a/rl/00003/batch step 0"):
        trainer.run("train", world.train("a", "b", "rl", poisoned))
    assert trainer.resident is None
    trainer.run("load", world.load_new())
    infinite = world.batch(store, "infinite", [{**rows[0], "reward": float("inf")}, *rows[1:]])
    with pytest.raises(StoreError, match=r"infinite: row of group 0.*its reward inf is not finite"):
        trainer.run("train", world.train("a", "b", "rl", infinite))
    trainer.run("load", world.load_new())
    with pytest.raises(StoreError, match=r"wrong/manifest\.json"):
        trainer.run("train", world.train("a", "b", "rl", ArtifactRef("wrong", "0" * 64)))
    assert trainer.resident is None
    with pytest.raises(UserError, match="exactly one of new, policy and state"):
        trainer.run("load", {**world.load_new(), "state": {"folder": "x", "sha256": "y"}})
    trainer.run("load", world.load_new())
    with pytest.raises(UserError, match=r"settings: .*\nobjective\n.*'ppo', .*input_value='trpo'"):
        trainer.run("train", world.train("a", "b", "rl", infinite, {"objective": "trpo"}))
    with pytest.raises(UserError, match="model_type='nothing'"):
        trainer.run("load", world.load_new(model={"model_type": "nothing"}))


def test_weights_that_do_not_fit_are_named(trainer: Trainer) -> None:
    store = trainer.gang.store
    saved = trainer.run("save", world.save("new", "policy", None))["policy"]
    folder = materialise(store, world.saved(store, "policy", saved), trainer.gang.scratch("saving"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    wide = {**json.loads(files["config.json"]), "intermediate_size": 64}
    ref = world.artifact(store, "unfit", {**files, "config.json": json.dumps(wide).encode()})
    with pytest.raises(StoreError, match=r"gate_proj\.weight has the shape"):
        trainer.run("load", world.load_ref("p", "policy", ref))
    torn = world.artifact(store, "torn", {**files, "model.safetensors": files["model.safetensors"][:-100]})
    with pytest.raises(StoreError, match="incomplete metadata"):
        trainer.run("load", world.load_ref("p", "policy", torn))
