"""A policy that is worse than the champion is not promoted, and one that was is rolled back by the
event of a later evaluation: on a real MLflow and a real Prefect server with a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.deadlines import until
from tests.pipeline import MINI, Folder
from tests.prefect_stand import Stand, running_stand

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
pytestmark = [pytest.mark.e2e, pytest.mark.spare, pytest.mark.filterwarnings("default")]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with running_stand(tmp_path) as stand:
        yield stand


def test_a_worse_policy_is_not_promoted_and_one_that_was_is_rolled_back(tmp_path: Path, stand: Stand) -> None:
    api = {"PREFECT_API_URL": stand.environment["PREFECT_API_URL"]}
    folder = Folder(tmp_path, f"file://{tmp_path}/store", api, tracked=True)
    (tmp_path / "planted.py").write_text(PLANTED)
    said = folder.complete("good", *GATED)
    assert "gate of good@1 against good@0: passed" in said, said[-3000:]  # there was no champion yet
    # a step that destroys what SFT taught
    fork = ["fork", "good", "--at", "sft", "--run", "bad", "--store", folder.store]
    code, said = folder.rlpipe(*fork, "--set", "rl.learning_rate=0.1")
    assert code == 4 and "gate of bad@1 against good@1: FAILED" in said, said[-3000:]
    assert said.count("worse: words/") == 3
    assert verdicts(tmp_path) == {"good": "passed", "bad": "failed"}
    assert until(lambda: production(tmp_path), look_s=0.5) == "good"
    assert production(tmp_path, "champion") == "good"
    what_prefect_has(stand)

    lax = ["--set", "evaluation.gate_at_most_below={words_pass_at_1 = 1.0}"]
    code, said = folder.rlpipe("resume", "bad", "--store", folder.store, *lax)
    assert code == 0 and "gate of bad@1 against good@1: passed" in said, said[-3000:]
    until(lambda: production(tmp_path) == "bad", "it is not promoted", look_s=0.5)
    assert production(tmp_path, "previous") == "good"
    evaluate = ["evaluate", "bad", "--store", folder.store, "--set", "evaluation.gate_against=run:good"]
    code, said = folder.rlpipe(*evaluate)
    evaluated_s = time.monotonic()
    assert code == 0 and "gate of bad@1 against good@1: FAILED" in said, said[-3000:]
    until(lambda: production(tmp_path) == "good", "it is not rolled back", look_s=0.2)
    print(f"rolled back {time.monotonic() - evaluated_s:.1f} s after the evaluation had ended")
    assert production(tmp_path, "champion") == "good" and verdicts(tmp_path) == {"good": "passed", "bad": "revoked"}
    ended = {run["name"]: run["state"]["name"] for run in until(lambda: of_events(stand, 3), look_s=0.5)}
    assert ended == {
        "promote good version 1": "Completed",
        "promote bad version 1": "Completed",
        "rollback bad version 1": "RolledBack",
    }


def production(path: Path, alias: str = "production") -> str:
    """The run whose policy has the alias; empty where none has."""
    client = MlflowClient(f"sqlite:///{path}/mlflow.db")
    aliases = client.get_registered_model("rlpipe").aliases
    return client.get_model_version("rlpipe", str(aliases[alias])).tags["rlpipe.run"] if alias in aliases else ""


def verdicts(path: Path) -> dict[str, str]:
    """The verdict on the policy of each run, as MLflow has it."""
    versions = MlflowClient(f"sqlite:///{path}/mlflow.db").search_model_versions("name = 'rlpipe'")
    return {version.tags["rlpipe.run"]: version.tags["rlpipe.gate"] for version in versions}


def of_events(stand: Stand, number: int) -> list[Any]:
    """The flow runs that automations started, once so many have ended."""
    runs = [run for run in stand.api("POST", "/flow_runs/filter", {}) if run["created_by"]]
    started = [run for run in runs if run["created_by"]["type"] == "AUTOMATION"]
    return started if len(started) == number and all(run["state"]["type"] == "COMPLETED" for run in started) else []


def what_prefect_has(stand: Stand) -> None:
    """The state and the artifact of the worse run, and the event of the other, once."""
    (ended,) = stand.api("POST", "/flow_runs/filter", {"flow_runs": {"name": {"any_": ["post-train bad"]}}})
    assert (ended["state"]["name"], ended["state"]["type"]) == ("GateFailed", "COMPLETED")
    (shown,) = stand.api("POST", "/artifacts/filter", {"artifacts": {"key": {"any_": ["bad-gate"]}}})
    assert "words_pass_at_1" in shown["data"] and shown["data"].count("worse: words/") == 3
    named = {"filter": {"event": {"name": ["rlpipe.gate.passed"]}}, "limit": 50}
    events = until(lambda: stand.api("POST", "/events/filter", named)["events"], look_s=0.5)  # written in batches
    assert [event["payload"]["run"] for event in events] == ["good"]
