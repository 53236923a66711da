"""What is looked at before a run starts: all faults at once, rewards on the run's own
data, and no network in a plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.checks.content import Content
from rlpipe.checks.preflight import look_at, preflight
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.data.sources import split_point
from rlpipe.store.progress import Progress
from tests.paths import PRESETS

SMALL = ["data.words.rows_max=40", "data.short_words.rows_max=40", "data.all_words.rows_max=40"]
SUMS = ["data.words.source=sums.jsonl", "data.words.part=all"]
LEAK = "are trained on too"
GRADERS = """
import json, os, time

def half(prompt, completion):
    return {"": 0.5}[completion]

def never(prompt, completion):
    raise RuntimeError("not today")

def reads_json(prompt, completion):
    return float(json.loads(completion)["n"] == prompt["answer"])

def reads_the_end(prompt, completion):
    return float(completion.index("<|end|>") > 0)

def reads_a_role(prompt, completion):
    return float(completion.index("<|user|>") == 0)

def solved(group, threshold):
    return None if json.loads(group[0]["environment"])["metrics"]["solved"] > threshold else "unsolved"

def hangs(prompt, completion):
    time.sleep(60)

def dies(prompt, completion):
    os._exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return sums_folder(tmp_path, monkeypatch)


def sums_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with sums and rewards."""
    rows = [{"prompt": f"What is {number} + 2?", "answer": str(number + 2)} for number in range(5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "unanswered.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    (tmp_path / "trial_graders.py").write_text(GRADERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tiny(folder: Path, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store=file://{folder}/store", *SMALL, *sets], PRESETS)


@pytest.mark.slow
def test_what_fits_passes_and_writes_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        preflight(tiny(folder))
        preflight(tiny(folder, *SUMS, "rl.rewards={exact = 1.0, math = 1.0, format = 0.1}"))
    assert [record for record in caplog.records if LEAK not in record.getMessage()] == []
    with caplog.at_level(logging.WARNING):
        preflight(tiny(folder, *SUMS, 'rl.rewards={"trial_graders:half" = 1.0}'))  # one trial rollout is enough
    (warned,) = (record.getMessage() for record in caplog.records if LEAK not in record.getMessage())
    assert "pass_threshold" in warned  # it gives a half at most
    assert not (folder / "store").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "error"),
    [
        ([*SUMS],
         ("reward 'reasoning_gym' raised PromptFault: prompt words/3: reward reasoning_gym needs "
          "rows of a reasoning_gym")),
        ([*SUMS, 'rl.rewards={"trial_graders:never" = 1.0}'], "not today"),
        ([*SUMS, 'rl.rewards={"trial_graders:hangs" = 1.0}', "rl.reward_timeout_s=0.2"],
         r"took more than rl.reward_timeout_s=0.2"),
        ([*SUMS, 'rl.rewards={"trial_graders:dies" = 1.0}'], "its process died"),
        ([*SUMS, "rl.rewards={code = 1.0}"], "its tests cannot be read|no tests"),
        ([*SUMS, "data.words.source=unanswered.jsonl", "rl.rewards={math = 1.0}"], "has no answer"),
    ],
)  # fmt: skip
def test_rewards_that_can_score_nothing_of_a_set_are_refused(folder: Path, sets: list[str], error: str) -> None:
    with pytest.raises(
        UserError, match=rf"rows of data\.words \(rl\) and data\.words \(evaluation\): .*{error}.*Choose rewards"
    ):
        preflight(tiny(folder, *sets))
    assert not (folder / "store").exists()


def test_rewards_are_not_tried_where_rollouts_would_have_to_be_made_up(folder: Path) -> None:
    environment = ["rl.environment=calculator", "rl.rewards={environment = 1.0, reasoning_gym = 1.0}"]
    preflight(tiny(folder, *SUMS, *environment))  # an environment's facts are missing


@pytest.mark.slow
def test_without_rl_rewards_are_tried_on_what_is_evaluated(folder: Path) -> None:
    with pytest.raises(UserError, match=r"rl\.rewards cannot score the rows of data\.words \(evaluation\)"):
        preflight(tiny(folder, *SUMS, "rl.num_iterations=0"))
    preflight(tiny(folder, *SUMS, "rl.num_iterations=0", "evaluation.rewards={exact = 1.0}"))


def test_a_reward_that_reads_what_sft_teaches_is_tried_on_it(folder: Path) -> None:
    shows = [f'data.{name}.completion_template=\'{{"n": "{{answer}}"}}\'' for name in ("short_words", "all_words")]
    preflight(tiny(folder, *SUMS, 'rl.rewards={"trial_graders:reads_json" = 1.0}', *shows))
    with pytest.raises(UserError, match="raised TypeError: 'int' object is not subscriptable"):
        preflight(tiny(folder, *SUMS, 'rl.rewards={"trial_graders:reads_json" = 1.0}'))


@pytest.mark.slow
def test_rewards_are_tried_on_what_is_left_of_a_completion_once_it_was_tokens(folder: Path) -> None:
    def shown(template: str, reward: str) -> PipelineConfig:
        sets = [f"data.{name}.completion_template={template}" for name in ("short_words", "all_words")]
        return tiny(folder, *sets, f'rl.rewards={{"trial_graders:{reward}" = 1.0}}', *SUMS)

    preflight(shown("<|user|>{answer}<|end|>", "reads_a_role"))  # a mark that is a special token stays
    with pytest.raises(UserError, match="substring not found"):  # texts have it, and what is sampled never does
        preflight(shown("{answer}<|end|>", "reads_the_end"))
    with pytest.raises(
        UserError, match=r"'<\|pad\|>' in a completion \('no<\|pad\|>.*it is removed before rewards are computed"
    ):
        preflight(shown("no<|pad|>{answer}", "reads_a_role"))


def test_a_filter_that_reads_what_an_environment_said_is_not_tried(folder: Path) -> None:
    preflight(
        tiny(
            folder,
            "rl.environment=calculator",
            "rl.rewards={environment = 1.0}",
            'rl.filters={"trial_graders:solved" = 0.0}',
        )
    )


@pytest.mark.slow
def test_what_is_committed_is_not_looked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ["data.short_words.source=gone.jsonl", "model.path=/nowhere/gone"]
    with pytest.raises(UserError) as refused:
        preflight(tiny(folder, *gone))
    assert "gone.jsonl" in str(refused.value) and "/nowhere/gone" in str(refused.value)
    monkeypatch.setattr(Progress, "sft_complete", property(lambda progress: True))
    monkeypatch.setattr(Progress, "has_base", property(lambda progress: True))
    preflight(tiny(folder, *gone))
    wrong = [*gone, *SUMS, 'rl.rewards={"trial_graders:never" = 1.0}', "rl.filters={nonzero_std = -1.0}"]
    with pytest.raises(UserError, match="not today"):
        preflight(tiny(folder, *wrong))
    monkeypatch.setattr(Progress, "num_committed", lambda progress, phase, total: 1)
    preflight(tiny(folder, *wrong))  # they have filtered and scored an iteration


def test_every_fault_is_named_at_once(folder: Path) -> None:
    sets = [
        "data.words.source=no.jsonl",
        "rl.filters={diversity = 2.0}",
        "rl.rewards={nope = 1.0}",
        "data.all_words.source=no.parquet",
    ]
    config = tiny(folder, *sets)
    findings = look_at(Content(config))
    for fault, needle in zip(
        findings.faults, ["no.parquet", "no.jsonl", "'nope'", "rl.filters.diversity=2"], strict=True
    ):
        assert needle in fault
    with pytest.raises(UserError) as refused:
        preflight(config)
    assert str(refused.value).splitlines() == findings.faults


@pytest.mark.slow
def test_a_random_model_without_sft_is_warned_about(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        preflight(tiny(folder, "sft.num_steps=0"))
    assert "random weights write noise" in caplog.text


FRACTIONS = [f"data.{name}.heldout_fraction=0.4" for name in ("words", "short_words", "all_words")]


@pytest.mark.slow
def test_prompts_of_the_evaluation_that_are_trained_on_are_counted(folder: Path) -> None:
    assert look_at(Content(tiny(folder, "data.words.source=sums.jsonl", *FRACTIONS))).warnings == []
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    spaced = [row | {"prompt": f" {row['prompt']}\n"} for row in rows]
    (folder / "spaced.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spaced))
    taught = ["data.short_words.source=spaced.jsonl", "data.short_words.part=all"]
    assert f"data.words (evaluation): 5 of its 5 prompts {LEAK}" in look_at(Content(tiny(folder, *SUMS))).warnings[0]
    (warning,) = look_at(Content(tiny(folder, "data.words.source=sums.jsonl", *FRACTIONS, *taught))).warnings
    num_heldout = sum(split_point([{"role": "user", "content": row["prompt"]}]) < 0.4 for row in rows)
    assert f"{num_heldout} of its {num_heldout} prompts {LEAK}" in warning


def test_what_reads_alike_falls_on_one_side_of_the_split() -> None:
    for text in ("What is 2 + 2?", "caf\u00e9", "x"):
        sides = [
            split_point([{"role": "user", "content": odd}])
            for odd in (text, f"{text}\n", f"\t {text}  ", text.replace("\u00e9", "e\u0301"))
        ]
        assert len(set(sides)) == 1
