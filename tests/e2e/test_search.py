"""A search over forks: whole, killed, two at a time, a population, with a budget for all."""

from __future__ import annotations

import json

import pytest

from rlpipe.config.source import override_config
from rlpipe.store.opening import open_existing
from rlpipe.store.run_record import last_started, record_start
from tests.deadlines import PIPELINE_S, until
from tests.pipeline import MINI, Folder, kill_group

pytestmark = [pytest.mark.e2e, pytest.mark.spare]
SETS = [*MINI, "rl.num_iterations=1", "evaluation.every=0"]


def search(folder: Folder, name: str, *more: str) -> list[str]:
    options = ["--vary", "rl.learning_rate=1e-5,1e-3", "--rungs", "1,2", "--by", "evaluation/words_reward_mean"]
    return ["search", "a", "--at", "0", *options, "--name", name, "--store", folder.store, *more]


def decided(folder: Folder, name: str) -> list[list[float]]:
    """The scores of each rung, in the order of the candidates that were in it."""
    store = folder.open_store()
    rungs = [json.loads(store.read(f"searches/{name}/rung-{number}.json")) for number in range(2)]
    return [[rung["scores"][candidate] for candidate in sorted(rung["scores"])] for rung in rungs]


def test_a_killed_search_of_two_at_a_time_ends_with_the_same_winner(folder: Folder) -> None:
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
    killed = folder.start(*search(folder, "killed", "--together", "2"))
    there = [f"runs/killed-{number}/rl/00001/scores" for number in range(2)]  # both are at work
    until(lambda: all(map(store.list, there)), folder.said, running=killed, within_s=PIPELINE_S, look_s=0.05)
    kill_group(killed)
    report = folder.path / "report.json"
    code, output = folder.rlpipe(*search(folder, "killed", "--together", "2"), "--json", stdout=report)
    assert code == 0, output[-3000:]
    assert decided(folder, "killed") == decided(folder, "whole")
    told = json.loads(report.read_text())  # it is all that went to stdout
    assert told["winner"] == winner.replace("whole", "killed") and told["winner"] in output
    assert [rung["iterations"] for rung in told["decisions"]] == [1, 2] and len(told["candidates"]) == 2
    twins = [folder.final_sha256(winner.replace("whole", name), 3) for name in ("whole", "killed")]
    assert twins[0] == twins[1]


def test_a_population_ends_with_its_budget_and_goes_on_once_that_is_raised(folder: Folder) -> None:
    folder.complete("a", *SETS, "budget.rollout_tokens=1")
    code, output = folder.rlpipe(*search(folder, "many", "--explore"))
    assert code == 3 and "the best so far is run many-0 (rl.learning_rate=1e-5), a fork of a at 0" in output, output
    assert "budget.rollout_tokens=1 is spent" in output and "| many-1 | 1e-3 |  |  | not so far" in output
    store = folder.open_store()
    assert [key.rpartition("/")[2] for key in store.list("searches/many")] == ["search.json"]
    record_start(store, override_config(last_started(store, "a"), ["budget.rollout_tokens=0"]))
    code, output = folder.rlpipe(*search(folder, "many", "--explore"))
    assert code == 0, output[-3000:]
    first, last = (json.loads(store.read(f"searches/many/rung-{number}.json")) for number in range(2))
    ((name, made),) = first["forks"].items()
    assert set(first["scores"]) == {"many-0", "many-1"} and set(last["scores"]) == {*first["kept"], name}
    run = open_existing(store, name)
    assert run.parent is not None and (run.parent.name, run.fork_at) == (first["kept"][0], 1)
    before = open_existing(store, made["run"]).config.rl.learning_rate
    assert run.config.rl.learning_rate in (pytest.approx(0.8 * before), pytest.approx(1.25 * before))
    assert f"the winner is run {last['kept'][0]} (rl.learning_rate=" in output
    assert folder.rlpipe("verify", name, "--store", folder.store)[0] == 0
