"""A run whose policy is worse than the champion is not promoted: on a real MLflow and a real
Prefect server."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.deadlines import until
from tests.pipeline import MINI, Folder
from tests.prefect_stand import call

PLANTED = """
def closed(prompt: dict, completion: str) -> float:
    return float("</answer>" in completion)
"""
GATED = [
    *MINI,
    "sft.num_steps=40",
    "sft.segment_steps=20",
    "sft.decay_steps=40",
    "rl.num_iterations=1",
    "evaluation.prompts_max=24",
    'evaluation.rewards={"planted:closed" = 1.0}',
    "evaluation.gate_against=champion",
    "evaluation.gate_at_most_below={words_pass_at_1 = 0.3}",
]
pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]


def test_a_worse_policy_is_registered_and_not_promoted(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store", prefect_api, tracked=True)
    (tmp_path / "planted.py").write_text(PLANTED)
    said = folder.complete("good", *GATED)
    assert "gate of good@1 against good@0: passed" in said, said[-3000:]  # there was no champion yet
    # a step that destroys what SFT taught
    fork = ["fork", "good", "--at", "sft", "--run", "bad", "--store", folder.store]
    code, said = folder.rlpipe(*fork, "--set", "rl.learning_rate=0.1")
    assert code == 4 and "gate of bad@1 against good@1: FAILED" in said, said[-3000:]
    assert said.count("worse: words/") == 3

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    versions = client.search_model_versions("name = 'rlpipe'")
    assert {version.tags["rlpipe.run"]: version.tags["rlpipe.gate"] for version in versions} == {
        "good": "passed",
        "bad": "failed",
    }
    assert client.get_model_version_by_alias("rlpipe", "champion").tags["rlpipe.run"] == "good"
    what_prefect_has(prefect_api["PREFECT_API_URL"])


def what_prefect_has(api: str) -> None:
    """The state and the artifact of the worse run, and the event of the other, once."""
    (ended,) = call("POST", f"{api}/flow_runs/filter", {"flow_runs": {"name": {"any_": ["post-train bad"]}}})
    assert (ended["state"]["name"], ended["state"]["type"]) == ("GateFailed", "COMPLETED")
    (shown,) = call("POST", f"{api}/artifacts/filter", {"artifacts": {"key": {"any_": ["bad-gate"]}}})
    assert "words_pass_at_1" in shown["data"] and shown["data"].count("worse: words/") == 3
    named = {"filter": {"event": {"name": ["rlpipe.gate.passed"]}}, "limit": 50}
    events = until(lambda: call("POST", f"{api}/events/filter", named)["events"], look_s=0.5)  # written in batches
    assert [event["payload"]["run"] for event in events] == ["good"]
