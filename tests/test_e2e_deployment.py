"""The deployments against a real Prefect server and worker: start, fail, retry, resume."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlpipe.config_source import override_config, read_config
from tests.pipeline import MINI, Folder
from tests.prefect_stand import Stand, running_stand

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parent.parent
PRESETS = ROOT / "flows" / "presets"


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with running_stand(tmp_path_factory.mktemp("stand")) as stand:
        yield stand


def test_the_form_is_filled_with_the_tiny_preset() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    forms = {entry["name"]: entry for entry in deployments if not entry["name"].startswith("serve-")}
    assert {entry["name"] for entry in deployments} - set(forms) == {"serve-trainer", "serve-engines"}
    assert set(forms) == {"post-train", "sft", "rl", "evaluate"}
    for entry in forms.values():
        assert entry["parameters"]["config"] == tomllib.loads((PRESETS / "tiny.toml").read_text())


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
    assert "none.jsonl" in state["message"] and "Retry starts it again with the same parameters" in state["message"], state
    flow_run = stand.start("post-train/post-train", changes=changes | {"rl.group_size": 0})
    assert "rl.group_size=0: Input should be greater than or equal to 1" in stand.wait(flow_run)["message"]


def test_a_run_from_the_server_fails_is_retried_and_resumes(stand: Stand, tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    broken = tmp_path / "broken"
    (stand.path / "fragile.py").write_text(
        "import pathlib\ndef reward(prompt, completion):\n"
        f"    if pathlib.Path({str(broken)!r}).exists(): raise RuntimeError('the grader is down')\n    return float(len(completion))\n"
    )
    rewards = "rl.rewards={'fragile:reward' = 1.0, format = 0.0}".replace("'", '"')
    config = read_config(
        "tiny", ["run=night", f"store={folder.store}", f"tracking.uri=sqlite:///{tmp_path}/m.db", *MINI, rewards], PRESETS
    )
    broken.touch()
    flow_run = stand.start("post-train/post-train", config=config.model_dump(mode="json"))
    state = stand.wait(flow_run)
    assert state["type"] == "FAILED", state
    assert "the grader is down" in state["message"], state
    assert state["message"].count("In the UI, Retry") == 1, state
    broken.unlink()
    stand.prefect("flow-run", "retry", flow_run)
    time.sleep(3)
    state = stand.wait(flow_run)
    assert state["type"] == "COMPLETED", state
    told = stand.api("POST", "/flow_runs/filter", {"flow_runs": {"name": {"like_": "night-0000"}}})
    assert len({entry["name"] for entry in told}) == 5
    tasks = stand.api("POST", "/task_runs/filter", {"task_runs": {"state": {"name": {"any_": ["Cached"]}}}})
    assert any(entry["name"].startswith("prepare") for entry in tasks)
    assert folder.rlpipe("verify", "night", "--store", folder.store)[0] == 0
    # the deployment rl does what the config says: here it trains on the rollouts of that run, and samples nothing
    stored = override_config(config, ["run=fed", "rl.rollouts_from=run:night", "rl.num_iterations=2", "sft.num_steps=0"])
    state = stand.wait(stand.start("rl/rl", config=stored.model_dump(mode="json")))
    assert state["type"] == "COMPLETED", state
    assert folder.open_store().exists("runs/fed/rl/00001/iteration.json")
    assert not folder.open_store().exists("runs/fed/rl/00000/rollouts/round-0/shard-001/manifest.json")  # imported as one
    assert folder.rlpipe("verify", "fed", "--store", folder.store)[0] == 0
