"""Whole pipelines that keep little: killed while they prune, forked where the policy is gone,
evaluated, exported, and to the bits of one that kept all."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe.store.artifacts import is_pruned
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from tests.pipeline import MINI, Folder, Undisturbed, kill_group

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
LEAN = [*MINI, "checkpoint.keep_policies_last=2", "checkpoint.keep_states=1"]


def kept(run: Run, num_iterations: int) -> list[int]:
    return [
        version for version in range(1, num_iterations + 1) if not is_pruned(run.store, run.policy(version)[0].folder)
    ]


def test_what_was_pruned_comes_back_to_the_bit_in_a_fork_an_evaluation_and_an_export(
    folder: Folder, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    process = folder.start(*folder.run_arguments("a", *LEAN))
    try:
        folder.wait_for("a", "rl/00003/iteration.json", process)  # version 1 or 2 is pruned now
    finally:
        kill_group(process)
    folder.complete("a", *LEAN)
    run, store = open_existing(folder.open_store(), "a"), ["--store", folder.store]
    assert folder.final_sha256("a", 5) == undisturbed.sha256()
    best = run.sampled_by(run.record(4).best.iteration)
    assert kept(run, 5) == sorted({best, 4, 5} - {0})
    gone = min({1, 2, 3} - {best})

    code, output = folder.rlpipe("export", "a", "--version", str(gone), "--to", "policy", *store)
    assert code == 0, output
    AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert is_pruned(run.store, run.policy(gone)[0].folder)

    code, output = folder.rlpipe("evaluate", "a", "--version", str(gone), *store)
    assert code == 0 and "greedy" in output, output
    code, output = folder.rlpipe(
        "fork", "a", "--at", str(gone - 1), "--run", "b", "--set", f"rl.num_iterations={gone + 1}", *store
    )
    assert code == 0, output
    assert not is_pruned(run.store, run.policy(gone)[0].folder)
    assert folder.final_sha256("b", gone + 1) == undisturbed.sha256(gone + 1), (
        "a fork with the same settings goes the same way"
    )
    for name in ("a", "b"):
        code, output = folder.rlpipe("verify", name, *store)
        assert code == 0, output
