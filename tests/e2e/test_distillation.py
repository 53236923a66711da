"""Distillation of a stored run: killed between teacher and train no token is asked twice, and
another coefficient asks nobody; with a teacher for all data sets, and with one for each."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.base.manifests import Manifest
from rlpipe.records.rollout import BATCH, TEACHER_FILE, Rollout, TeacherLogprobs
from rlpipe.store.artifacts import read_records
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import open_existing
from tests.paths import PRESETS
from tests.pipeline import MINI, Folder, kill_group

pytestmark = [pytest.mark.e2e, pytest.mark.spare]
LOGPROBS = "rl/00001/teacher_logprobs"
DISTILLED = [
    "rl.teacher=run:teacher", "rl.teacher_top_k=8", "rl.rewards={}", "rl.num_iterations=2",
    'evaluation.rewards={"exact"=1.0}',
]  # fmt: skip
OF_A_SET = "data.words.teacher=run:other"
SECOND_SET = """
[[data]]
name = "sums"
use = "rl"
source = "reasoning_gym:basic_arithmetic"
rows_max = 300
"""


def forked(name: str, *sets: str) -> list[str]:
    return ["fork", "teacher", "--at", "sft", "--run", name, *[part for one in sets for part in ("--set", one)]]


def record_of(folder: Folder, run: str, stage: str) -> Manifest:
    return open_existing(folder.open_store(), run).committed("rl", 1, stage)[1]


def check_each_teachers_own(folder: Folder, name: str, tmp_path: Path) -> None:
    """Compares the stored logprobs with a forward pass by transformers, of the teacher of the
    prompt's set."""
    run = open_existing(folder.open_store(), name)
    of_set = {data.name: run.committed("base", 0, run.config.teacher_of(data))[0] for data in run.config.sets("rl")}
    assert len({ref.sha256 for ref in of_set.values()}) == len(of_set) == 2
    models = {
        data: AutoModelForCausalLM.from_pretrained(materialise(run.store, ref, tmp_path), dtype=torch.float32).eval()
        for data, ref in of_set.items()
    }
    rollouts = read_records(run.store, run.committed("rl", 1, "batch/round-0")[0], "batch.parquet", Rollout, BATCH)
    stored = read_records(run.store, run.committed("rl", 1, "teacher_logprobs")[0], TEACHER_FILE, TeacherLogprobs)
    seen = set()
    for rollout, found in zip(rollouts, stored, strict=True):
        seen.add(data := rollout.prompt_id.split("/")[0])
        tokens = torch.tensor([[*rollout.prompt_tokens, *rollout.completion_tokens]])
        with torch.no_grad():
            logits = models[data](tokens).logits[0, len(rollout.prompt_tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(rollout.prompt_tokens) :, None])[:, 0].numpy()
        np.testing.assert_allclose(found.logprobs, expected[np.flatnonzero(rollout.loss_mask)], atol=1e-5)
    assert seen == of_set.keys()


@pytest.mark.parametrize("by_set", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_kill_asks_no_token_twice_and_another_coefficient_asks_nobody(
    folder: Folder, tmp_path: Path, by_set: bool
) -> None:
    # by the divergence over the teacher's top tokens; the docs page has a run by sampled ones
    preset, distilled = "tiny", DISTILLED
    where = ["--store", folder.store]
    if by_set:
        preset, distilled = f"{tmp_path}/two.toml", [*DISTILLED, OF_A_SET]
        Path(preset).write_text((PRESETS / "tiny.toml").read_text() + SECOND_SET)
    folder.complete("teacher", *MINI, "rl.num_iterations=1", preset=preset)
    if by_set:
        code, output = folder.rlpipe(*forked("other", "rl.learning_rate=1e-3"), *where)
        assert code == 0, output
    code, output = folder.rlpipe(*forked("calm", *distilled), *where)
    assert code == 0 and "teacher KL" in output, output
    process = folder.start(*forked("killed", *distilled), *where)
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
    if by_set:
        check_each_teachers_own(folder, "killed", tmp_path / "copies")
        assert {f"train/teacher_kl/{name}" for name in ("words", "sums")} <= record_of(
            folder, "killed", "policy"
        ).metrics.keys()
        anew = ["fork", "killed", "--at", "1", "--run", "anew", "--redo", "filter", "--set", "data.words.teacher="]
        code, output = folder.rlpipe(*anew, *where)
        assert code == 0 and re.search(r"\* train/teacher_kl ", output), output
        assert record_of(folder, "anew", "teacher_logprobs").inputs.keys() == {"batch", "teacher"}
