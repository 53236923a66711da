"""What the stage score makes of rewards: facts from the rows, the
fallback, or a stop that says why."""

from pathlib import Path
from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.checks.preflight import preflight
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.loop.session import Session
from rlpipe.processes.launch import free_port
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Rollout
from rlpipe.records.turns import turns_of
from rlpipe.rewards.score import Score, facts_of
from rlpipe.stages.scoring import score_key, score_rollouts
from rlpipe.store.opening import create_or_continue
from tests.deadlines import DEADLINE_S
from tests.paths import PRESETS
from tests.rows import rollout

PROMPTS = {"a": Prompt("a", "s", [], "5")}


def config(tmp_path: Path, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store=file://{tmp_path}", "tracking.uri=", *sets], PRESETS)


def row(completion: str, num_tokens: int = 1, **more: Any) -> Rollout:
    facts = {"completion_tokens": [1] * num_tokens, "finish_reason": "stop", "environment": ""}
    return rollout({"prompt_id": "a", "completion": completion, **facts, **more})


def scored(tmp_path: Path, rows: list[Rollout], *sets: str, known: Any = None) -> list[Rollout]:
    session = Session(create_or_continue(config(tmp_path, *sets)), tmp_path / "work")
    try:
        return score_rollouts(session, PROMPTS, rows, known or {})
    finally:
        session.rewards().close()


def test_a_reward_is_a_function_of_prompt_completion_and_facts(tmp_path: Path) -> None:
    rows = [row("x", 2), row("x", 4), row("x", 2, environment='{"reward": 1.0, "fault": ""}')]
    keys = [score_key(one, facts_of(one, turns_of(one, str, by_agent=False))) for one in rows]
    assert len({*keys}) == 3
    known = {keys[0]: Score(9.0, {"length": 9.0})}
    told = scored(tmp_path, rows, "rl.rewards={length = 1.0}", "rl.reward_args={length = {max = 3}}", known=known)
    assert [one.reward for one in told] == [9.0, 0.0, 1.0]


def test_a_fault_has_the_fallback_or_stops_the_run(tmp_path: Path) -> None:
    rows = [row("x", environment='{"reward": 1.0, "fault": ""}'), row("y")]
    rewards = ("rl.rewards={environment = 1.0}", "rl.environment=calculator")
    told = scored(tmp_path / "one", rows, *rewards, "rl.faults={policy = -1.0, outside = -1.0}")
    assert [(one.reward, one.reward_fault) for one in told] == [(1.0, ""), (-1.0, "reward_error")]
    with pytest.raises(
        UserError, match=r"1 of 2 rollouts could not be scored .*no environment gave.*what was sampled is kept"
    ):
        scored(tmp_path / "two", rows, *rewards, "rl.faults={policy = 'stop', outside = 'stop'}")


def test_a_service_that_is_down_for_all_stops_the_run_whatever_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpipe.rewards.http.PAUSE_S", 0.01)
    sets = ("rl.rewards={remote = 1.0}", f"rl.reward_args={{remote = {{url = 'http://127.0.0.1:{free_port()}'}}}}")
    with pytest.raises(UserError, match=r"2 of 2 rollouts .*'reward_unavailable': 2.*ConnectError"):
        scored(tmp_path, [row("x"), row("y")], *sets, f"rl.reward_timeout_s={DEADLINE_S}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["rl.rewards={math = 1.0}", "rl.reward_args={exact = {}}"], "rl.reward_args.exact"),
        (["rl.rewards={length = 1.0}", "rl.reward_args={length = {most = 3}}"], "rl.reward_args.length.most"),
        (
            ["rl.rewards={code = 1.0}", "rl.reward_args={code = {total_s = 10}}"],
            r"rl.reward_args.code.total_s=10 is not below rl.reward_timeout_s=10: .*set rl.reward_timeout_s above 10",
        ),
        (["rl.rewards={code = 1.0}", "rl.reward_timeout_s=8"], "rl.reward_args.code.total_s=8 is not below"),
    ],
)
def test_preflight_refuses_before_anything_is_written(tmp_path: Path, sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        preflight(config(tmp_path, *sets))
    assert not list(tmp_path.iterdir())
