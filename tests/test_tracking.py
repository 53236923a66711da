"""Tracking against a real MLflow store: each point once, nothing lost by an outage, never in the way."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlpipe.config_source import read_config
from rlpipe.launch import free_port
from rlpipe.report import Point
from rlpipe.tracking import Tracker

PRESETS = Path(__file__).parent.parent / "flows" / "presets"


def points(phase: str, unit: int) -> list[Point]:
    return [Point(unit, 1_700_000_000_000 + unit, {"rollout/reward_mean": unit / 10, "train/loss": 1.0})]


def tracker(tmp_path: Path, uri: str | None = None) -> Tracker:
    config = read_config("tiny", ["run=a", f"tracking.uri={uri or f'sqlite:///{tmp_path}/mlflow.db'}"], PRESETS)
    return Tracker(config, "file:///store", points)


def steps(tmp_path: Path, phase: str = "rl") -> list[int]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("rlpipe")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.`rlpipe.phase` = '{phase}'")
    assert len(runs) == 1
    return sorted(metric.step for metric in client.get_metric_history(runs[0].info.run_id, "rollout/reward_mean"))


@pytest.mark.filterwarnings("default")
def test_a_resume_sends_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    first = tracker(tmp_path)
    first.committed("rl", 0)
    first.committed("rl", 1)
    first.committed("rl", 3)
    first.close()
    assert steps(tmp_path) == [0, 1, 2]
    second = tracker(tmp_path)
    second.committed("rl", 5)  # two iterations were committed while MLflow was not told
    second.committed("rl", 6)
    second.finish("file:///store/runs/a/rl/00005/policy/x", [])
    second.close()
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    from mlflow import MlflowClient

    versions = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_model_versions("name = 'rlpipe-a'")
    assert [version.source for version in versions] == ["file:///store/runs/a/rl/00005/policy/x"]


@pytest.mark.filterwarnings("default")
def test_an_unreachable_server_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = tracker(tmp_path, f"http://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.WARNING, "rlpipe.tracking"):
        away.committed("rl", 0)
        away.committed("rl", 1)
        away.committed("rl", 2)
        away.close()
    assert [record.name for record in caplog.records if "cannot be reached" in record.message] == ["rlpipe.tracking"]
