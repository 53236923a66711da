"""`rlpipe gate` on stored evaluations: what it compares, what it refuses, what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli import app
from rlpipe.base.errors import UserError
from rlpipe.checks.content import Content
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config
from rlpipe.extras.gate.command import GateReport, gate_report, judge
from rlpipe.store.run import Run
from tests.gate_world import Passes, commit_evaluation, run_of

RULES = ["evaluation.gate_against=base", "evaluation.gate_at_most_below={words_greedy = 0.25}"]
GOOD: Passes = [[1, 1, 1]] * 15 + [[0, 1, 0]] * 5
WORSE: Passes = [[0, 0, 0]] * 10 + [[1, 1, 1]] * 5 + [[0, 1, 0]] * 5  # the first ten prompts are lost


def run_with(tmp_path: Path, name: str, before: Passes, after: Passes, *sets: str) -> Run:
    run = run_of(tmp_path, name, *RULES, *sets)
    for version, passes in enumerate((before, after)):
        commit_evaluation(run, version, passes)
    return run


def report_of(run: Run, *sets: str) -> GateReport:
    return gate_report(run, 1, override_config(run.config, list(sets)))


def test_a_policy_that_got_worse_fails_with_the_prompts_that_it_lost(tmp_path: Path) -> None:
    report = report_of(run_with(tmp_path, "a", GOOD, WORSE))
    assert not report.passed and (report.policy, report.against) == ("a@1", "a@0")
    by_metric = {one.metric: one for one in report.differences}
    assert set(by_metric) == {f"words_{name}" for name in ("greedy", "reward_mean", "pass_at_1", "pass_at_2")}
    greedy = by_metric["words_greedy"]
    assert (greedy.prompts, greedy.before, greedy.after, greedy.better, greedy.worse) == (20, 0.75, 0.25, 0, 10)
    assert greedy.low < greedy.difference == -0.5 < greedy.high and greedy.sign_p == pytest.approx(2 / 2**10)
    assert by_metric["words_pass_at_1"].sign_p is None  # of two completions one passes: the score is a half
    assert [lost.prompt_id for lost in report.worst] == ["words/0", "words/1", "words/2"]
    lost = report.worst[0]
    assert (lost.before, lost.after, lost.completion_after) == (1.0, 0.0, "a@1 says wrong")


@pytest.mark.parametrize(
    ("rules", "passes"),
    [
        ("evaluation.gate_at_most_below={words_greedy = 0.8}", True),
        ("evaluation.gate_at_most_below={words_greedy = 0.8, words_pass_at_1 = 0.01}", False),
        ("evaluation.gate_at_least={words_greedy = -0.8}", True),
        ("evaluation.gate_at_least={words_greedy = 0.0}", False),
    ],
)
def test_all_rules_must_hold_for_the_lower_bound(tmp_path: Path, rules: str, passes: bool) -> None:
    run = run_with(tmp_path, "a", GOOD, WORSE)
    assert report_of(run, "evaluation.gate_at_most_below={}", rules).passed is passes


def test_equal_policies_pass_and_a_better_one_is_at_least_better(tmp_path: Path) -> None:
    run = run_with(tmp_path, "a", WORSE, GOOD)
    assert report_of(run, "evaluation.gate_at_least={words_greedy = 0.2}").passed
    assert report_of(run, "evaluation.gate_against=run:a@1").worst == []
    assert not report_of(
        run, "evaluation.gate_against=run:a@1", "evaluation.gate_at_least={words_greedy = 0.01}"
    ).passed


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["evaluation.temperature=0.6"], "evaluation.temperature: None and 0.6"),
        (["seed=5"], "seed: 0 and 5"),
        (["evaluation.rewards={exact = 1, length = 0.5}"], "evaluation.rewards.length: None and 0.5"),
        (["data.words.rows_max=77"], "rows_max"),
    ],
)
def test_evaluations_of_other_settings_are_refused_with_what_differs(
    tmp_path: Path, sets: list[str], said: str
) -> None:
    run_with(tmp_path, "a", GOOD, GOOD)
    other = run_with(tmp_path, "b", GOOD, GOOD, *sets)
    with pytest.raises(UserError, match="a@1 and b@1 were evaluated differently") as refused:
        report_of(other, "evaluation.gate_against=run:a")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_other_prompts_and_missing_evaluations_are_refused(tmp_path: Path) -> None:
    run_with(tmp_path, "a", GOOD, GOOD)
    fewer, none = run_with(tmp_path, "b", GOOD[:-1], GOOD[:-1]), run_of(tmp_path, "c", *RULES)
    with pytest.raises(UserError, match=r"differently \(the prompt words/19\)"):
        report_of(fewer, "evaluation.gate_against=run:a")
    with pytest.raises(UserError, match="version 0 of run c is not evaluated; rlpipe evaluate c --version 0"):
        report_of(none)
    one = run_with(tmp_path, "d", GOOD[:1], GOOD[:1])
    with pytest.raises(UserError, match="words: one prompt has no interval"):
        report_of(one)


def test_the_command_ends_with_4_and_json_has_all(tmp_path: Path) -> None:
    run_with(tmp_path, "a", GOOD, WORSE)

    def ask(*arguments: str) -> tuple[int, str]:
        told = CliRunner().invoke(app, ["gate", "a", "--store", f"file://{tmp_path}/store", *arguments])
        return told.exit_code, told.output

    code, output = ask()
    assert code == 4 and "gate of a@1 against a@0: FAILED" in output and "at most 0.25 below: FAILED" in output
    assert output.count("worse: words/") == 3 and "  prompt: Spell 0\n" in output
    code, output = ask("--json", "--set", "evaluation.gate_at_most_below={words_greedy = 0.9}")
    told: dict[str, Any] = json.loads(output)
    assert code == 0 and told["passed"] and told["rules"][0]["bound"] == -0.9 and len(told["differences"]) == 4
    assert ask("--against", "run:a@0", "--version", "0")[0] == 0
    for arguments in (["--set", "seed=3"], ["--against", "other"], ["--version", "7"], ["--version", "0"]):
        assert ask(*arguments)[0] == 2 and len(ask(*arguments)[1].splitlines()) == 1, arguments


@pytest.mark.parametrize(
    "sets",
    [
        ["evaluation.gate_against=base"],
        ["evaluation.gate_at_least={words_greedy = 0}"],
        ["evaluation.gate_against=base", "evaluation.gate_at_least={words_pass_at_4 = 0}"],
        ["evaluation.gate_against=base", "evaluation.gate_at_least={word_greedy = 0}"],
        ["evaluation.gate_against=run:../a", "evaluation.gate_at_least={words_greedy = 0}"],
    ],
)
def test_a_gate_without_a_rule_or_with_an_unknown_metric_is_refused_before_the_run(
    tmp_path: Path, sets: list[str]
) -> None:
    with pytest.raises(UserError, match=r"evaluation\.gate_"):
        run_of(tmp_path, "a", *sets)


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_the_champion_is_the_version_with_the_alias_and_without_one_it_is_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    a, b = run_with(tmp_path, "a", GOOD, GOOD), run_with(tmp_path, "b", WORSE, WORSE)
    config = against_champion(b)
    assert gate_report(b, 1, config).against == "b@0"
    client.create_registered_model("rlpipe")
    assert gate_report(b, 1, config).against == "b@0"
    tags = {"rlpipe.run": "a", "rlpipe.version": "1", "rlpipe.policy_sha256": a.policy(1)[0].sha256}
    client.create_model_version("rlpipe", "/x", tags=tags)
    client.set_registered_model_alias("rlpipe", "champion", "1")
    report = gate_report(b, 1, config)
    assert report.against == "a@1" and not report.passed
    # its own run, started again
    strict = override_config(against_champion(a), ["evaluation.gate_at_least={words_greedy = 0.5}"])
    assert judge(a, 1, strict)[0]
    client.set_model_version_tag("rlpipe", "1", "rlpipe.policy_sha256", "0" * 64)
    with pytest.raises(UserError, match="the champion of rlpipe, version 1 of run a, is no policy of file://"):
        gate_report(b, 1, config)


def against_champion(run: Run) -> PipelineConfig:
    return override_config(run.config, ["evaluation.gate_against=champion"])


def test_a_run_to_compare_with_that_is_not_there_is_said_before_the_run(tmp_path: Path) -> None:
    run = run_with(tmp_path, "a", GOOD, GOOD)
    rule = 'evaluation.gate_at_most_below={"words_greedy" = 0.1}'
    for against, message in (("run:gone", "no run 'gone'"), ("run:gone@3", "no run 'gone'")):
        content = Content(override_config(run.config, [f"evaluation.gate_against={against}", rule]))
        with pytest.raises(UserError, match=message):
            content.gate(run)
    there = Content(override_config(run.config, ["evaluation.gate_against=run:a@1", rule]))
    assert there.gate(run) == "gate: against run:a@1"
