"""What a trainer holds goes away and comes back: real memory, the same bits, and nothing half moved
when the disk is full."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.processes.memory import trim
from rlpipe.trainer import moments as moments_room
from rlpipe.trainer import offload as offload_room
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.trainer.test_jobs import policy_sha

OFFLOAD = {"kind": "offload"}
LARGE = {**world.MODEL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 128}
WEIGHTS_BYTES = 4 * 30_000_000  # at least


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(world.one_rank(tmp_path, tokens_max=512))


@pytest.fixture
def data(trainer: Trainer) -> ArtifactRef:
    return world.batch(trainer.ranks.store, "batch", world.rollout_rows(6, 4))


def parked_file(trainer: Trainer) -> Path:
    return Path(trainer.ranks.options.work_dir) / "offload" / "rank-0"


def job(data: ArtifactRef, step: int, settings: JsonDict, reference: ArtifactRef | None = None) -> JsonDict:
    body = world.train("a", "b", "rl", data, {**settings, "first_step": step})
    return body | {"reference": reference.as_json() if reference else None}


@pytest.mark.parametrize("kl", ["none", pytest.param("loss", marks=pytest.mark.slow)])
def test_the_steps_after_it_are_the_same_to_the_bit(trainer: Trainer, data: ArtifactRef, kl: str) -> None:
    world.run(trainer, "load", world.load_new("other", seed=9))
    other = world.saved(
        trainer.ranks.store, "other", world.run(trainer, "save", world.save("other", "other", None))["policy"]
    )
    reference = other if kl == "loss" else None
    settings: JsonDict = {"kl": kl, "kl_coef": 0.1 if kl == "loss" else 0.0}
    shas = []
    for offloads in (False, True):
        world.run(trainer, "load", world.load_new())
        for step in (0, 2, 4):
            if offloads:
                world.run(trainer, "offload", OFFLOAD)
                world.run(trainer, "offload", OFFLOAD)
                assert parked_file(trainer).is_file()
            metrics = world.run(trainer, "train", job(data, step, settings, reference))["metrics"]
            assert not parked_file(trainer).exists()
        assert (metrics.get("train/kl", 0.0) > 0) == (kl == "loss")
        if offloads:
            world.run(trainer, "offload", OFFLOAD)
        saved = world.run(trainer, "save", world.save("b", f"p-{offloads}", f"s-{offloads}"))
        shas.append((world.digests(saved["policy"]), world.digests(saved["state"])))
    assert shas[0] == shas[1]


def trained(folder: Path, offload: str, parks: bool = False) -> list[dict[str, str]]:
    """What two jobs of RL and one of SFT come to, with a restore between them, by a
    trainer with `trainer.offload`."""
    trainer = Trainer(world.one_rank(folder, tokens_max=512, offload=offload))
    store, digests = trainer.ranks.store, list[dict[str, str]]()
    world.run(trainer, "load", world.load_new())
    rollouts = world.batch(store, "batch", world.rollout_rows(6, 4))
    world.run(trainer, "train", job(rollouts, 0, {}))
    saved = world.run(trainer, "save", world.save("b", "first", "first-state"))
    world.run(trainer, "load", world.load_ref("b", "state", world.saved(store, "first-state", saved["state"])))
    for position, (kind, data) in enumerate(
        [("rl", rollouts), ("sft", world.conversations(store, "conversations", 40))]
    ):
        if parks:
            world.run(trainer, "offload", OFFLOAD)
        world.run(trainer, "train", world.train("b", "c", kind, data, {"first_step": 2 * position}))
    last = world.run(trainer, "save", world.save("c", "last", "last-state"))
    for kind in ("policy", "state"):
        digests += [world.digests(saved[kind]), world.digests(last[kind])]
    return digests


@pytest.mark.slow
def test_moments_on_the_host_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part, and in many: parts of several parameters, and parameters with more than a part.

    Parked meanwhile, too.
    """
    expected = trained(tmp_path / "none", "none")
    assert trained(tmp_path / "one", "optimizer") == expected
    monkeypatch.setattr(moments_room, "PART_BYTES", 40_000)
    assert trained(tmp_path / "many", "optimizer") == expected
    assert trained(tmp_path / "parked", "optimizer", parks=True) == expected


