"""Rollouts of Parquet files: indexed by group, read by iteration, completed with
defaults, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.extras.imports.foreign import ForeignFiles, has_no_logprobs, prompt_book
from rlpipe.records.columns import as_row
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import EnvironmentOutcome, Group

GROUP = 2
PROMPT = Prompt(
    "words/3", "words", [{"role": "system", "content": "s"}, {"role": "user", "content": "say 3"}], "three", {"k": 1}
)


def row(group: int, prompt_id: str = "", **more: Any) -> JsonDict:
    told = {"prompt_id": prompt_id or f"p/{group}", "group_index": group, "prompt_tokens": [1, group], "reward": 0.5}
    return {**told, "completion_tokens": [4, 5], "rollout_logprobs": [-0.5, -1.0], **more}


def played(**more: Any) -> str:
    return json.dumps({"reward": 1.0, "num_turns": 2, "fault": "", "metrics": {"calls": 1}, "messages": [], **more})


def write(path: Path, rows: list[JsonDict], row_group: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for told in rows for name in told)
    pq.write_table(
        pa.Table.from_pylist([{name: told.get(name) for name in names} for told in rows]),
        path,
        row_group_size=row_group,
    )
    return path


def opened(path: Path, prompts: list[Prompt] | None = None) -> list[tuple[Prompt, Group]]:
    return list(ForeignFiles(str(path), 16, 1000, prompt_book(prompts or [])).groups())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=3),
    row_group=st.integers(1, 7),
)
def test_the_whole_groups_are_read_in_order_and_those_cut_short_are_left_out(
    files: list[list[bool]], row_group: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, wanted = tmp_path_factory.mktemp("files"), []
    for number, groups in enumerate(files):
        rows = []
        for group, finished in enumerate(groups):
            reason, marks = (
                "stop" if finished else "abort",
                [100 * number + 10 * group + index for index in range(GROUP)],
            )
            rows += [
                row(group, f"p/{number}-{group}", completion_tokens=[mark, 7], finish_reason=reason) for mark in marks
            ]
            wanted += [marks] * finished
        write(folder / f"{number}.parquet", rows, row_group)
    groups_read = opened(folder)
    assert [[rollout.completion_tokens[0] for rollout in group] for _, group in groups_read] == wanted
    assert all(rollout.reward == 0.5 for _, group in groups_read for rollout in group)


def test_what_is_left_away_has_its_default_and_a_known_prompt_brings_its_answer(tmp_path: Path) -> None:
    rows = [row(0, "elsewhere/1", prompt="say 3", reward=None), row(0, "elsewhere/1", prompt="say 3", reward=None)]
    rows += [
        row(1, prompt="not in the data", reward=2, surplus="x"),
        row(1, prompt="not in the data", reward=1, surplus="x"),
    ]
    (known, first), (unknown, second) = opened(write(tmp_path / "x.parquet", rows), [PROMPT])
    assert (known.answer, known.metadata, known.source, known.prompt_id) == ("three", {"k": 1}, "words", "elsewhere/1")
    assert unknown.messages == [{"role": "user", "content": "not in the data"}]
    assert [rollout.reward for rollout in [*first, *second]] == [None, None, 2.0, 1.0]
    assert as_row(second[1]) == {
        "prompt_id": "p/1", "group_index": 1, "rollout_index": 1, "prompt": "not in the data", "prompt_tokens": [1, 1],
        "completion": "", "completion_tokens": [4, 5], "loss_mask": [1, 1],
        "rollout_logprobs": [-0.5, -1.0], "weight_version": 0,
        "weight_versions": [{"version": 0, "num_tokens": 2}], "finish_reason": "stop", "seed": 0, "engine": "stored",
        "environment": "", "reward": 1.0, "reward_parts": "", "reward_fault": "", "advantage": 0.0,
    } | {"reward_parts": as_row(second[1])["reward_parts"]}  # fmt: skip


def test_groups_have_any_size_and_logprobs_that_nobody_recorded_are_not_known(tmp_path: Path) -> None:
    rows = [row(group) for group, size in enumerate((1, 3, 2)) for _ in range(size)]
    rows = [{name: value for name, value in told.items() if name != "rollout_logprobs"} for told in rows]
    read = opened(write(tmp_path / "x.parquet", rows))
    assert [len(group) for _, group in read] == [1, 3, 2]
    assert all(
        has_no_logprobs(rollout) and len(rollout.rollout_logprobs) == 2 for _, group in read for rollout in group
    )
    ((_, some),) = opened(write(tmp_path / "y.parquet", [row(0), row(0, rollout_logprobs=None)]))
    assert [has_no_logprobs(rollout) for rollout in some] == [False, True]


def test_a_prompt_id_alone_is_not_the_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [row(0, "words/3", prompt="say 4", reward=None)] * 2)
    with pytest.raises(UserError, match="in no data set"):
        opened(path, [PROMPT])
    other = Prompt("words/9", "words", PROMPT.messages, "drei")
    path = write(tmp_path / "y.parquet", [row(0, prompt="say 3", reward=None)] * 2)
    with pytest.raises(UserError, match="in no data set"):  # two answers to one text
        opened(path, [PROMPT, other])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt_id": "p", "reward": 1.0}],
         r"x\.parquet: .*column group_index, prompt_tokens, completion_tokens \(it has"),
        ([row(0), row(1), row(0), row(1)], "row 3: group 0 of prompt p/0 had ended: its rows must be side by side"),
        ([row(0), row(0, rollout_logprobs=[-1.0])], r"row 2: 1 rollout_logprobs, but 2 completion_tokens"),
        ([row(0, loss_mask=[1, 1]), row(0, loss_mask=[1])], r"row 2: 1 loss_mask, but 2"),
        ([row(0), row(0, rollout_logprobs=[-1.0, float("nan")])],
         "row 2: rollout_logprobs has a value that is no number"),
        ([row(0), row(0, completion_tokens=[3, -1])], "row 2: a token id is missing or below 0"),
        ([row(0), row(0, prompt_tokens=[])], "row 2: .*must not be empty"),
        ([row(0), row(0, prompt_tokens=[9, 9])], "more than one prompt"),
        ([row(0), row(0, completion_tokens=[3] * 20, rollout_logprobs=[-1.0] * 20)],
         "row 2: 22 tokens; model.context_tokens_max=16"),
        ([row(0, rollout_index=1), row(0, rollout_index=1)], r"rollout_index \[1, 1\]"),
        ([row(0, reward=1.0), row(0, reward=float("inf"))], "no `reward` to keep"),
        ([row(0, completion_tokens="text")] * 2, "not a readable Parquet file of rollouts"),
        ([row(0, completion_tokens=[2**40, 1])] * 2, "not a readable Parquet file of rollouts"),
        ([row(0, weight_versions=[{"version": 0, "num_tokens": 1}])] * 2, "do not add up to its 2"),
        ([row(0, weight_versions=[{"version": 0, "num_tokens": None}])] * 2, "row 1: weight_versions"),
        ([row(0, weight_versions=[{"version": None, "num_tokens": 2}])] * 2, "row 1: weight_versions"),
        ([row(0, weight_versions=[None])] * 2, "row 1: weight_versions"),
        ([row(0), row(0, environment="{")],
         r"x\.parquet row 2: environment '\{': Invalid JSON: .*; mend it, or leave the column away"),
        ([row(0), row(0, environment="[1]")], "row 2: environment .*: Input should be an object"),
        ([row(0), row(0, environment="{}")],
         "row 2: environment .*: reward: Field required; num_turns: .*; fault: .*; metrics: "),
        ([row(0), row(0, environment=played(reward="1"))],
         r"row 2: environment .*: reward: Input should be a valid number; mend"),
        ([row(0), row(0, environment=played(reward=float("inf")))], ": reward: Input should be a finite number"),
        ([row(0), row(0, environment=played(num_turns=True))], ": num_turns: Input should be a valid integer"),
        ([row(0), row(0, environment=played(fault=None))], ": fault: Input should be a valid string"),
        ([row(0), row(0, environment=played(metrics={"a": [1]}))],
         r": metrics: a: Input should be a valid number; mend"),
        ([row(0), row(0, reward_parts="0.5")], "row 2: reward_parts '0.5': Input should be an object; mend"),
        ([row(0), row(0, reward_parts='{"a": NaN}')],
         "row 2: reward_parts .*: a: Input should be a finite number; mend"),
        ([row(0), row(0, reward_parts='{"a": true}')], "row 2: reward_parts"),
        ([row(0), row(0, reward_parts='{"a": 1' + "0" * 400 + "}")], "row 2: reward_parts"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_trained_on_is_refused_by_row(rows: list[JsonDict], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", rows)
    with pytest.raises(UserError, match=message):
        opened(path)


def test_what_an_environment_and_a_reward_recorded_is_kept(tmp_path: Path) -> None:
    kept = [row(0, environment=played(), reward_parts='{"a": 1, "b": -0.5}'), row(0, environment="", reward_parts=None)]
    ((_, (first, second)),) = opened(write(tmp_path / "x.parquet", kept))
    assert (first.environment, second.environment) == (EnvironmentOutcome(1.0, 2, "", {"calls": 1}, []), None)
    assert (first.reward_parts, second.reward_parts or {}) == ({"a": 1, "b": -0.5}, {})


def test_no_file_and_text_that_is_no_parquet_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Parquet file there"):
        opened(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(UserError, match=r"text\.parquet: not a readable"):
        opened(tmp_path / "text.parquet")
