"""What the preflight has read, the session of the same run does not read again."""

from __future__ import annotations

import json
from pathlib import Path

from rlpipe.checks.preflight import preflight
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.data.read_sets import ReadSets
from rlpipe.data.sources import load_conversations
from rlpipe.loop.session import Session
from rlpipe.store.opening import create_or_continue
from tests.paths import PRESETS


def config(tmp_path: Path, *sets: str) -> PipelineConfig:
    """A run on one file, of which SFT, RL and an evaluation read."""
    rows = [{"prompt": f"{number} + 1?", "answer": f"{number + 1}"} for number in range(20)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"name": "sums", "source": str(path), "completion_template": "<answer>{answer}</answer>"}
    data = [entry | {"use": use} for use in ("sft", "rl", "evaluation")]
    own = [f"store=file://{tmp_path}/store", "tracking.uri=", "rl.rewards={exact = 1.0}", "run=a"]
    tiny = read_config("tiny", [*own, *sets], PRESETS)
    return PipelineConfig.model_validate(tiny.model_dump() | {"data": data})


def session_of(config: PipelineConfig, tmp_path: Path) -> Session:
    return Session(create_or_continue(config), tmp_path / "work")


def test_the_session_of_a_run_has_the_rows_that_its_preflight_read(tmp_path: Path) -> None:
    run = config(tmp_path)
    preflight(run)
    (tmp_path / "sums.jsonl").unlink()  # it is not read again
    session = session_of(run, tmp_path)
    (talks,) = session.data.conversations().values()
    assert [len(talks), *(len(session.data.prompts(use)[0]) for use in ("rl", "evaluation"))] == [20, 20, 20]
    assert session.data.prompts("rl") is session.data.prompts("rl")


def test_sessions_without_a_preflight_of_their_own_read(tmp_path: Path) -> None:
    run = config(tmp_path)
    preflight(run)
    other = session_of(config(tmp_path, "run=b"), tmp_path)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1?", "answer": "1"}) + "\n")
    assert len(other.data.prompts("rl")[0]) == 1
    # what was read for the first run was dropped with the session of the other
    assert len(session_of(run, tmp_path).data.prompts("rl")[0]) == 1


def test_a_set_with_another_setting_is_read_and_one_that_was_taken_is_not_kept(tmp_path: Path) -> None:
    run = config(tmp_path)
    (data,) = run.sets("sft")
    sets = ReadSets(run.seed)
    rows = sets.read(data, load_conversations)
    assert len(sets.take(data.model_copy(update={"rows_max": 3}), load_conversations)) == 3
    assert sets.take(data, load_conversations) is rows
    assert sets.take(data, load_conversations) is not rows
    sets.read(data, load_conversations)
    sets.forget(data)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1?", "answer": "1"}) + "\n")
    assert len(sets.take(data, load_conversations)) == 1
