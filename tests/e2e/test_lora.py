"""A pipeline that trains an adapter, colocated: its policies are small, and a whole model when
asked for; apart and killed in the middle, the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.models.whole import whole_policy
from rlpipe.store.adapter_files import ADAPTER_WEIGHTS
from rlpipe.store.opening import open_existing
from tests.deadlines import PIPELINE_S
from tests.living import descendants
from tests.pipeline import MINI, Folder, kill_group

pytestmark = pytest.mark.e2e
LORA = [
    *MINI, "model.adapter=lora", "model.adapter_rank=4", "sft.num_steps=4", "sft.segment_steps=4", "sft.decay_steps=4",
    "rl.num_iterations=2", "rl.kl=loss", "rl.kl_coef=0.01", "evaluation.every=0", "evaluation.prompts_max=2",
    # no word is right so early: without it nothing would be trained
    'rl.rewards={exact = 1.0, "graders:length" = 0.1}',
]  # fmt: skip


def adapter_sha256(folder: Folder, run: str, version: int) -> str:
    return open_existing(folder.open_store(), run).policy(version)[1].file(ADAPTER_WEIGHTS).sha256


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Folder:
    """A working directory whose store has run a, in which trainer and engine
    took turns and nothing was killed."""
    path = tmp_path_factory.mktemp("trained")
    (path / "graders.py").write_text("def length(prompt, completion):\n    return float(len(completion))\n")
    folder = Folder(path, f"file://{path}/store", prefect_api)
    folder.complete("a", *LORA, "engines.colocate=true")
    return folder


@pytest.mark.first
def test_policies_are_small_and_a_whole_model_when_asked_for(trained: Folder, tmp_path: Path) -> None:
    run = open_existing(trained.open_store(), "a")
    assert len({adapter_sha256(trained, "a", version) for version in range(3)}) == 3
    assert sum(file.bytes for file in run.policy(2)[1].files) < 0.1 * sum(
        file.bytes for file in run.policy(-1)[1].files
    )
    whole = whole_policy(run.store, run.policy(2)[0], tmp_path / "whole")
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {path.name for path in whole.iterdir()}


@pytest.mark.nightly
def test_with_a_killed_trainer_the_run_ends_with_the_same_adapter(trained: Folder) -> None:
    process = trained.start(*trained.run_arguments("b", *LORA))
    try:
        trained.wait_for("b", "rl/00001/prompts/round-0/manifest.json", process)
        descendants(process, "rlpipe.trainer.server")[-1].kill()
        assert process.wait(timeout=PIPELINE_S) == 0, trained.said()
    finally:
        kill_group(process)
    assert [adapter_sha256(trained, "a", version) for version in range(3)] == [
        adapter_sha256(trained, "b", version) for version in range(3)
    ]
    assert trained.rlpipe("verify", "b", "--store", trained.store)[0] == 0
