"""The trainer sends its policy to a group (`engines.transport = "tensor"`): what arrives, what it
is called, and what becomes of a receiver that is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.values import JsonDict
from rlpipe.config.source import read_config
from rlpipe.store.artifacts import file_sha256
from rlpipe.trainer import sending
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.jobs import job_of
from rlpipe.trainer.process import TrainerProcesses
from rlpipe.trainer.trainer import Trainer
from tests.deadlines import DEADLINE_S
from tests.paths import PRESETS, ROOT
from tests.trainer_world import MODEL, load_new, one_rank, run, save

RECEIVER = ROOT / "tests" / "receiver.py"
MOE: JsonDict = {
    **MODEL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}  # fmt: skip


@contextmanager
def receiver(offer: JsonDict, group: str, target: Path, size: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    """A process that joins as SGLang does, and writes what it was sent as one file."""
    place = {**offer, "group": group, "size": size, "target": str(target), "deadline_s": DEADLINE_S}
    process = subprocess.Popen([sys.executable, str(RECEIVER), json.dumps(place)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver imports torch before it joins."""
    monkeypatch.setattr(sending, "STALL_S", DEADLINE_S)


def ask(job: str, **fields: object) -> tuple[str, JsonDict]:
    return job, {"position": "new", "group": "g1", **fields}


@pytest.mark.parametrize(("model", "dtype"), [(MODEL, "float32"), (MOE, "bfloat16")])
def test_what_is_sent_is_what_the_files_hold_and_has_their_hashes(
    model: JsonDict, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "BUCKET_BYTES", 100_000)
    trainer = Trainer(one_rank(tmp_path, dtype=dtype))
    run(trainer, "load", load_new(model=model))
    records = run(trainer, "save", save("new", "runs/a/base/policy", None))["policy"]
    files = {Path(record["name"]).name: record for record in records if record["name"].endswith(".safetensors")}
    offer = run(trainer, *ask("offer"))["offer"]
    assert len(offer["buckets"]) > 1
    target = tmp_path / "received.safetensors"
    with receiver(offer, "g1", target) as process:
        sent = run(trainer, *ask("send", receivers=1, backend="gloo"))["sent"]
        assert process.wait(timeout=DEADLINE_S) == 0
    assert {record["name"]: record["sha256"] for record in sent} == {
        name: file["sha256"] for name, file in files.items()
    }
    assert {record["name"]: record["bytes"] for record in sent} == {name: file["bytes"] for name, file in files.items()}
    folder, got = trainer.ranks.published / "runs/a/base/policy", load_file(target)
    kept = {key: value for record in files.values() for key, value in load_file(folder / record["name"]).items()}
    assert got.keys() == kept.keys() and all(torch.equal(got[name], kept[name]) for name in kept)


@pytest.mark.e2e
async def test_ranks_that_share_the_weights_send_them_whole_through_the_first(tmp_path: Path) -> None:
    settings = read_config("tiny", ["run=a", f"store=file://{tmp_path}/store", "trainer.ranks=2"], PRESETS)
    trainer = TrainerClient(TrainerProcesses(settings, tmp_path, "key"))
    await trainer.start()
    try:
        await trainer.run("load", load_new())
        answer = await trainer.run("save", save("new", "runs/a/base/policy", None))
        offer = (await trainer.run(*ask("offer")))["offer"]
        with receiver(offer, "g1", tmp_path / "received.safetensors") as process:
            (sent,) = (await trainer.run(*ask("send", receivers=1, backend="gloo")))["sent"]
            assert process.wait(timeout=DEADLINE_S) == 0
    finally:
        await trainer.close()
    (file,) = [record for record in answer["policy"] if record["name"].endswith(".safetensors")]
    assert (sent["sha256"], sent["bytes"]) == (file["sha256"], file["bytes"])
    assert sending.file_of("x", load_file(tmp_path / "received.safetensors")).sha256 == file["sha256"]


def test_a_file_that_was_not_written_has_the_hash_of_the_one_that_was(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 2).bfloat16(), "a": torch.arange(5), "model.10.w": torch.randn(4),
        "model.9.w": torch.randn(2, 2).half(),
        "é \"q\"": torch.tensor(3.0), "mask": torch.tensor([True, False]), "none": torch.empty(0, 3),
    }  # fmt: skip
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    record = sending.file_of(path.name, tensors)
    assert (record.bytes, record.sha256) == (path.stat().st_size, file_sha256(path))


@pytest.mark.slow
def test_a_receiver_that_dies_or_never_comes_holds_the_trainer_up_no_longer_than_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALL_S", 3.0)  # short: nobody joins
    trainer = Trainer(one_rank(tmp_path))
    run(trainer, "load", load_new())
    with pytest.raises(StoreError, match="the trainer did not offer new to group g1"):
        run(trainer, *ask("send", receivers=1, backend="gloo"))
    run(trainer, *ask("offer"))
    with pytest.raises(StoreError, match="a receiver of weights was lost"):
        run(trainer, *ask("send", receivers=1, backend="gloo"))
    assert trainer.resident is not None
    monkeypatch.setattr(sending, "STALL_S", DEADLINE_S)
    offer = run(trainer, "offer", {"position": "new", "group": "g2"})["offer"]
    dying = {**offer, "buckets": [{"names": [], "dtypes": [], "shapes": []}], "die": True}
    with receiver(dying, "g2", tmp_path / "none"), pytest.raises(StoreError, match="a receiver of weights was lost"):
        run(trainer, "send", {"position": "new", "group": "g2", "receivers": 1, "backend": "gloo"})
    # and it can be asked again
    offer, target = (
        run(trainer, "offer", {"position": "new", "group": "g3"})["offer"],
        tmp_path / "received.safetensors",
    )
    with receiver(offer, "g3", target) as process:
        assert run(trainer, "send", {"position": "new", "group": "g3", "receivers": 1, "backend": "gloo"})["sent"]
        assert process.wait(timeout=DEADLINE_S) == 0


@pytest.mark.slow
def test_who_still_receives_hears_at_once_that_another_receiver_died(tmp_path: Path) -> None:
    trainer = Trainer(one_rank(tmp_path))
    run(trainer, "load", load_new())
    offer = run(trainer, *ask("offer"))["offer"]
    dying = {**offer, "buckets": [{"names": [], "dtypes": [], "shapes": []}], "die": True, "rank": 2}
    with receiver(offer, "g1", tmp_path / "none", size=3) as survivor, receiver(dying, "g1", tmp_path / "none", size=3):
        with pytest.raises(StoreError, match="a receiver of weights was lost"):
            run(trainer, *ask("send", receivers=2, backend="gloo"))
        assert survivor.wait(timeout=DEADLINE_S) == 1


def test_jobs_that_send_are_checked() -> None:
    for changes, fault in (
        ({"receivers": 0}, "receivers"),
        ({"backend": "mpi"}, "backend"),
        ({"group": "../x"}, "group"),
    ):
        body = {"position": "new", "group": "g1", "receivers": 1, "backend": "gloo", **changes}
        with pytest.raises(UserError, match=fault):
            job_of("send", json.dumps(body).encode())
