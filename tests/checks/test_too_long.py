"""data.on_too_long: rows that are longer than the context leaves room for are dropped before
anything is drawn, counted, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.checks.content import Content
from rlpipe.checks.preflight import look_at, preflight
from rlpipe.config.pipeline import PipelineConfig, stored_tree
from rlpipe.config.source import read_config
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.loop.session import Session
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Conversation
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.sft import prepare_sft_data
from rlpipe.store.artifacts import read_records
from rlpipe.store.opening import create_or_continue
from tests.declared import stage_settings
from tests.paths import PRESETS

LONG = {1, 4}  # the rows that are too long
TOKENIZER = ArtifactRef("runs/a/base/tokenizer", "0" * 64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"prompt": f"say {row} {'qj' * 120 if row in LONG else ''}", "answer": str(row)} for row in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(folder: Path, *sets: str) -> PipelineConfig:
    own = [
        f"data.{name}.{field}"
        for name in ("words", "short_words", "all_words")
        for field in ("source=rows.jsonl", "part=all")
    ]
    fixed = ["run=a", f"store=file://{folder}/store", "rl.rewards={exact = 1.0}", "rl.num_prompts=6", "tracking.uri="]
    return read_config("tiny", [*fixed, *own, *sets], PRESETS)


def session_of(folder: Path, *sets: str) -> Session:
    session = Session(create_or_continue(config_of(folder, *sets)), folder)
    build_tokenizer(["say 1 2 3 xyz"], folder)
    session.data.tokenizer = ChatTokenizer.from_folder(folder)
    return session


async def test_prompts_are_dropped_before_the_cursor_draws(folder: Path) -> None:
    session = session_of(folder, "data.words.on_too_long=drop")
    fit = [f"words/{row}" for row in range(8) if row not in LONG]
    assert [prompt.prompt_id for prompt in session.data.fitting("rl")[0]] == fit and session.data.cursor.sizes == [6]
    drawn = await sample_prompts(session, iteration=0, round_index=0, before=None)
    assert drawn.metrics["rollout/prompts_too_long"] == len(LONG)
    prompts = read_records(session.run.store, drawn.ref, "prompts.parquet", Prompt)
    assert sorted(prompt.prompt_id for prompt in prompts) == fit, "one pass over what fits"
    again = Session(session.run, folder)
    again.data.tokenizer = session.data.tokenizer
    assert again.data.sha256 == session.data.sha256
    assert (await sample_prompts(again, iteration=0, round_index=0, before=None)).cached


@pytest.mark.slow
async def test_a_prompt_that_is_too_long_fails_and_the_advice_is_possible(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.words\.on_too_long = 'drop'.*rlpipe fork RUN --at sft") as refused:
        await sample_prompts(session_of(folder), iteration=0, round_index=0, before=None)
    assert "(and 1 others are too long)" in str(refused.value)
    with pytest.raises(UserError, match=r"data\.words\.on_too_long = 'drop'"):
        preflight(config_of(folder))
    preflight(config_of(folder, "run=b", "data.words.on_too_long=drop"))


async def test_conversations_are_truncated_dropped_or_refused(folder: Path) -> None:
    sets = ["data.all_words.on_too_long=drop", "data.short_words.on_too_long=drop"]
    dropped = session_of(folder, "run=b", *sets)
    produced = await prepare_sft_data(dropped, tokenizer=TOKENIZER)
    rows = read_records(dropped.run.store, produced.ref, "conversations.parquet", Conversation)
    assert len(rows) == 2 * (8 - len(LONG)) and all(len(row.tokens) < 128 for row in rows)
    assert (produced.metrics["data/dropped_too_long"], produced.metrics["data/truncated"]) == (2 * len(LONG), 0)
    truncated = await prepare_sft_data(session_of(folder, "run=c"), tokenizer=TOKENIZER)
    assert truncated.metrics["data/truncated"] == 2 * len(LONG) and "data/dropped_too_long" not in truncated.metrics
    with pytest.raises(
        UserError, match=r"^data\.all_words\.on_too_long='fail': 2 of 8 conversations .*\(number 2 of rows\.jsonl\)"
    ):
        await prepare_sft_data(session_of(folder, "run=d", "data.all_words.on_too_long=fail"), tokenizer=TOKENIZER)


@pytest.mark.slow
def test_what_is_left_out_is_said_before_a_run_starts(folder: Path) -> None:
    findings = look_at(Content(config_of(folder, "data.words.on_too_long=drop", "data.all_words.on_too_long=fail")))
    assert (
        findings.faults
        == [line for line in findings.faults if line.startswith("data.all_words.on_too_long='fail'")]
        != []
    )
    findings = look_at(Content(config_of(folder, "data.words.on_too_long=drop")))
    assert findings.faults == []
    assert [line for line in findings.lines if "; 4 more are too long and left out" in line]  # 2 of rl, 2 of evaluation


def test_a_set_without_a_row_that_fits_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"on_too_long='drop': 8 of 8 rows have more than 4 tokens, and none is left"):
        preflight(config_of(folder, "data.words.on_too_long=drop", "model.context_tokens_max=20"))


def test_the_settings_name_it_where_it_is_used_only(folder: Path) -> None:
    plain, dropping = config_of(folder), config_of(folder, "data.words.on_too_long=drop")
    assert all("on_too_long" not in data for data in stored_tree(plain)["data"])
    assert sum("on_too_long" in data for data in stored_tree(dropping)["data"]) == 2
    before, after = (stage_settings(config, "rl", "prompts") for config in (plain, dropping))
    assert after.keys() - before.keys() == {"model.context_tokens_max", "rl.completion_tokens_max"}
    assert stage_settings(plain, "data", "data") == stage_settings(dropping, "data", "data")


def test_what_an_environment_asks_cannot_be_dropped(folder: Path) -> None:
    sets = ["rl.environment=calculator", "rl.rewards={environment = 1.0}", "data.words.on_too_long=drop"]
    with pytest.raises(
        UserError, match=r"^data\.words\.on_too_long='drop': rl\.environment='calculator' writes its text"
    ):
        config_of(folder, *sets)
