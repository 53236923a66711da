"""Whole runs that start or stand elsewhere than the preset's: from a model on disk, and with the
engines of other hosts."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import open_existing
from tests.deadlines import PIPELINE_S
from tests.pipeline import MINI, Folder, Undisturbed, kill_group

pytestmark = pytest.mark.e2e


def check_whole(folder: Folder, run: str) -> None:
    code, output = folder.rlpipe("verify", run, "--store", folder.store)
    assert code == 0 and "0 faults" in output, output


@pytest.mark.nightly
def test_rl_starts_from_a_model_on_disk_of_another_number_type(folder: Folder) -> None:
    folder.complete("a", *MINI, "rl.num_iterations=1")
    ref, _ = open_existing(folder.open_store(), "a").policy(1)
    base = materialise(folder.open_store(), ref, folder.path / "base")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    folder.complete("b", *MINI, f"model.path={base}", "sft.num_steps=0", "rl.num_iterations=2")
    shutil.rmtree(base)  # the run is whole by itself
    check_whole(folder, "b")
    told = open_existing(folder.open_store(), "b").committed("base", 0, "probe")[1].metrics
    assert len(told["probe"]["logprobs"]) == len(told["probe"]["tokens"]) - 1


# engines/test_hosts.py has hosts that join and die, e2e/test_services.py a run whose engines are
# elsewhere
@pytest.mark.nightly
def test_a_run_without_engines_of_its_own_uses_the_hosts_that_join_and_survives_one(
    folder: Folder, undisturbed: Undisturbed
) -> None:
    hosts = [folder.start("host", "--run", "a", "--store", folder.store) for _ in range(2)]
    flow = folder.start(*folder.run_arguments("a", *MINI, "engines.place=elsewhere"))
    try:
        folder.wait_for("a", "rl/00001/iteration.json", flow)
        kill_group(hosts[0])
        assert flow.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        for process in (*hosts, flow):
            kill_group(process)
    check_whole(folder, "a")
    assert folder.final_sha256("a", 5) == undisturbed.sha256()