def test_no_part_is_larger_than_it_must_be_and_every_parameter_is_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_room, "PART_BYTES", 10 * 2 * 4 * moments_room.ALIGNED)
    shards = [nn.Parameter(torch.zeros(rows, 16)) for rows in (3, 0, 8, 70, 500, 1, 1, 80, 79)]
    parts = moments_room.parts_of(shards)
    assert [shard for part in parts for shard in part] == shards
    assert [[len(shard) for shard in part] for part in parts] == [[3, 0, 8], [70], [500], [1, 1], [80], [79]]


def test_no_room_for_moments_is_said_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    trainer = Trainer(world.one_rank(tmp_path, offload="optimizer"))
    with pytest.raises(
        UserError, match=r"trainer\.offload='optimizer': a rank has no room for .* No space left .*'none'"
    ):
        world.run(trainer, "load", world.load_new())


def take_a_large_step(trainer: Trainer) -> None:
    """One step of a large model on little data: it has its moments."""
    world.run(trainer, "load", world.load_new(model=LARGE))
    data = world.batch(trainer.ranks.store, "little", world.rollout_rows(2, 2))
    world.run(trainer, "train", job(data, 0, {"num_steps": 1}))


@pytest.mark.slow
def test_moments_on_the_host_are_not_in_memory_between_updates(tmp_path: Path) -> None:
    """On a CPU, whose host is itself, they are in a file: after the step as before it."""
    held: dict[str, int] = {}
    for offload in ("none", "optimizer"):
        gc.collect()
        trainer = Trainer(world.one_rank(tmp_path / offload, tokens_max=512, offload=offload))
        take_a_large_step(trainer)
        gc.collect()
        trim()
        held[offload] = psutil.Process().memory_info().rss
        assert trainer.resident is not None
        assert sum(tensor.nbytes for tensor in trainer.resident.held()) > 0
        del trainer
    print(f"resident: {held}")
    assert held["none"] - held["optimizer"] > 0.9 * 2 * WEIGHTS_BYTES, "two moments"


@pytest.mark.slow
def test_the_memory_really_goes(trainer: Trainer) -> None:
    take_a_large_step(trainer)
    for _ in range(2):
        present = psutil.Process().memory_full_info().uss
        world.run(trainer, "offload", OFFLOAD)
        away = psutil.Process().memory_full_info().uss
        assert present - away > 0.9 * 3 * WEIGHTS_BYTES, "weights and two moments"
        assert parked_file(trainer).stat().st_size > 3 * WEIGHTS_BYTES
        world.run(trainer, "save", world.save("b", None, None))
        assert psutil.Process().memory_full_info().uss - away > 0.9 * 3 * WEIGHTS_BYTES


def test_a_load_drops_what_is_away(trainer: Trainer, data: ArtifactRef) -> None:
    world.run(trainer, "offload", OFFLOAD)  # of nothing
    world.run(trainer, "load", world.load_new())
    world.run(trainer, "train", job(data, 0, {}))
    expected = policy_sha(trainer)
    world.run(trainer, "offload", OFFLOAD)
    world.run(trainer, "load", world.load_new())
    assert not parked_file(trainer).exists()
    world.run(trainer, "train", job(data, 0, {}))
    assert policy_sha(trainer, "again") == expected


def test_a_full_disk_moves_nothing_and_a_damaged_file_ends_the_trainer(
    trainer: Trainer, data: ArtifactRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(trainer, "load", world.load_new())
    expected = policy_sha(trainer)

    def full(path: Path, pieces: object) -> list[int]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(offload_room, "_write", full)
        with pytest.raises(StoreError, match="No space left"):
            world.run(trainer, "offload", OFFLOAD)
    assert policy_sha(trainer, "still") == expected
    world.run(trainer, "offload", OFFLOAD)
    damaged = bytearray(parked_file(trainer).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    parked_file(trainer).write_bytes(damaged)
    with pytest.raises(
        AssertionError, match="is not as it was written"
    ):  # no answer: the trainer ends with it, and is built again
        world.run(trainer, "train", job(data, 0, {}))
