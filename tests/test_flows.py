"""What the flows add by themselves: changed fields, advice, the automations."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent

from flows.advice import AGAIN, with_advice
from flows.automations import BLOCK, FILE
from rlpipe.config_source import change_config, read_config
from rlpipe.rewards.process import RewardLost
from rlpipe.store.lease import RunHeld
from rlpipe.trainer.client import GangLost
from rlpipe.types import StepRefused, StoreError, UserError

ROOT = Path(__file__).parent.parent


def test_changes_are_fields_by_name() -> None:
    config = read_config("tiny", [], ROOT / "flows" / "presets")
    changed = change_config(config, {"run": "x", "rl.group_size": 16, "data.words.rows_max": 7, "stop.reward_plateau": 3})
    assert (changed.run, changed.rl.group_size, changed.stop.reward_plateau) == ("x", 16, 3)
    assert [data.rows_max for data in changed.data if data.name == "words"] == [7, 7]
    assert change_config(config, {}) == config
    with pytest.raises(UserError, match=r"rl\.no_such=1: .*no such field"):
        change_config(config, {"rl.no_such": 1})
    with pytest.raises(UserError, match=r"changes: data\.nothing\.rows_max = 1: no data set named 'nothing'"):
        change_config(config, {"data.nothing.rows_max": 1})


@pytest.mark.parametrize(
    "error", [StoreError("x is missing."), GangLost("x"), RewardLost("x"), OSError(5, "x"), ConnectionResetError("x")]
)
def test_an_error_is_told_what_to_do_once(error: Exception) -> None:
    told = with_advice(error)
    assert str(told).startswith(str(error).rstrip(".")) and str(told).endswith(AGAIN)
    assert isinstance(told, (StoreError, RuntimeError, OSError))
    assert with_advice(told) is told


@pytest.mark.parametrize("error", [StepRefused("x"), RunHeld("x"), AssertionError("x")])
def test_what_says_it_itself_or_is_our_own_fault_is_left_alone(error: Exception) -> None:
    assert with_advice(error) is error


def test_the_automations_are_what_this_prefect_understands_and_name_deployments_that_exist() -> None:
    shipped = yaml.safe_load(FILE.read_text())["automations"]
    assert len({entry["name"] for entry in shipped}) == len(shipped) == 4
    deployments = {entry["name"] for entry in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    beats = {entry["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
             for entry in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}  # fmt: skip
    assert beats == {"30"}
    for entry in shipped:
        for action in entry["actions"]:
            if action.get("block_document_id") == BLOCK:
                action["block_document_id"] = "00000000-0000-0000-0000-000000000000"
        AutomationCore.model_validate(entry)
        named = entry["trigger"].get("match_related", {}).get("prefect.resource.name", [])
        assert set(named) <= deployments
        assert bool(named) == (entry["name"] != "rlpipe-dead-flow-runs")


@pytest.mark.parametrize(("starts", "retried"), [("0", True), ("9", True), ("10", False), ("11", False)])
def test_a_crashed_flow_run_is_retried_up_to_ten_starts(starts: str, retried: bool) -> None:
    entry = next(each for each in yaml.safe_load(FILE.read_text())["automations"] if each["name"] == "rlpipe-retry-crashed")
    crashed = ReceivedEvent.model_validate({
        "occurred": "2026-01-01T00:00:00Z", "id": "00000000-0000-0000-0000-000000000001", "event": "prefect.flow-run.Crashed",
        "resource": {"prefect.resource.id": "prefect.flow-run.x", "prefect.run-count": starts},
        "related": [{"prefect.resource.id": "prefect.deployment.x", "prefect.resource.role": "deployment", "prefect.resource.name": "rl"}],
    })  # fmt: skip
    assert EventTrigger.model_validate(entry["trigger"]).covers(crashed) == retried
