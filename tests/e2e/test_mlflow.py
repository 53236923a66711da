"""MLflow as a person has it: a server, two runs that differ in one setting,
and the page that compares them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from playwright.sync_api import expect

from rlpipe.processes.launch import answers, free_port
from tests.browser import CHROMIUM, browser
from tests.deadlines import until
from tests.pipeline import BIN, MINI, Folder, kill_group

SHORT = [
    *MINI,
    "sft.num_steps=4",
    "sft.decay_steps=4",
    "rl.num_iterations=2",
    "evaluation.every=0",
    "evaluation.prompts_max=4",
]
RATES = {"a": "0.0003", "b": "0.001"}
pytestmark = pytest.mark.e2e


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of an MLflow server."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1], "--workers", "1",
               "--backend-store-uri", f"sqlite:///{tmp_path}/server.db",
               "--artifacts-destination", str(tmp_path / "artifacts")]  # fmt: skip
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True, text=True)
    try:
        until(lambda: answers(f"{url}/health"), (tmp_path / "server.log").read_text, running=process, look_s=0.2)
        yield url
    finally:
        kill_group(process)


def mlflow_runs(server: str, phase: str) -> dict[str, Any]:
    """Pipeline run -> its MLflow run of a phase."""
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("rlpipe")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.`rlpipe.phase` = '{phase}'")
    return {entity.data.tags["rlpipe.run"]: entity for entity in runs}


@pytest.mark.filterwarnings("default")
@pytest.mark.nightly
def test_two_runs_are_compared_in_the_browser(server: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    settings = {run: [*SHORT, f"tracking.uri={server}", f"rl.learning_rate={rate}"] for run, rate in RATES.items()}
    a_run_that_is_killed_says_so(folder, server, settings["a"])
    for run in RATES:
        folder.complete(run, *settings[run])
    what_mlflow_has_is_in_the_store(folder, server)
    each_policy_is_registered(server)
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    look_at_the_comparison(server)


def a_run_that_is_killed_says_so(folder: Folder, server: str, sets: list[str]) -> None:
    """Between the evaluation before RL and the first iteration: SIGTERM, which is
    how Prefect cancels a flow run."""
    process, expected = folder.start(*folder.run_arguments("a", *sets)), ["KILLED", "FINISHED", "KILLED"]
    try:
        folder.wait_for("a", "sft/00000/evaluation/manifest.json", process)
        os.kill(process.pid, signal.SIGTERM)

        def statuses() -> list[str]:
            return [mlflow_runs(server, phase)["a"].info.status for phase in ("post-train", "sft", "rl")]

        until(lambda: statuses() == expected, statuses, look_s=0.2)
    finally:
        kill_group(process)  # Prefect may take a minute to leave


def what_mlflow_has_is_in_the_store(folder: Folder, server: str) -> None:
    client = MlflowClient(server)
    for phase in ("post-train", "rl"):
        for run, entity in mlflow_runs(server, phase).items():
            assert entity.info.status == "FINISHED"
            assert entity.data.params["rl.learning_rate"] == RATES[run]
            history = client.get_metric_history(entity.info.run_id, "evaluation/words_greedy")
            stored = [(version, folder.evaluation(run, version)["words_greedy"]) for version in (0, 2)]
            assert sorted((point.step, point.value) for point in history) == stored
            assert entity.data.metrics["before_rl/words_greedy"] == stored[0][1]
            assert len(client.get_metric_history(entity.info.run_id, "rollout/reward_mean")) == 2


def each_policy_is_registered(server: str) -> None:
    """A server refuses a folder of this machine as a source: the tag has it."""
    versions = MlflowClient(server).search_model_versions("name = 'rlpipe'")
    assert sorted(version.tags["rlpipe.run"] for version in versions) == ["a", "b"]
    for version in versions:
        assert (Path(version.tags["rlpipe.policy"]) / "config.json").is_file()


def look_at_the_comparison(server: str) -> None:
    runs = mlflow_runs(server, "post-train")
    names = json.dumps([runs[run].info.run_id for run in RATES])
    experiments = json.dumps([runs["a"].info.experiment_id])
    with browser(server) as mlflow:
        page = mlflow.page
        page.set_viewport_size({"width": 1280, "height": 1300})
        mlflow.open(f"/#/compare-runs?runs={names}&experiments={experiments}")
        expect(page.get_by_text("rl.learning_rate", exact=True).first).to_be_visible()
        mlflow.button("Close").click()  # the assistant
        mlflow.button("Run details").click()
        page.get_by_role("switch", name="Parameters - Show diff only").click()
        for text in (*RATES.values(), "before_rl/words_greedy", "evaluation/words_greedy", "rollout/reward_mean"):
            expect(page.get_by_text(text, exact=True).last).to_be_visible()
        expect(page.get_by_text("rl.group_size", exact=True)).to_have_count(0)  # it is equal
        page.get_by_role("switch", name="Metrics - Show diff only").click()
        mlflow.screenshot("mlflow-compare")
