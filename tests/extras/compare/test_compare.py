"""`rlpipe compare`: two runs side by side, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows import cli
from rlpipe.config.source import override_config
from rlpipe.extras.compare.report import compare_report
from rlpipe.store.backend import open_store
from rlpipe.store.opening import fork
from rlpipe.store.run import Run
from tests.report.test_show import commit_iteration, without_sft


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Run, Run]:
    run = without_sft(open_store(f"file://{tmp_path}/store"))
    commit_iteration(run, 0, {"rollout/reward_mean": 0.25, "spent/cost": 1.5, "time/iteration_s": 7.0})
    child = fork(run, 0, override_config(run.config, ["run=b", "rl.clip_high=0.4", "rl.rewards={exact = 1.0}"]))
    commit_iteration(child, 1, {"rollout/reward_mean": 0.5, "evaluation/words_greedy": 0.75})
    return run, child


def test_two_runs_are_compared_by_what_differs(pair: tuple[Run, Run]) -> None:
    rows = [line.split() for line in compare_report(*pair).lines()]
    assert rows[:3] == [["a", "b"], ["forked", "from", "-", "a", "at", "0"], ["iterations", "committed", "1", "2"]]
    assert ["rl.clip_high", "0.28", "0.4"] in rows and ["rl.rewards.format", "0.0", "-"] in rows
    assert ["rollout/reward_mean", "0.25", "0.5"] in rows and ["spent/cost", "1.5", "-"] in rows
    assert not any(row and row[0] in ("rl.clip_low", "time/iteration_s") for row in rows)


def test_as_json_numbers_are_numbers(pair: tuple[Run, Run]) -> None:
    told = CliRunner().invoke(cli.app, ["compare", "a", "b", "--json", "--store", pair[0].store.url])
    assert told.exit_code == 0, told.output
    report = json.loads(told.stdout)
    assert report["runs"] == ["a", "b"] and report["iterations"] == [1, 2] and report["forked_from"] == [None, "a at 0"]
    assert report["settings"]["rl.clip_high"] == [0.28, 0.4] and report["settings"]["rl.rewards.format"] == [0.0, None]
    assert report["metrics"] == {"rollout/reward_mean": [0.25, 0.5], "spent/cost": [1.5, None]}
    assert report["evaluations"] == [{}, {"2": {"words_greedy": 0.75}}]
