"""`rlpipe plan`: it prints what it read, and all faults at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rlpipe.config.source import read_config
from tests.checks.test_preflight import LEAK, SMALL, SUMS, sums_folder
from tests.paths import PRESETS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return sums_folder(tmp_path, monkeypatch)


@pytest.fixture
def plan(folder: Path) -> Callable[..., tuple[int, str]]:
    def run(preset: str, *sets: str) -> tuple[int, str]:
        outcome = CliRunner().invoke(
            app, ["plan", preset, *[part for override in sets for part in ("--set", override)]]
        )
        return outcome.exit_code, outcome.output

    return run


@pytest.mark.slow
def test_a_plan_says_what_it_read(plan: Callable[..., tuple[int, str]], folder: Path) -> None:
    code, output = plan("tiny", *SMALL, *SUMS, "rl.rewards={exact = 1.0}")
    assert code == 0, output
    assert "data.words (rl): 5 rows of sums.jsonl, for example 'What is 0 + 2?', answer '2'" in output
    assert "rows of reasoning_gym:spell_backward, for example 'Spell" in output
    assert "rewards: exact; tried on data.words (rl), data.words (evaluation)" in output
    assert (
        "FAULT" not in output and [line for line in output.splitlines() if "WARNING" in line and LEAK not in line] == []
    )
    assert {path.name for path in folder.iterdir()} <= {
        "sums.jsonl",
        "unanswered.jsonl",
        "trial_graders.py",
        "__pycache__",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("untried_model")
def test_a_plan_names_faults_and_warnings(plan: Callable[..., tuple[int, str]]) -> None:
    code, output = plan("tiny", *SMALL, *SUMS, "sft.num_steps=0", "rl.filters={nope = 1.0}")
    assert code == 2
    assert "WARNING RL of a new model without SFT" in output
    assert output.count("FAULT") == 2


@pytest.mark.usefixtures("untried_model")
@pytest.mark.parametrize("preset", ["gsm8k-0.5b", "two-node", "multi-node"])
def test_a_plan_of_what_is_not_here_is_printed_with_its_faults(
    plan: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, output = plan(preset)
    assert code == 2
    assert "GiB" in output
    assert "FAULT data.gsm8k.source=gsm8k/train.jsonl: no such file" in output
    assert "FAULT model.path='Qwen/" in output


@pytest.mark.usefixtures("folder", "untried_model")
def test_a_plan_as_json_has_sizes_as_numbers_and_its_faults_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ended = CliRunner().invoke(app, ["plan", "gsm8k-0.5b", "--json", "--set", "rl.num_iterations=3"])
    assert ended.exit_code == 2 and ended.stdout.count("\n") == 1, ended.output
    report = json.loads(ended.stdout)
    config = read_config("gsm8k-0.5b", [], PRESETS)
    assert report["work"]["iterations"] == 3 and report["work"]["steps"] == 3 * config.rl.num_steps
    assert report["work"]["rollouts"] == config.rl.num_prompts * config.rl.group_size
    assert any(fault.startswith("data.gsm8k.source=gsm8k/train.jsonl: no such file") for fault in report["faults"])
    assert any(line.startswith("processes: 1 flow") for line in report["plan"]) and "reading its data" in ended.stderr
