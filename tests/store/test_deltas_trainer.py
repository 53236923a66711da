"""Differences of real policies: optimizer steps in bf16, a chain of fifty, files that are split,
and the trainer that starts from one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.store.backend import Store
from rlpipe.store.local_copy import materialise
from rlpipe.store.policy_files import dependencies, stored_policy
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.trainer.test_jobs import flip

CHAIN = 50
GENTLE: JsonDict = {"num_steps": 1, "learning_rate": 1e-6, "warmup_steps": 0}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return world.one_rank(tmp_path, tokens_max=512, dtype="bfloat16")


def save(trainer: Trainer, folder: str, base: ArtifactRef | None, is_base: bool = True) -> tuple[ArtifactRef, JsonDict]:
    """The policy that is resident, committed; and the answer of the job."""
    job = world.save("any", folder, None) | {"base": base.as_json() if base else None, "is_base": is_base}
    result = world.run(trainer, "save", job)
    return world.saved(trainer.ranks.store, folder, result["policy"]), result


def weights(store: Store, ref: ArtifactRef) -> dict[str, str]:
    return {name: record.sha256 for name, record in stored_policy(store, ref).files.items()}


@pytest.mark.slow
def test_fifty_differences_give_the_bits_of_the_policies_that_were_saved_whole(ranks: Ranks, tmp_path: Path) -> None:
    trainer, store = Trainer(ranks), ranks.store
    world.run(trainer, "load", world.load_new())
    data = world.batch(store, "batch", world.rollout_rows(2, 4))
    ref, _ = save(trainer, "v0", None)
    seen = {weights(store, ref)["model.safetensors"]}
    for version in range(1, CHAIN + 1):
        world.run(trainer, "train", world.train("a", "a", "rl", data, {**GENTLE, "first_step": version - 1}))
        ref, result = save(trainer, f"v{version}", ref)
        whole, _ = save(
            trainer, f"whole-{version}", None, is_base=version % 9 > 0
        )  # at 9 the next base comes out of the store
        assert weights(store, ref) == weights(store, whole)
        assert len(result["policy"]) == 2, "the difference, and delta.json"
        assert result["metrics"]["checkpoint/stored_bytes"] < result["metrics"]["checkpoint/policy_bytes"] / 5
        assert 0 < result["metrics"]["checkpoint/changed_fraction"] < 0.1
        seen.add(weights(store, ref)["model.safetensors"])
    assert len(seen) == CHAIN + 1 and len(dependencies(store, ref)) == CHAIN
    folder = materialise(store, ref, tmp_path / "local")
    stored = store.read(f"whole-{CHAIN}/a1/model.safetensors")
    assert (folder / "model.safetensors").read_bytes() == stored
    assert [path.name for path in (tmp_path / "local").iterdir()] == [folder.name]


def test_a_policy_of_several_files_is_loaded_from_its_difference(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.trainer.policy_files.FILE_BYTES_MAX", 100_000)
    trainer, store = Trainer(ranks), ranks.store
    world.run(trainer, "load", world.load_new())
    data = world.batch(store, "batch", world.rollout_rows(2, 4))
    start, _ = save(trainer, "v0", None)
    world.run(trainer, "train", world.train("a", "b", "rl", data, GENTLE))
    delta, result = save(trainer, "v1", start)
    names = {record["name"].partition("/")[2] for record in result["policy"]}
    assert len(names) > 2 and all(name.endswith((".safetensors.xor.zst", "delta.json")) for name in names)
    world.run(trainer, "load", world.load_ref("v1", "policy", delta))
    assert weights(store, save(trainer, "again", None)[0]) == weights(store, delta)
    assert list(ranks.scratch("policies").iterdir()) == []
    kl = {**GENTLE, "kl": "loss", "kl_coef": 0.1}
    metrics = world.run(trainer, "train", world.train("a", "b", "rl", data, kl) | {"reference": delta.as_json()})[
        "metrics"
    ]
    assert metrics["train/kl"] == 0.0, "the reference is the policy itself"
    damaged = next(record["name"] for record in result["policy"] if record["name"].endswith(".xor.zst"))
    flip(Path(store.address(f"v1/{damaged}")), -3)
    with pytest.raises(StoreError, match=rf"v1/{damaged} has .* and sha256"):
        world.run(trainer, "load", world.load_ref("v1", "policy", delta))


def test_a_trainer_that_was_lost_saves_the_same_difference(ranks: Ranks, tmp_path: Path) -> None:
    trainer, store = Trainer(ranks), ranks.store
    world.run(trainer, "load", world.load_new())
    data = world.batch(store, "batch", world.rollout_rows(2, 4))
    saved = world.run(trainer, "save", world.save("any", "v0", "state") | {"is_base": True})
    start, state = (world.saved(store, folder, saved[kind]) for folder, kind in (("v0", "policy"), ("state", "state")))
    job = world.train("a", "b", "rl", data, GENTLE)
    world.run(trainer, "train", job)
    first = world.run(trainer, "save", world.save("any", "v1", None) | {"base": start.as_json()})
    shutil.rmtree(ranks.scratch("kept"))
    other = Trainer(replace(ranks))
    world.run(other, "load", world.load_ref("a", "state", state))
    world.run(other, "train", job)
    again = world.run(other, "save", world.save("any", "v1-again", None) | {"base": start.as_json()})
    assert world.digests(again["policy"]) == world.digests(first["policy"])


def test_a_base_in_another_number_type_is_no_base(ranks: Ranks, tmp_path: Path) -> None:
    """The weights that a model came with are often fp32, and the policies bf16."""
    trainer = Trainer(replace(ranks, options=ranks.options.model_copy(update={"dtype": "float32"})))
    world.run(trainer, "load", world.load_new())
    start, _ = save(trainer, "v0", None)
    trainer = Trainer(ranks)
    world.run(trainer, "load", world.load_ref("a", "policy", start))
    ref, result = save(trainer, "v1", start)
    assert dependencies(ranks.store, ref) == [] and "checkpoint/changed_fraction" not in result["metrics"]
