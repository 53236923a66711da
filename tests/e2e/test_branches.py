"""`rl.branches = "all"` end to end: every reply is trained once, and a run that was killed and one
that is redone end with the same bits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rlpipe.store.opening import open_existing
from tests.batches import read_rl_batch
from tests.e2e.test_agents import SHARD, SMALL, folder_of, kill_after_replies
from tests.pipeline import Folder, kill_group

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
ITERATIONS = 2
SETS = [
    *[entry for entry in SMALL if not entry.startswith(("rl.agent=", "rl.num_iterations="))],
    "rl.agent=tests.branching_agent:agent",
    f"rl.num_iterations={ITERATIONS}", "rl.branches=all", "rl.num_steps=2", "rl.turns_max=4", "rl.shard_prompts=1",
    "sft.num_steps=90",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Folder:
    folder = folder_of(tmp_path_factory.mktemp("undisturbed"), prefect_api)
    folder.complete("b", *SETS, preset="agent")
    return folder


def test_every_reply_is_trained_once(undisturbed: Folder) -> None:
    run = open_existing(undisturbed.open_store(), "b")
    num_shared = 0
    for iteration in range(ITERATIONS):
        keys = [key for key in run.store.list(f"{run.root}/rl/{iteration:05d}/rollouts") if "/calls/" in key]
        lines = [json.loads(line) for key in keys for line in run.store.read(key).splitlines()]
        replies = Counter(tuple(reply["tokens"]) for line in lines for reply in line["completions"])
        read = read_rl_batch(run.store, run.committed("rl", iteration, "batch/round-0")[0], 2)
        trained = Counter[tuple[int, ...]]()
        for sequence in (sequence for step in read.steps for sequence in step):
            stretches = np.split(sequence.scored, np.flatnonzero(np.diff(sequence.scored) > 1) + 1)
            trained.update(tuple(sequence.tokens[places].tolist()) for places in stretches)
            num_shared += int(sequence.scored[0] > len(sequence.prompt))
        assert trained == replies and trained.total() == 12 * 4
        record = run.iteration(iteration)
        assert record is not None and record.metrics["rollout/num_trained"] == 12
        assert record.metrics["rollout/num_branches_trained"] == len(read.rollout_B) - 12 > 12
        assert record.metrics["train/num_tokens"] == read.lengths_B.sum()
        assert record.metrics["train/mismatch_abs_mean"] < 1e-4
    assert num_shared > 0, "some branch begins with a reply that another one trains"


def test_it_is_killed_and_ends_with_the_same_bits(
    undisturbed: Folder, tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    folder = folder_of(tmp_path, prefect_api)
    process = folder.start(*folder.run_arguments("a", *SETS, preset="agent"))
    kill_after_replies(folder, process)
    assert not folder.open_store().exists(f"runs/a/rl/00000/{SHARD}/manifest.json"), "it is too late to kill it"
    process = folder.start(*folder.run_arguments("a", *SETS, preset="agent"))
    folder.wait_for("a", "rl/00001/batch/round-0/manifest.json", process)  # the trainer is lost, and trains it again
    kill_group(process)
    folder.complete("a", *SETS, preset="agent")
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.final_sha256("b", ITERATIONS)


def test_what_is_redone_is_trained_alike(undisturbed: Folder) -> None:
    expected = undisturbed.final_sha256("b", ITERATIONS)
    place = ["--store", undisturbed.store]
    for redo, run in (("score", "c"), ("filter", "d")):
        code, output = undisturbed.rlpipe("fork", "b", "--at", "1", "--run", run, "--redo", redo, *place)
        assert code == 0 and undisturbed.final_sha256(run, ITERATIONS) == expected, output
    code, output = undisturbed.rlpipe(
        "fork", "b", "--at", "1", "--run", "e", "--redo", "filter", *place, "--set", "rl.branches=last"
    )
    assert code == 0 and "rollout/num_branches_trained" in output, output
    run = open_existing(undisturbed.open_store(), "e")
    assert len(read_rl_batch(run.store, run.committed("rl", 1, "batch/round-0")[0], 2).rollout_B) == 12
    again = ["fork", "e", "--at", "1", "--run", "f", "--redo", "filter", *place, "--set", "rl.branches=all"]
    assert (
        undisturbed.rlpipe(*again)[0] == 0 and undisturbed.final_sha256("f", ITERATIONS) == expected
    )  # as b sampled them
