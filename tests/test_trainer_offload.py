"""What a trainer holds goes away and comes back: real memory, the same bits, and nothing half moved when the disk is full."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlpipe.trainer import offload as offload_room
from rlpipe.trainer.trainer import Trainer
from rlpipe.types import ArtifactRef, JsonDict, StoreError
from tests import trainer_world as world
from tests.test_trainer_jobs import policy_sha

OFFLOAD = {"kind": "offload"}
LARGE = {**world.MODEL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 128}
WEIGHTS_BYTES = 4 * 30_000_000  # at least


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(world.solo_gang(tmp_path, tokens_max=512))


@pytest.fixture
def data(trainer: Trainer) -> ArtifactRef:
    return world.batch(trainer.gang.store, "batch", world.rollout_rows(6, 4))


def parked_file(trainer: Trainer) -> Path:
    return Path(trainer.gang.options.work_dir) / "offload" / "rank-0"


def job(data: ArtifactRef, step: int, settings: JsonDict, reference: ArtifactRef | None = None) -> JsonDict:
    body = world.train("a", "b", "rl", data, {**settings, "first_step": step})
    return body | {"reference": reference.as_json() if reference else None}


@pytest.mark.parametrize("kl", ["none", "loss"])
def test_the_steps_after_it_are_the_same_to_the_bit(trainer: Trainer, data: ArtifactRef, kl: str) -> None:
    world.run(trainer, "load", world.load_new("other", seed=9))
    other = world.saved(trainer.gang.store, "other", world.run(trainer, "save", world.save("other", "other", None))["policy"])
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


def test_between_two_steps_of_an_iteration_too(trainer: Trainer, data: ArtifactRef) -> None:
    """The weights that the iteration started from are kept until its last step, and go along."""
    shas = []
    for offloads in (False, True):
        world.run(trainer, "load", world.load_new())
        for step in range(2):
            if offloads:
                world.run(trainer, "offload", OFFLOAD)
            world.run(trainer, "train", world.train("a", "b", "rl", data, {"step": step, "first_step": step}))
        shas.append(policy_sha(trainer, f"final-{offloads}"))
    assert shas[0] == shas[1]


def test_the_memory_really_goes(trainer: Trainer, data: ArtifactRef) -> None:
    world.run(trainer, "load", world.load_new(model=LARGE))
    world.run(trainer, "train", job(data, 0, {}))
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


def test_a_full_disk_moves_nothing_and_a_damaged_file_ends_the_gang(
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
    ):  # no answer: the gang ends with it, and is built again
        world.run(trainer, "train", job(data, 0, {}))
