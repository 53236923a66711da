"""A pipeline that trains an adapter: killed in the middle it ends with the same bits; its policies
are small, and a whole model when asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.models.whole import whole_policy
from rlpipe.store.adapter_files import ADAPTER_WEIGHTS
from rlpipe.store.run import open_existing
from tests.deadlines import PIPELINE_S
from tests.pipeline import MINI, Folder, descendants, kill_group

pytestmark = pytest.mark.e2e
LORA = [
    *MINI, "model.adapter=lora", "model.adapter_rank=4", "sft.num_steps=4", "sft.segment_steps=4", "sft.decay_steps=4",
    "rl.num_iterations=2", "rl.kl=loss", "rl.kl_coef=0.01", "evaluation.every=0", "evaluation.prompts_max=2",
]  # fmt: skip


def adapter_sha256(folder: Folder, run: str, version: int) -> str:
    return open_existing(folder.open_store(), run).policy(version)[1].file(ADAPTER_WEIGHTS).sha256


@pytest.mark.nightly
def test_with_a_killed_trainer_the_run_ends_with_the_same_adapter(tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    folder.complete("a", *LORA)
    process = folder.start(*folder.run_arguments("b", *LORA))
    try:
        folder.wait_for("b", "rl/00001/prompts/round-0/manifest.json", process)
        descendants(process, "rlpipe.trainer.server")[-1].kill()
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    assert [adapter_sha256(folder, "a", version) for version in range(3)] == [
        adapter_sha256(folder, "b", version) for version in range(3)
    ]
    assert folder.rlpipe("verify", "b", "--store", folder.store)[0] == 0
    run = open_existing(folder.open_store(), "b")
    assert sum(file.bytes for file in run.policy(2)[1].files) < 0.1 * sum(
        file.bytes for file in run.policy(-1)[1].files
    )
    whole = whole_policy(run.store, run.policy(2)[0], tmp_path / "whole")
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {path.name for path in whole.iterdir()}
