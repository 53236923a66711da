"""What the flows add by themselves: changed fields, advice, the automations."""

from __future__ import annotations

import contextlib
import html
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from prefect.events.schemas.automations import AutomationCore
from prefect.server.events.actions import RunDeployment
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.schema_tools.hydration import HydrationContext, hydrate

from flows import PRESETS, cli, cli_start
from flows.cli_start import look_commands
from flows.early_server import EarlyServer
from flows.events import Event, Facts, tell
from flows.post_train import post_train
from flows.rl import rl
from flows.server import AUTOMATIONS, BLOCK
from flows.session import AGAIN, with_advice
from flows.sft import sft
from flows.ui import TEXT_MAX, _literal
from rlpipe import __version__
from rlpipe.base.errors import StepRefused, StoreError, UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import change_config, read_config
from rlpipe.rewards.process import RewardLost
from rlpipe.store import patience
from rlpipe.store.commits import CommittedLate
from rlpipe.store.lease import RunHeld
from rlpipe.store.opening import OtherSettings, create_or_continue
from rlpipe.trainer.client import TrainerLost
from tests.paths import ROOT

TINY = read_config("tiny", [], ROOT / "flows" / "presets")


@pytest.mark.slow
@pytest.mark.parametrize("url", ["http://127.0.0.1:1/api", "nonsense", "http://127.0.0.1:1", "ftp://127.0.0.1/api"])
def test_automations_without_a_server_that_answers_end_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_S", 0.1)
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(UserError, match="no Prefect server answers there") as told,
    ):
        cli.automations()
    assert "\n" not in str(told.value)


def test_changes_are_fields_by_name() -> None:
    config = read_config("tiny", [], ROOT / "flows" / "presets")
    changed = change_config(
        config, {"run": "x", "rl.group_size": 16, "data.words.rows_max": 7, "stop.reward_plateau": 3}
    )
    assert (changed.run, changed.rl.group_size, changed.stop.reward_plateau) == ("x", 16, 3)
    assert [data.rows_max for data in changed.data if data.name == "words"] == [7, 7]
    assert change_config(config, {}) == config
    with pytest.raises(UserError, match=r"rl\.no_such=1: .*no such field"):
        change_config(config, {"rl.no_such": 1})
    with pytest.raises(UserError, match=r"changes: data\.nothing\.rows_max = 1: no data set named 'nothing'"):
        change_config(config, {"data.nothing.rows_max": 1})


def test_a_preset_among_the_changes_is_the_base(tmp_path: Path) -> None:
    presets = ROOT / "flows" / "presets"
    kept = {"store": f"file://{tmp_path}", "tracking.uri": "http://mlflow:5000"}
    form = change_config(TINY, {"run": "monday", "rl.group_size": 32, **kept})
    changed = change_config(form, {"rl.num_iterations": 3, "preset": "smollm2"}, presets)
    command = read_config(
        "smollm2", ["run=monday", *(f"{key}={value}" for key, value in kept.items()), "rl.num_iterations=3"], presets
    )
    assert changed == command and changed.rl.group_size != 32 and changed.model.path
    for wrong in ("smollm", 3, "none.toml", None):
        with pytest.raises(UserError, match=r"neither a preset|no such file"):
            change_config(form, {"preset": wrong}, presets)
    with pytest.raises(UserError, match=r"changes: preset|preset='smollm2': no such field"):
        change_config(form, {"preset": "smollm2"})  # of a stored run there is no other base


@pytest.mark.parametrize(
    "error",
    [StoreError("x is missing."), TrainerLost("x"), RewardLost("x"), OSError(5, "x"), ConnectionResetError("x")],
)
def test_an_error_is_told_what_to_do_once(error: Exception) -> None:
    advised = with_advice(error, TINY)
    assert str(advised).startswith(str(error).rstrip(".")) and str(advised).endswith(AGAIN)
    assert isinstance(advised, (StoreError, RuntimeError, OSError))
    assert with_advice(advised, TINY) is advised


@pytest.mark.parametrize("error", [StepRefused("x"), RunHeld("x"), OtherSettings("x"), AssertionError("x")])
def test_what_says_it_itself_or_is_our_own_fault_is_left_alone(error: Exception) -> None:
    assert with_advice(error, TINY) is error


def test_a_users_error_is_told_how_the_run_can_have_other_settings(tmp_path: Path) -> None:
    config = change_config(TINY, {"run": "a", "store": f"file://{tmp_path}"})
    assert str(with_advice(UserError("x"), config)).endswith("in the UI with `changes`")  # there is no such run
    create_or_continue(config)
    advised = with_advice(UserError("x."), config)
    assert "start a run of another name (--run): a has nothing to fork from" in str(advised)
    assert with_advice(advised, config) is advised


@pytest.mark.slow
@pytest.mark.parametrize("flow", [post_train, sft, rl])
async def test_every_phase_looks_at_all_of_a_run_before_it_begins(flow: Any, tmp_path: Path) -> None:
    small = {f"data.{name}.rows_max": 40 for name in ("short_words", "all_words", "words")}
    asked = small | {
        "run": "a",
        "store": f"file://{tmp_path}/store",
        "tracking.uri": "",
        "rl.rewards": {"no_such:reward": 1.0},
    }
    with pytest.raises(UserError, match="'no_such:reward' does not import"):
        await flow.fn(asked, config=TINY)
    assert not (tmp_path / "store" / "runs" / "a" / "run.json").exists()


def test_the_automations_are_what_this_prefect_understands_and_name_deployments_that_exist() -> None:
    shipped = yaml.safe_load(AUTOMATIONS.read_text())["automations"]
    assert len({entry["name"] for entry in shipped}) == len(shipped) == 5
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
        assert bool(named) == (entry["name"] not in ("rlpipe-dead-flow-runs", "rlpipe-reward-fell"))


