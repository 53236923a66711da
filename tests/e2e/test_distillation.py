"""Distillation of a stored run: killed between teacher and train no token is asked twice, and
another coefficient asks nobody."""

from __future__ import annotations

import pytest

from rlpipe.base.manifests import Manifest
from rlpipe.store.opening import open_existing
from tests.pipeline import MINI, Folder, kill_group

pytestmark = [pytest.mark.e2e, pytest.mark.spare]
LOGPROBS = "rl/00001/teacher_logprobs"
DISTILLED = [
    "rl.teacher=run:teacher", "rl.teacher_top_k=8", "rl.rewards={}", "rl.num_iterations=2",
    'evaluation.rewards={"exact"=1.0}',
]  # fmt: skip


def forked(name: str, *sets: str) -> list[str]:
    return ["fork", "teacher", "--at", "sft", "--run", name, *[part for one in sets for part in ("--set", one)]]


def record_of(folder: Folder, run: str, stage: str) -> Manifest:
    return open_existing(folder.open_store(), run).committed("rl", 1, stage)[1]


def test_a_kill_asks_no_token_twice_and_another_coefficient_asks_nobody(folder: Folder) -> None:
    # by the divergence over the teacher's top tokens; the docs page has a run by sampled ones
    folder.complete("teacher", *MINI, "rl.num_iterations=1")
    where = ["--store", folder.store]
    code, output = folder.rlpipe(*forked("calm", *DISTILLED), *where)
    assert code == 0 and "teacher KL" in output, output
    process = folder.start(*forked("killed", *DISTILLED), *where)
    try:
        folder.wait_for("killed", f"{LOGPROBS}/manifest.json", process)
    finally:
        kill_group(process)
    before = record_of(folder, "killed", "teacher_logprobs")
    code, output = folder.rlpipe("resume", "killed", *where)
    assert code == 0, output
    assert record_of(folder, "killed", "teacher_logprobs") == before
    keys = folder.open_store().list(f"runs/killed/{LOGPROBS}")
    assert len({key.split("/")[-2] for key in keys if key.endswith(".parquet")}) == 1, "one attempt"
    assert [file.name.split("/")[-1] for file in before.files] == ["teacher_logprobs.parquet", "teacher_top.parquet"]
    assert folder.final_sha256("killed", 2) == folder.final_sha256("calm", 2)
    code, output = folder.rlpipe(
        "fork", "killed", "--at", "1", "--run", "half", "--redo", "train", "--set", "rl.teacher_coef=0.5", *where
    )
    assert code == 0 and "* train/teacher_kl" not in output, output
    assert folder.open_store().list(f"runs/half/{LOGPROBS}") == []
    assert folder.final_sha256("half", 2) != folder.final_sha256("calm", 2)
    assert record_of(folder, "half", "policy").inputs == record_of(folder, "killed", "policy").inputs
    code, output = folder.rlpipe("verify", "half", *where)
    assert code == 0, output
