"""The deployments against a real Prefect server and worker: start, fail, retry, resume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config, read_config
from tests.paths import ROOT
from tests.pipeline import MINI, Folder
from tests.prefect_stand import Stand, running_stand

pytestmark = pytest.mark.e2e
PRESETS = ROOT / "flows" / "presets"


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with running_stand(tmp_path_factory.mktemp("stand")) as stand:
        yield stand


@pytest.mark.parametrize("name", ["post-train", "sft", "rl", "evaluate"])
def test_the_form_says_what_every_field_is(stand: Stand, name: str) -> None:
    deployment = stand.api("GET", f"/deployments/name/{name}/{name}")
    schema = deployment["parameter_openapi_schema"]
    groups = {"parameters": schema, **schema["definitions"]}
    fields = {f"{group}.{field}": told for group, each in groups.items() for field, told in each["properties"].items()}
    assert [field for field, told in fields.items() if not told.get("description")] == []
    assert [group for group in schema["definitions"] if not schema["definitions"][group].get("description")] == []
    assert fields["RlConfig.estimator"]["enum"][0] == "grpo" and fields["RlConfig.on_mismatch"]["enum"] == [
        "warn",
        "stop",
        "fail",
    ]
    assert (fields["RlConfig.group_size"]["minimum"], fields["RlConfig.group_size"]["maximum"]) == (1, 1024)
    choices = [field for field, told in fields.items() if "enum" in told or "enum" in told.get("items", {})]
    assert len(choices) >= 13, choices
    assert [field for field in fields if re.search("password|secret|token$|_key$|credential", field)] == []
    assert deployment["parameters"]["config"]["rl"]["num_iterations"] == 70


@pytest.mark.first
def test_only_what_changes_can_be_asked_for_and_what_is_wrong_says_what_to_do(stand: Stand, tmp_path: Path) -> None:
    changes = {
        "run": "wrong",
        "store": f"file://{tmp_path}/store",
        "tracking.uri": "",
        "data.words.source": f"{tmp_path}/none.jsonl",
    }
    flow_run = stand.start("post-train/post-train", changes=changes)
    state = stand.wait(flow_run)
    assert stand.api("GET", f"/flow_runs/{flow_run}")["name"] == "post-train wrong"
    assert state["type"] == "FAILED"
    assert "none.jsonl" in state["message"] and "Retry starts it again with the same parameters" in state["message"], (
        state
    )
    flow_run = stand.start("post-train/post-train", changes=changes | {"rl.group_size": 0})
    assert "rl.group_size=0: Input should be greater than or equal to 1" in stand.wait(flow_run)["message"]


@pytest.mark.parametrize(
    "name", ["post-train", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("sft", "rl"))]
)
def test_what_rl_would_stumble_over_is_said_before_sft(stand: Stand, tmp_path: Path, name: str) -> None:
    changes = {
        "run": "early",
        "store": f"file://{tmp_path}/store",
        "tracking.uri": "",
        "rl.rewards": {"no_such:reward": 1.0},
    }
    state = stand.wait(stand.start(f"{name}/{name}", changes=changes))
    assert state["type"] == "FAILED" and "'no_such:reward' does not import" in state["message"], state
    assert not Folder(tmp_path, f"file://{tmp_path}/store").open_store().exists("runs/early/run.json")


def test_a_retry_keeps_the_name(stand: Stand, tmp_path: Path) -> None:
    flow_run = stand.start("post-train/post-train", changes={"store": f"file://{tmp_path}/store", "rl.num_prompts": 0})
    assert "rl.num_prompts" in stand.wait(flow_run)["message"]
    first = stand.api("GET", f"/flow_runs/{flow_run}")
    assert re.fullmatch(r"post-train run-\d{4}-\d\d-\d\d-\d{4}-[0-9a-f]{6}", first["name"])
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "as the button Retry does"}
    stand.api("POST", f"/flow_runs/{flow_run}/set_state", {"state": state, "force": True})
    stand.wait_for(flow_run, ("RUNNING", "PENDING"))
    stand.wait(flow_run)
    second = stand.api("GET", f"/flow_runs/{flow_run}")
    kept = ("name", "expected_start_time", "id")
    assert second["run_count"] == 2 and [second[key] for key in kept] == [first[key] for key in kept]


def sft_only_and_then_evaluated(stand: Stand, folder: Folder, config: PipelineConfig) -> None:
    """The deployment sft trains and evaluates a run without RL; the deployment evaluate computes
    what was not evaluated."""
    sets = [
        "run=taught",
        "rl.num_iterations=0",
        "sft.num_steps=4",
        "evaluation.prompts_max=2",
        'evaluation.rewards={"exact" = 1.0}',
    ]
    taught = override_config(config, sets).model_dump(mode="json")
    state = stand.wait(stand.start("sft/sft", config=taught))
    assert state["type"] == "COMPLETED", state
    store = folder.open_store()
    assert all(store.exists(f"runs/taught/{place}/evaluation/manifest.json") for place in ("base", "sft/00000"))
    flow_runs = [
        stand.start("evaluate/evaluate", config=config.model_dump(mode="json"), version=version)
        for version in (1, None)
    ]
    for flow_run, name in zip(flow_runs, ("evaluate night version 1", "evaluate night"), strict=True):
        state = stand.wait(flow_run)
        assert state["type"] == "COMPLETED", state
        assert stand.api("GET", f"/flow_runs/{flow_run}")["name"] == name
    assert store.exists("runs/night/rl/00000/evaluation/manifest.json")  # iteration 0 had none due


@pytest.mark.nightly
def test_a_run_from_the_server_fails_is_retried_and_resumes(stand: Stand, tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    broken = tmp_path / "broken"
    (stand.path / "fragile.py").write_text(
        "import pathlib\ndef reward(prompt, completion):\n"
        f"    if pathlib.Path({str(broken)!r}).exists() and prompt['answer'] not in completion: "
        "raise RuntimeError('the grader is down')\n    return float(len(completion))\n"
    )
    rewards = "rl.rewards={'fragile:reward' = 1.0, format = 0.0}".replace("'", '"')
    config = read_config(
        "tiny",
        ["run=night", f"store={folder.store}", f"tracking.uri=sqlite:///{tmp_path}/m.db", *MINI, rewards],
        PRESETS,
    )
    broken.touch()
    flow_run = stand.start("post-train/post-train", config=config.model_dump(mode="json"))
    state = stand.wait(flow_run)
    assert state["type"] == "FAILED", state
    assert "the grader is down" in state["message"], state
    assert state["message"].count("In the UI, Retry") == 1, state
    broken.unlink()
    stand.retry(flow_run)
    state = stand.wait(flow_run)
    assert state["type"] == "COMPLETED", state
    told = stand.api("POST", "/flow_runs/filter", {"flow_runs": {"name": {"like_": "night-0000"}}})
    assert len({entry["name"] for entry in told}) == 5
    tasks = stand.api("POST", "/task_runs/filter", {"task_runs": {"state": {"name": {"any_": ["Cached"]}}}})
    assert any(entry["name"].startswith("prepare") for entry in tasks)
    scored = stand.api("POST", "/task_runs/filter", {"task_runs": {"tags": {"all_": ["stage:score", "run:night"]}}})
    assert len(scored) >= 5 and all(entry["name"].startswith("score") for entry in scored)
    assert folder.rlpipe("verify", "night", "--store", folder.store)[0] == 0
    sft_only_and_then_evaluated(stand, folder, config)
    # the deployment rl does what the config says: here it trains on the rollouts
    # of that run, and samples nothing
    stored = override_config(
        config, ["run=fed", "rl.rollouts_from=run:night", "rl.num_iterations=2", "sft.num_steps=0"]
    )
    state = stand.wait(stand.start("rl/rl", config=stored.model_dump(mode="json")))
    assert state["type"] == "COMPLETED", state
    assert folder.open_store().exists("runs/fed/rl/00001/iteration.json")
    assert not folder.open_store().exists(
        "runs/fed/rl/00000/rollouts/round-0/shard-001/manifest.json"
    )  # imported as one
    assert folder.rlpipe("verify", "fed", "--store", folder.store)[0] == 0
