"""A search over forks, whole and killed."""

from __future__ import annotations

import json

import pytest

from rlpipe.store.opening import open_existing
from tests.deadlines import PIPELINE_S, until
from tests.pipeline import MINI, Folder, kill_group

pytestmark = pytest.mark.e2e
SETS = [*MINI, "rl.num_iterations=1", "evaluation.every=0"]


def search(folder: Folder, name: str) -> list[str]:
    options = ["--vary", "rl.learning_rate=1e-5,1e-3", "--rungs", "1,2", "--by", "evaluation/words_reward_mean"]
    return ["search", "a", "--at", "0", *options, "--name", name, "--store", folder.store]


def decided(folder: Folder, name: str) -> list[list[float]]:
    """The scores of each rung, in the order of the candidates that were in it."""
    store = folder.open_store()
    rungs = [json.loads(store.read(f"searches/{name}/rung-{number}.json")) for number in range(2)]
    return [[rung["scores"][candidate] for candidate in sorted(rung["scores"])] for rung in rungs]


def test_a_killed_search_ends_with_the_same_winner(folder: Folder) -> None:
    folder.complete("a", *SETS)
    code, output = folder.rlpipe(*search(folder, "whole"))
    assert code == 0, output[-3000:]
    assert [len(scores) for scores in decided(folder, "whole")] == [2, 1]
    winner = json.loads(folder.open_store().read("searches/whole/rung-1.json"))["kept"][0]
    assert f"the winner is run {winner} (rl.learning_rate=" in output and f"| {winner} |" in output
    # its first iteration and SFT are the run's own, by reference
    run = open_existing(folder.open_store(), winner)
    assert run.parent is not None and (run.parent.name, run.fork_at) == ("a", 0)
    store = folder.open_store()
    killed = folder.start(*search(folder, "killed"))
    there = "runs/killed-1/rl/00001/scores"  # the first candidate is trained, the second at work
    until(lambda: store.list(there), folder.said, running=killed, within_s=PIPELINE_S, look_s=0.05)
    kill_group(killed)
    report = folder.path / "report.json"
    code, output = folder.rlpipe(*search(folder, "killed"), "--json", stdout=report)
    assert code == 0, output[-3000:]
    assert decided(folder, "killed") == decided(folder, "whole")
    told = json.loads(report.read_text())  # it is all that went to stdout
    assert told["winner"] == winner.replace("whole", "killed") and told["winner"] in output
    assert [rung["iterations"] for rung in told["decisions"]] == [1, 2] and len(told["candidates"]) == 2
    twins = [folder.final_sha256(winner.replace("whole", name), 3) for name in ("whole", "killed")]
    assert twins[0] == twins[1]
