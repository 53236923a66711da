"""Tracking against a real MLflow store: each point once, nothing lost
by an outage, never in the way."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.data import get_source

from rlpipe.base.errors import RunWaits, UserError
from rlpipe.config.pipeline import identity
from rlpipe.config.sections import DataConfig
from rlpipe.config.source import read_config
from rlpipe.loop.session import open_session
from rlpipe.processes.launch import free_port
from rlpipe.report import tracking
from rlpipe.report.curves import BEFORE_RL, DataSet, Point
from rlpipe.report.tracking import Tracker, Verdict, status_of
from rlpipe.store.backend import open_store
from rlpipe.store.code_version import code_version
from rlpipe.store.run import Run
from tests.paths import PRESETS

POLICY = "/store/runs/a/rl/00005/policy/x"
pytestmark = pytest.mark.filterwarnings("default")


def points(source: str, unit: int) -> list[Point]:
    """What rlpipe/report/curves.py gives: an iteration's evaluation is that
    of the weight version it made."""
    time_ms = 1_700_000_000_000 + unit
    if source == BEFORE_RL:
        return [Point(0, time_ms, {"evaluation/words_greedy": 0.25, "before_rl/words_greedy": 0.25})]
    if source == "sft":
        return [Point(unit, time_ms, {"sft/loss": 2.0})]
    metrics = {"rollout/reward_mean": unit / 10, "train/loss": 1.0}
    return [Point(unit, time_ms, metrics), Point(unit + 1, time_ms, {"evaluation/words_greedy": 0.5 + unit / 10})]


def run_of(tmp_path: Path, *sets: str, run: str = "a", parent: Run | None = None, **forked: Any) -> Run:
    where = [f"run={run}", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"store=file://{tmp_path}/store"]
    config = read_config("tiny", [*where, *sets], PRESETS)
    return Run(open_store(config.store), config, parent, **forked)


def tracker(tmp_path: Path, *sets: str) -> Tracker:
    return Tracker(run_of(tmp_path, *sets), points)


def client(tmp_path: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


def mlflow_runs(tmp_path: Path, run: str = "a", project: str = "rlpipe") -> dict[str, Any]:
    """Phase -> MLflow run; each phase has one."""
    experiment = client(tmp_path).get_experiment_by_name(project)
    assert experiment is not None
    runs = client(tmp_path).search_runs([experiment.experiment_id], f"tags.`rlpipe.run` = '{run}'")
    phases = {entity.data.tags["rlpipe.phase"]: entity for entity in runs}
    assert len(phases) == len(runs)
    return phases


def history(tmp_path: Path, phase: str, metric: str) -> list[tuple[int, float]]:
    run_id = mlflow_runs(tmp_path)[phase].info.run_id
    return sorted((point.step, point.value) for point in client(tmp_path).get_metric_history(run_id, metric))


def statuses(tmp_path: Path) -> dict[str, str]:
    return {phase: entity.info.status for phase, entity in mlflow_runs(tmp_path).items()}


@pytest.mark.slow
def test_a_resume_sends_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    first = tracker(tmp_path)
    for committed in (0, 1, 3):
        first.committed("rl", committed)
    first.close()
    assert [step for step, _ in history(tmp_path, "rl", "rollout/reward_mean")] == [0, 1, 2]
    second = tracker(tmp_path)
    second.committed("rl", 5)  # two iterations were committed while MLflow was not told
    second.committed("rl", 6)
    second.close()
    assert [step for step, _ in history(tmp_path, "rl", "rollout/reward_mean")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_process_that_died_between_two_sends_leaves_each_point_once(tmp_path: Path) -> None:
    """The evaluation before RL, one iteration, and then any of the ways to die: the
    tag is behind what MLflow has."""
    first = tracker(tmp_path)
    first.begin("rl")
    first.committed(BEFORE_RL, 1)
    first.committed("rl", 2)
    first.close()
    run_id = mlflow_runs(tmp_path)["rl"].info.run_id
    client(tmp_path).delete_tag(run_id, f"rlpipe.sent_{BEFORE_RL}")
    client(tmp_path).set_tag(run_id, "rlpipe.sent_rl", "1")
    second = tracker(tmp_path)
    second.begin("rl")
    second.committed(BEFORE_RL, 1)
    second.committed("rl", 3)
    second.close()
    for phase in ("rl", "post-train"):
        assert history(tmp_path, phase, "rollout/reward_mean") == [(0, 0.0), (1, 0.1), (2, 0.2)], phase
        assert history(tmp_path, phase, "evaluation/words_greedy") == [(0, 0.25), (1, 0.5), (2, 0.6), (3, 0.7)], phase
        assert history(tmp_path, phase, "before_rl/words_greedy") == [(0, 0.25)], phase
    assert history(tmp_path, "post-train", "train/loss") == []


@pytest.mark.slow
def test_every_run_has_all_parameters_and_says_where_it_comes_from(tmp_path: Path) -> None:
    parent = run_of(tmp_path)
    long = "[" + ", ".join(f"'{word:04d}'" for word in range(2000)) + "]"
    changes = (
        f"model.chat_template_args={{tools = {long}}}",
        "rl.learning_rate=1e-5",
        "tracking.view_url=https://view.example.com/rl/",
    )
    forked = Tracker(run_of(tmp_path, *changes, run="b", parent=parent, fork_at=3), points)
    forked.begin("sft")
    forked.committed("sft", 1)
    forked.begin("rl")
    forked.close()
    runs = mlflow_runs(tmp_path, "b")
    assert set(runs) == {"post-train", "sft", "rl"}
    for entity in runs.values():
        params, tags = entity.data.params, entity.data.tags
        assert set(params) == set(identity(forked.run.config))
        assert params["rl.learning_rate"] == "1e-05"
        assert len(params["model.chat_template_args"]) == 6000
        assert tags["rlpipe.parent"] == "a at 3"
        assert tags["rlpipe.view"] == "https://view.example.com/rl/runs/b"
        assert tags["rlpipe.code_version"] == code_version()
        assert tags["mlflow.source.git.commit"] == ("" if "-" in code_version() else code_version())
    assert runs["rl"].data.tags["mlflow.parentRunId"] == runs["post-train"].info.run_id


def test_params_that_a_dead_process_did_not_send_are_sent_later(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    experiment = client(tmp_path).create_experiment("rlpipe")
    tags = {"rlpipe.run": "a", "rlpipe.store": run.store.url, "rlpipe.phase": "post-train"}
    client(tmp_path).create_run(experiment, tags=tags)  # and there it died
    resumed = tracker(tmp_path)
    resumed.begin("rl")
    resumed.close()
    assert set(mlflow_runs(tmp_path)["post-train"].data.params) == set(identity(run.config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status"),
    [(UserError("no data"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (asyncio.CancelledError(), "KILLED")],
)
def test_how_a_run_ends_is_its_status_and_a_continued_one_is_running(
    tmp_path: Path, error: BaseException, status: str
) -> None:
    ended = tracker(tmp_path)
    ended.begin("sft")
    ended.committed("sft", 1)
    ended.begin("rl")
    ended.status = status_of(error)
    ended.close()
    assert statuses(tmp_path) == {"post-train": status, "sft": "FINISHED", "rl": status}
    continued = tracker(tmp_path)
    continued.begin("rl")
    continued._queue.put(None)  # a kill -9: nobody says how it ended
    assert continued._thread is not None
    continued._thread.join()
    assert statuses(tmp_path) == {"post-train": "RUNNING", "sft": "FINISHED", "rl": "RUNNING"}
    complete = tracker(tmp_path)
    complete.begin("rl")
    complete.close()
    assert statuses(tmp_path) == {"post-train": "FINISHED", "sft": "FINISHED", "rl": "FINISHED"}


def test_an_evaluation_leaves_a_run_that_another_process_began_as_it_is(tmp_path: Path) -> None:
    begun = tracker(tmp_path)
    begun.begin("rl")
    begun._queue.put(None)  # a kill -9, or it still runs
    assert begun._thread is not None
    begun._thread.join()
    evaluating = tracker(tmp_path)
    evaluating.evaluated(0)
    evaluating.close()
    assert statuses(tmp_path) == {"post-train": "RUNNING", "rl": "RUNNING"}


def test_a_run_that_a_budget_stopped_is_finished_and_says_why_until_it_goes_on(tmp_path: Path) -> None:
    stopped = tracker(tmp_path)
    stopped.begin("rl")
    stopped.stopped = "budget.wall_clock_h=1 is spent"
    stopped.close()
    assert statuses(tmp_path) == {"post-train": "FINISHED", "rl": "FINISHED"}
    assert mlflow_runs(tmp_path)["post-train"].data.tags["rlpipe.stopped"] == "budget.wall_clock_h=1 is spent"
    continued = tracker(tmp_path)
    continued.begin("rl")
    continued.close()
    assert "rlpipe.stopped" not in mlflow_runs(tmp_path)["post-train"].data.tags


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status", "phase"),
    [(RunWaits("approval.rl"), "SCHEDULED", "FINISHED"), (OSError("disk"), "FAILED", "FAILED")],
)
async def test_the_session_sees_how_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, phase: str
) -> None:
    async def work() -> None:
        async with open_session(run_of(tmp_path).config) as session:
            session.tracker.begin("sft")
            raise error

    monkeypatch.chdir(tmp_path)
    with pytest.raises(type(error)):
        await work()
    assert statuses(tmp_path) == {"post-train": status, "sft": phase}


@pytest.mark.slow
def test_a_project_has_one_registered_model_with_each_policy_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow puts files
    curves = tmp_path / "curves.png"
    curves.write_bytes(b"png")
    registered: list[str] = []
    for run, url in (("a", POLICY), ("a", POLICY), ("b", "s3://bucket/b")):
        publisher = Tracker(run_of(tmp_path, "tracking.project=words", run=run), points)
        lineage = {"rlpipe.version": "6", "rlpipe.policy_sha256": "5f2b"}
        publisher.publish(url, 6, {"words_greedy": 0.75}, curves, lineage, partial(registered.append, url))
        publisher.close()
    registry = client(tmp_path)
    assert registered == [POLICY, "s3://bucket/b"]
    assert [model.name for model in registry.search_registered_models()] == ["words"]
    second, first = registry.search_model_versions("name = 'words'")  # the newest first
    assert (first.source, second.source) == (POLICY, "s3://bucket/b")
    assert first.run_id == mlflow_runs(tmp_path, "a", "words")["post-train"].info.run_id
    assert [entry.path for entry in registry.list_artifacts(str(first.run_id))] == ["curves.png"]
    assert first.tags == {
        "rlpipe.version": "6", "rlpipe.policy_sha256": "5f2b", "rlpipe.policy": POLICY, "rlpipe.run": "a",
        "rlpipe.iterations": "6", "evaluation/words_greedy": "0.75"
    }  # fmt: skip
    assert "run `a` after 6 RL iterations" in first.description
    assert "AutoModelForCausalLM.from_pretrained('/store/runs/a/rl/00005/policy/x')` loads it" in first.description
    assert "cannot load it" in first.description
    assert (
        "once it is copied to a disk, `AutoModelForCausalLM.from_pretrained('FOLDER')` loads it" in second.description
    )


@pytest.mark.slow
def test_the_champion_moves_once_to_a_version_that_passed_its_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    curves = tmp_path / "curves.png"
    curves.write_bytes(b"png")
    judged: list[tuple[str, str]] = []

    def start(run: str, verdict: Verdict) -> None:
        publisher = Tracker(run_of(tmp_path, run=run), points)
        publisher.publish(f"/store/{run}", 6, {}, curves, {}, lambda: None)
        publisher.judged(f"/store/{run}", verdict, partial(judged.append, (run, verdict)))
        publisher.close()

    def champion() -> str:
        return client(tmp_path).get_model_version_by_alias("rlpipe", "champion").tags["rlpipe.run"]

    start("a", "passed")
    start("b", "failed")
    start("b", "revoked")  # it was never promoted
    assert (champion(), judged) == ("a", [("a", "passed"), ("b", "failed")])
    versions = client(tmp_path).search_model_versions("name = 'rlpipe'")
    assert {version.tags["rlpipe.run"]: version.tags["rlpipe.gate"] for version in versions} == {
        "a": "passed",
        "b": "failed",
    }
    judged.clear()
    start("b", "passed")  # by other rules
    start("a", "passed")  # started again: it was promoted, and is not a second time
    start("a", "failed")
    assert (champion(), judged) == ("b", [("b", "passed")])
    # the process died between alias and tag
    (first,) = (version for version in versions if version.tags["rlpipe.run"] == "a")
    client(tmp_path).delete_model_version_tag("rlpipe", first.version, "rlpipe.gate")
    start("a", "passed")
    assert (champion(), judged) == ("a", [("b", "passed"), ("a", "passed")])
    judged.clear()
    for verdict in ("revoked", "passed", "revoked"):  # said each time, as an event may have been lost
        start("b", verdict)
    assert (champion(), judged) == ("a", [("b", "revoked"), ("b", "revoked")])


@pytest.mark.slow
def test_data_sets_are_entities_with_digests_and_asked_for_once(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    data = [
        DataConfig(name="words", use="rl", source=str(rows)),
        DataConfig(name="sums", use="rl", source="reasoning_gym:sums"),
    ]
    asked: list[str] = []

    def data_sets() -> list[DataSet]:
        asked.append("rl")
        return [DataSet.of(each, 64 * "a", 7) for each in data]

    def gone() -> list[DataSet]:
        raise UserError("no such file")

    for _ in range(2):
        again = tracker(tmp_path)
        again.reads("rl", data_sets)
        again.reads("evaluation", gone)
        again.committed("rl", 1)
        again.close()
    assert asked == ["rl"]
    for phase in ("rl", "post-train"):
        entities = client(tmp_path).get_run(mlflow_runs(tmp_path)[phase].info.run_id).inputs.dataset_inputs
        assert {(one.dataset.name, one.dataset.digest, one.tags[0].key, one.tags[0].value) for one in entities} == {
            (name, 32 * "a", "mlflow.data.context", "rl") for name in ("words", "sums")
        }
        assert len(entities) == 2
        assert {get_source(one.dataset).to_dict().get("uri") for one in entities} == {str(rows), None}
    assert len(history(tmp_path, "rl", "rollout/reward_mean")) == 1  # what could not be read costs nothing else


@pytest.mark.slow
def test_the_rollouts_of_an_iteration_are_one_table_however_often_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow puts files
    made: list[int] = []
    monkeypatch.setattr(
        tracking, "rollout_table", lambda run, iteration: f"iteration\n{made.append(iteration) or iteration}\n"
    )
    for committed in (2, 3):
        sender = tracker(tmp_path)
        sender.committed(tracking.ROLLOUTS, committed)
        sender.close()
    run_id = mlflow_runs(tmp_path)["rl"].info.run_id
    assert made == [0, 1, 2]
    assert [entry.path for entry in client(tmp_path).list_artifacts(run_id, "rollouts")] == [
        f"rollouts/0000{n}.csv" for n in range(3)
    ]


def test_what_is_not_the_networks_fault_is_not_called_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(source: str, unit: int, error: Exception) -> list[Point]:
        raise error

    with caplog.at_level(logging.WARNING, "rlpipe.report.tracking"):
        for error in (KeyError("rollout/reward_mean"), ConnectionError("the store is away")):
            sender = Tracker(run_of(tmp_path), partial(broken, error=error))
            sender.committed("rl", 1)
            sender.close()
        wrong = tracker(tmp_path)
        wrong._submit(lambda: wrong._client.set_tag("no-such-run", "x", "1"))
        wrong.close()
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == "MLflow lacks rl 0: KeyError: 'rollout/reward_mean'; the run goes on"
    assert second == "MLflow lacks rl 0: ConnectionError: the store is away; the run goes on"
    assert "does not take what it is sent (MlflowException: " in third and "cannot be reached" not in third


def test_an_unreachable_server_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = tracker(tmp_path, f"tracking.uri=http://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.WARNING, "rlpipe.report.tracking"):
        away.begin("rl")
        for committed in range(3):
            away.committed("rl", committed)
        away.close()
    assert [record.name for record in caplog.records if "cannot be reached" in record.message] == [
        "rlpipe.report.tracking"
    ]