def test_the_form_is_filled_with_the_tiny_preset() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    forms = {entry["name"]: entry for entry in deployments if "config" in entry.get("parameters", {})}
    others = {"serve-trainer", "serve-engines", "promote", "rollback"}
    assert {entry["name"] for entry in deployments} - set(forms) == others
    assert set(forms) == {"post-train", "sft", "rl", "evaluate"}
    for entry in forms.values():
        assert entry["parameters"]["config"] == tomllib.loads((ROOT / "flows/presets/tiny.toml").read_text())


def test_deployments_have_the_version_of_rlpipe_and_tags_by_what_they_are_for() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert {entry["version"] for entry in deployments} == {__version__}
    assert {entry["name"]: " ".join(entry["tags"]) for entry in deployments} == {
        **dict.fromkeys(("post-train", "sft", "rl"), "rlpipe pipeline"),
        "evaluate": "rlpipe evaluation",
        **dict.fromkeys(("promote", "rollback"), "rlpipe promotion"),
        **dict.fromkeys(("serve-trainer", "serve-engines"), "rlpipe service"),
    }


@pytest.mark.parametrize(("name", "event"), [("promote", "gate.passed"), ("rollback", "gate.failed")])
def test_an_event_of_a_gate_starts_a_deployment_with_what_it_says(name: str, event: Event) -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (trigger,) = next(entry["triggers"] for entry in deployments if entry["name"] == name)
    facts: Facts = {"policy": "/store/runs/a/x", "weight_version": 12, "store": "file:///store"}
    with mock.patch("flows.events.emit_event") as emitted:
        tell("a", event, "it is so", facts)
    received = ReceivedEvent.model_validate(
        {"occurred": "2026-01-01T00:00:00Z", "id": "00000000-0000-0000-0000-000000000001", **emitted.call_args.kwargs}
    )
    assert EventTrigger.model_validate(trigger).covers(received)
    parameters = trigger["parameters"]
    RunDeployment._upgrade_v1_templates(parameters)
    context = HydrationContext(render_jinja=True, jinja_context={"event": received})
    assert hydrate(parameters, context) == {"run": "a", "version": 12, "store": "file:///store"}


@pytest.mark.parametrize(("starts", "retried"), [("0", True), ("9", True), ("10", False), ("11", False)])
def test_a_crashed_flow_run_is_retried_up_to_ten_starts(starts: str, retried: bool) -> None:
    entry = next(
        each
        for each in yaml.safe_load(AUTOMATIONS.read_text())["automations"]
        if each["name"] == "rlpipe-retry-crashed"
    )
    crashed = ReceivedEvent.model_validate({
        "occurred": "2026-01-01T00:00:00Z", "id": "00000000-0000-0000-0000-000000000001",
        "event": "prefect.flow-run.Crashed",
        "resource": {"prefect.resource.id": "prefect.flow-run.x", "prefect.run-count": starts},
        "related": [{"prefect.resource.id": "prefect.deployment.x", "prefect.resource.role": "deployment",
                     "prefect.resource.name": "rl"}],
    })  # fmt: skip
    assert EventTrigger.model_validate(entry["trigger"]).covers(crashed) == retried


@given(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), max_size=60))
def test_a_text_in_markdown_is_shown_as_it_is(text: str) -> None:
    assert html.unescape(MarkdownIt("commonmark").renderInline(_literal(text))) == text


def test_a_text_in_a_table_of_markdown_stays_in_its_cell() -> None:
    text = "<answer>a|b\n# c\\|`d`\0</answer>"
    table = MarkdownIt("commonmark").enable("table").render(f"| completion |\n|---|\n| {_literal(text)} |")
    assert "<td>&lt;answer&gt;a|b ⏎ # c\\|`d`␀&lt;/answer&gt;</td>" in table
    assert len(_literal("x" * 10 * TEXT_MAX)) < TEXT_MAX + 20


def test_a_run_ends_with_commands_that_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config("tiny", ["run=a", "store=./my store"], ROOT / "flows" / "presets")
    monkeypatch.setattr(sys, "argv", [".venv/bin/rlpipe", "run"])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    show, mlflow = map(shlex.split, look_commands(config, None))
    assert show == [".venv/bin/rlpipe", "show", "a", "--store", "./my store"]
    assert mlflow == [".venv/bin/mlflow", "ui", "--backend-store-uri", "sqlite:///mlflow.db"]
    monkeypatch.setattr(sys, "argv", ["/x/flows/cli.py"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@mlflow.example.com")
    show, page = look_commands(config, None)
    assert Path(shlex.split(show)[0]).exists()
    assert page == "https://mlflow.example.com"


def test_a_policy_that_was_committed_late_with_the_same_bits_begins_the_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[Exception | dict[str, str]] = [CommittedLate("a policy was committed late"), {"stopped": "enough"}]

    async def post_train(config: PipelineConfig) -> dict[str, str]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("flows.post_train.post_train", post_train)
    monkeypatch.setattr("flows.terminal.log_to", lambda folder: None)
    monkeypatch.setattr(cli_start, "running_server", lambda *_: contextlib.nullcontext("http://127.0.0.1:1/api"))
    config = read_config("tiny", ["run=a", f"store=file://{tmp_path}/store"], PRESETS)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    with pytest.raises(typer.Exit) as ended:
        cli_start.run_to_end(config, EarlyServer(config))
    assert (ended.value.exit_code, outcomes) == (cli_start.STOPPED, [])
    assert capsys.readouterr().err.count("rlpipe: a policy was committed late\n") == 1
