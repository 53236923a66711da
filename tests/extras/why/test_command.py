"""`rlpipe why` on a store: which iteration it finds, what it prints, its exit codes, the fork that
would prove it, a second reward."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows import cli
from rlpipe.config.source import override_config, read_config
from rlpipe.extras.why.around import History
from rlpipe.extras.why.proof import fork_arguments, provable, proved_lines
from rlpipe.extras.why.verdict import candidates, judged
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Rollout
from rlpipe.store.documents import sealed
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.run import Run
from tests.extras.why.test_why import broken
from tests.store.test_run import PRESETS, record_of
from tests.why_world import REWARDS, Planted, around, store

pytestmark = pytest.mark.usefixtures("patient_reports")


def made(tmp_path: Path, planted: Planted | None, *, at: int = 7, count: int = 12, size: int = 6) -> Run:
    run = create_or_continue(read_config("tiny", ["run=a", f"store=file://{tmp_path}", "rl.kl=loss", REWARDS], PRESETS))
    store(around(run, 5, planted, at=at, count=count, size=size))
    return run


def asked(run: Run, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["why", run.name, *arguments, "--store", run.store.url])


def test_the_iteration_is_found_and_the_report_has_figures_rollouts_and_a_proof(tmp_path: Path) -> None:
    run = made(tmp_path, Planted(after=broken))
    result = asked(run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.match(
        r"run a, iteration 7: reward 0\.\d+ -> 0\.\d+ \(iterations 0 to 6, 84 groups; 7 to 11, 60 groups\), -0\.\d+",
        lines[0],
    )
    first = lines.index("1. reward part exact falls")
    assert re.match(r"   suspect reward_part: explains -0\.\d+ of -0\.\d+, p = \d", lines[first + 1])
    assert "   all 360 rollouts from 7 on have exact = 0" in lines
    assert sum(bool(re.match(r"   rollout (7|8|9|10|11)/\d+/\d+ words/", line)) for line in lines[first:]) == 3
    command = next(line for line in lines if line.startswith("   rlpipe fork a --at 7 --run a-7-without-reward_part"))
    assert '--redo score --set \'rl.rewards={"tests.nearness:near" = 0.3, "format" = 0.1}\'' in command
    assert asked(run, "--at", "7").stdout.splitlines()[2:] == lines[2:]  # but for the number of tests


def test_as_json_the_report_has_the_figures_of_its_lines(tmp_path: Path) -> None:
    run = made(tmp_path, Planted(after=broken))
    result = asked(run, "--json")
    assert result.exit_code == 0 and result.stdout.count("\n") == 1, result.output
    report = json.loads(result.stdout)
    lines = asked(run).stdout.splitlines()
    assert (report["run"], report["iteration"], report["first"], report["last"]) == ("a", 7, 0, 11)
    assert (report["groups_before"], report["groups_after"]) == (84, 60)
    first, change = report["findings"][0], report["change"]
    assert f"1. {first['title']}" in lines and change["size"] < 0 < change["before"]
    explained = f"   suspect reward_part: explains {first['explains']:+.3f} of {change['size']:+.3f}, p = "
    assert any(line.startswith(explained) for line in lines)
    assert len(first["rollouts"]) == 3 and first["rollouts"][0]["reward_parts"]["exact"] == 0
    assert f"   {report['proof']['command']}" in lines and report["proof"]["reward_after"] > 0.1
    refused = asked(run, "--json", "--prove")
    assert (refused.exit_code, refused.stdout) == (2, "") and "leave out --prove" in refused.stderr


def test_nothing_is_named_in_a_healthy_run(tmp_path: Path) -> None:
    result = asked(made(tmp_path, None))
    assert result.exit_code == 4 and result.stdout.splitlines()[-1] == "no cause found"
    result = CliRunner().invoke(cli.app, ["why", "a", "--json", "--store", f"file://{tmp_path}"])
    assert result.exit_code == 4 and json.loads(result.stdout)["findings"] == []


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path, None, at=3, count=5)
    assert re.search("--at 5: choose an iteration from 1 to 4", asked(run, "--at", "5").output)
    assert re.search("--second compares two rewards", asked(run, "--at", "2", "--second", "exact").output)
    empty = create_or_continue(read_config("tiny", ["run=b", f"store=file://{tmp_path}"], PRESETS))
    result = asked(empty)
    assert result.exit_code == 2 and "run b has 0 committed iterations" in result.output


def test_a_setting_of_a_fork_is_named_with_the_fork_that_has_the_old_one(tmp_path: Path) -> None:
    parent = made(tmp_path, None, at=7, count=7)
    config = override_config(parent.config, ["run=b", "rl.learning_rate=0.01"])
    forked = fork(parent, 6, config)
    worse = Planted(before=lambda rng, asked: replace(asked, skill=0.3))
    later = around(forked, 9, worse, at=7, count=12)
    kept = {iteration: metrics for iteration, metrics in later.metrics.items() if iteration >= 7}
    store(replace(later, groups=[group for group in later.groups if group.iteration >= 7], metrics=kept))
    history = History(forked)
    assert history.fork_points == [7]
    verdict = judged(history, None)
    assert verdict.around.at == 7 and verdict.findings[0].title.startswith("rl.learning_rate: 0.0002 -> 0.01")
    pair = provable(verdict)
    assert pair is not None
    expected = [
        "fork",
        "b",
        "--at",
        "6",
        "--run",
        "b-7-without-settings",
        "--store",
        forked.store.url,
        "--set",
        "rl.learning_rate=0.0002",
    ]
    assert fork_arguments(verdict, *pair) == [*expected, "--set", "rl.num_iterations=10"]


def test_a_proof_compares_the_iterations_of_the_fork(tmp_path: Path) -> None:
    run = made(tmp_path, Planted(after=broken))
    verdict = judged(History(run), 7)
    pair = provable(verdict)
    assert pair is not None
    redone = fork(run, 7, override_config(run.config, ["run=c", *pair[1].sets]), "score")
    record = record_of(redone, 7, {"rollout/reward_mean": 0.375}, {})
    assert run.store.create(redone.iteration_key(7), sealed(record))
    lines = proved_lines(verdict, pair[1], redone)
    assert re.fullmatch(r"with it: 0\.\d+ before, 0\.\d+ in iteration 7", lines[0])
    assert re.fullmatch(r"without it: 0\.\d+ before, 0\.375 in iteration 7 \(run c\)", lines[1])


def test_of_a_long_run_the_iterations_are_looked_at_whose_metrics_jump(tmp_path: Path) -> None:
    run = create_or_continue(read_config("tiny", ["run=a", f"store=file://{tmp_path}"], PRESETS))
    rng = random.Random(1)
    for iteration in range(90):
        metrics = {"rollout/reward_mean": 0.5 + rng.gauss(0, 0.02) - (0.3 if iteration >= 61 else 0.0)}
        assert run.store.create(run.iteration_key(iteration), sealed(record_of(run, iteration, metrics, {})))
    numbers = candidates(History(run))
    assert 61 in numbers and len(numbers) <= 40


def padded(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    """A policy that has learnt to please `format`, whatever it answers."""
    parts = {"exact": 0.0, "near": 0.9, "format": 1.0}
    return replace(rollout, completion="<answer>xx</answer>", reward_parts=parts, reward=0.9)


def test_a_second_reward_parts_from_the_first_where_the_policy_pleases_the_first(tmp_path: Path) -> None:
    run = made(tmp_path, Planted(after=padded), size=4)
    result = asked(run, "--second", "exact")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["iteration", "rollouts", "reward", "exact", "r", "within", "groups"]
    assert [int(line.split()[0]) for line in lines[1:13]] == list(range(12)) and lines[1].split()[1] == "48"
    assert re.match(r"they part at iteration 7: reward 0\.\d+ -> 0\.9, exact 0\.\d+ -> 0 \(p = ", lines[14])
    assert len([line for line in lines if line.startswith("  rollout ")]) == 3
    report = json.loads(asked(run, "--second", "exact", "--json").stdout)
    assert (report["name"], report["iteration"], len(report["iterations"])) == ("exact", 7, 12)
    assert report["second"]["after"] == 0 and report["rollouts"][0]["completion"] == "<answer>xx</answer>"
    keys = run.store.list("runs")
    assert not [key for key in keys if "exact" in key]  # nothing was written


def test_a_second_reward_that_agrees_is_exit_code_4(tmp_path: Path) -> None:
    result = asked(made(tmp_path, None, size=4), "--second", "exact")
    assert result.exit_code == 4 and "reward and exact go together" in result.stdout
    result = CliRunner().invoke(cli.app, ["why", "a", "--second", "exact", "--json", "--store", f"file://{tmp_path}"])
    assert result.exit_code == 4 and json.loads(result.stdout)["iteration"] is None


def test_a_second_reward_that_is_none_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path, None, size=4)
    assert re.search("there is no reward 'exactly'", asked(run, "--second", "exactly").output)
    assert re.search(
        r"--second environment: it scored none of \d+ rollouts", asked(run, "--second", "environment").output
    )
