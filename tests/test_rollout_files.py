"""Rollouts of Parquet files: indexed by group, read by iteration, completed with defaults, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.data.prompt import Prompt
from rlpipe.rollouts import PROMPTS, ROLLOUTS, to_parquet
from rlpipe.stages.rollout_files import FileRollouts
from rlpipe.types import JsonDict, UserError

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
        pa.Table.from_pylist([{name: told.get(name) for name in names} for told in rows]), path, row_group_size=row_group
    )
    return path


def opened(path: Path, prompts: list[Prompt] | None = None) -> FileRollouts:
    return FileRollouts.open(str(path), GROUP, 16, prompts or [])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=3),
    row_group=st.integers(1, 7),
    first=st.integers(0, 5),
    count=st.integers(1, 6),
)
def test_any_slice_of_the_whole_groups_is_read_back_in_order(
    files: list[list[bool]], row_group: int, first: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, wanted = tmp_path_factory.mktemp("files"), []
    for number, groups in enumerate(files):
        rows = []
        for group, finished in enumerate(groups):
            reason, marks = "stop" if finished else "abort", [100 * number + 10 * group + index for index in range(GROUP)]
            rows += [row(group, f"p/{number}-{group}", completion_tokens=[mark, 7], finish_reason=reason) for mark in marks]
            wanted += [marks] * finished
        write(folder / f"{number}.parquet", rows, row_group)
    found = opened(folder)
    assert len(found.groups) == len(wanted)
    assert found.num_unfinished == sum(not finished for groups in files for finished in groups)
    if first + count > len(wanted):
        return
    prompts, rollouts, rewards = found.read(first, count)
    assert [told["completion_tokens"][0] for told in rollouts] == [
        mark for marks in wanted[first : first + count] for mark in marks
    ]
    assert [told["group_index"] for told in rollouts] == [group for group in range(count) for _ in range(GROUP)]
    assert len(prompts) == count
    assert len(rewards) == count * GROUP


def test_what_is_left_away_has_its_default_and_a_known_prompt_brings_its_answer(tmp_path: Path) -> None:
    rows = [row(0, "elsewhere/1", prompt="say 3", reward=None), row(0, "elsewhere/1", prompt="say 3", reward=None)]
    rows += [row(1, prompt="not in the data", reward=2, surplus="x"), row(1, prompt="not in the data", reward=1, surplus="x")]
    prompts, rollouts, rewards = opened(write(tmp_path / "x.parquet", rows), [PROMPT]).read(0, 2)
    assert (prompts[0]["answer"], json.loads(prompts[0]["metadata"]), prompts[0]["source"]) == ("three", {"k": 1}, "words")
    assert json.loads(prompts[1]["messages"]) == [{"role": "user", "content": "not in the data"}]
    assert [told["reward"] for told in rewards] == [2.0, 1.0]
    assert rollouts[3] == {
        "prompt_id": "p/1", "group_index": 1, "rollout_index": 1, "prompt": "not in the data", "prompt_tokens": [1, 1],
        "completion": "", "completion_tokens": [4, 5], "loss_mask": [1, 1], "rollout_logprobs": [-0.5, -1.0], "weight_version": 0,
        "weight_versions": [{"version": 0, "num_tokens": 2}], "finish_reason": "stop", "seed": 0, "engine": "stored",
        "environment": "",
    } | {name: rollouts[3][name] for name in ROLLOUTS.names if name not in rollouts[3]}  # fmt: skip
    assert set(rollouts[3]) == set(ROLLOUTS.names)
    assert to_parquet(rollouts, ROLLOUTS)
    assert to_parquet(prompts, PROMPTS)


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
        ([{"prompt_id": "p", "reward": 1.0}], r"x\.parquet: .*column group_index, prompt_tokens, completion_tokens, rollout_logprobs"),
        ([row(0), row(0), row(1)], r"rows 3 to 3: group 1 of prompt p/1 has 1 rollouts, and rl\.group_size=2"),
        ([row(0), row(1), row(0), row(1)], "side by side"),
        ([row(0), row(0, rollout_logprobs=[-1.0])], r"row 2: 1 rollout_logprobs, but 2 completion_tokens"),
        ([row(0, loss_mask=[1, 1]), row(0, loss_mask=[1])], r"row 2: 1 loss_mask, but 2"),
        ([row(0), row(0, rollout_logprobs=[-1.0, float("nan")])], "row 2: rollout_logprobs has a value that is no number"),
        ([row(0), row(0, completion_tokens=[3, -1])], "row 2: a token id is missing or below 0"),
        ([row(0), row(0, prompt_tokens=[])], "row 2: .*must not be empty"),
        ([row(0), row(0, prompt_tokens=[9, 9])], "more than one prompt"),
        ([row(0), row(0, completion_tokens=[3] * 20, rollout_logprobs=[-1.0] * 20)], "row 2: 22 tokens; model.context_tokens_max=16"),
        ([row(0, rollout_index=1), row(0, rollout_index=1)], r"rollout_index \[1, 1\]"),
        ([row(0, reward=1.0), row(0, reward=float("inf"))], "no `reward` to keep"),
        ([row(0, completion_tokens="text")] * 2, "not a readable Parquet file of rollouts"),
        ([row(0, completion_tokens=[2**40, 1])] * 2, "not a readable Parquet file of rollouts"),
        ([row(0, weight_versions=[{"version": 0, "num_tokens": 1}])] * 2, "do not add up to its 2"),
        ([row(0), row(0, environment="{")], r"x\.parquet row 2: environment '\{': Invalid JSON: .*; mend it, or leave the column away"),
        ([row(0), row(0, environment="[1]")], "row 2: environment .*: Input should be an object"),
        ([row(0), row(0, environment="{}")], "row 2: environment .*: reward: Field required; num_turns: .*; fault: .*; metrics: "),
        ([row(0), row(0, environment=played(reward="1"))], r"row 2: environment .*: reward: Input should be a valid number; mend"),
        ([row(0), row(0, environment=played(reward=float("inf")))], ": reward: Input should be a finite number"),
        ([row(0), row(0, environment=played(num_turns=True))], ": num_turns: Input should be a valid integer"),
        ([row(0), row(0, environment=played(fault=None))], ": fault: Input should be a valid string"),
        ([row(0), row(0, environment=played(metrics={"a": [1]}))], r": metrics: a: Input should be a valid number; mend"),
        ([row(0), row(0, reward_parts="0.5")], "row 2: reward_parts '0.5': Input should be an object; mend"),
        ([row(0), row(0, reward_parts='{"a": NaN}')], "row 2: reward_parts .*: a: Input should be a finite number; mend"),
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
    _, rollouts, rewards = opened(write(tmp_path / "x.parquet", kept)).read(0, 1)
    assert [told["environment"] for told in rollouts] == [played(), ""]
    assert [told["reward_parts"] for told in rewards] == ['{"a": 1, "b": -0.5}', "{}"]


def test_no_file_text_that_is_no_parquet_and_a_file_that_changes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Parquet file there"):
        opened(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(UserError, match=r"text\.parquet: not a readable"):
        opened(tmp_path / "text.parquet")
    path = write(tmp_path / "x" / "x.parquet", [row(0), row(0)])
    found = opened(path)
    assert len(found.read(0, 1)[1]) == 2
    write(path, [row(0, reward=0.1), row(0)])
    with pytest.raises(UserError, match=r"x\.parquet was changed"):
        found.read(0, 1)


def test_two_prompts_of_one_name_are_refused(tmp_path: Path) -> None:
    rows = [row(0, "same")] * 2 + [row(1, "same")] * 2
    with pytest.raises(UserError, match="two different prompts are called same"):
        opened(write(tmp_path / "x.parquet", rows)).read(0, 2)
