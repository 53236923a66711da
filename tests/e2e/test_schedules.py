"""The schedule of prefect.yaml, every minute instead of every night, on both databases that a
Prefect server may have."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
import yaml

from rlpipe.base.values import JsonDict
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from tests.deadlines import PIPELINE_S, until
from tests.pipeline import MINI, Folder
from tests.postgres_world import INSTALLED, running_postgres
from tests.prefect_stand import ROOT, Stand, running_stand

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
SHORT = {
    **dict(part.split("=", 1) for part in MINI if not part.startswith(("rl.filters", "rl.num_iterations"))),
    "rl.filters": {}, "sft.num_steps": 4, "sft.decay_steps": 4, "rl.num_iterations": 1,
}  # fmt: skip
NIGHTS = 3


Stands = dict[str, tuple[Stand, Folder]]


@pytest.fixture(scope="module")
def stands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stands]:
    """By database: a Prefect server with a worker, and where its runs are kept."""
    with contextlib.ExitStack() as stack:
        databases = {"sqlite": {}}
        if INSTALLED:
            databases["postgres"] = {"PREFECT_API_DATABASE_CONNECTION_URL": stack.enter_context(running_postgres())}
        stands: Stands = {}
        for database, environment in databases.items():
            path = tmp_path_factory.mktemp(database)
            stands[database] = (
                stack.enter_context(running_stand(path, environment)),
                Folder(path, f"file://{path}/store"),
            )
        yield stands


def every_minute(stand: Stand, folder: Folder) -> None:
    """Deploys post-train with its schedule switched on, from a
    prefect.yaml as a user would edit it."""
    file = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (deployment,) = (entry for entry in file["deployments"] if entry["name"] == "post-train")
    (schedule,) = deployment["schedules"]
    schedule |= {"active": True, "cron": "* * * * *"}
    schedule["parameters"]["changes"] |= {
        **SHORT,
        "store": folder.store,
        "tracking.uri": f"sqlite:///{folder.path}/mlflow.db",
    }
    path = folder.path / "prefect.yaml"
    path.write_text(yaml.safe_dump(file))
    stand.prefect("deploy", "--prefect-file", str(path), "--name", "post-train")


def begun(stand: Stand) -> list[JsonDict]:
    """The flow runs that the schedule began, the oldest first."""
    flow_runs = stand.api("POST", "/flow_runs/filter", {"flow_runs": {"name": {"like_": "post-train nightly"}}})
    return sorted(flow_runs, key=lambda flow_run: flow_run["expected_start_time"])


def test_every_night_is_a_run_of_its_own_and_trains(stands: Stands) -> None:
    for stand, folder in stands.values():
        every_minute(stand, folder)
    logs = [stand.path / "server.log" for stand, _ in stands.values()]
    until(
        lambda: all(len(begun(stand)) >= NIGHTS for stand, _ in stands.values()),
        lambda: [log.read_text()[-2000:] for log in logs],
        within_s=PIPELINE_S,
        look_s=2,
    )
    for stand, _ in stands.values():
        stand.prefect("deploy", "--name", "post-train")  # as in the repository: the schedule is off
    for stand, folder in stands.values():
        flow_runs = begun(stand)[:NIGHTS]
        states = [stand.wait(flow_run["id"]) for flow_run in flow_runs]
        assert [state["name"] for state in states] == ["Completed"] * NIGHTS
        names = [flow_run["name"].removeprefix("post-train ") for flow_run in flow_runs]
        assert len(set(names)) == NIGHTS and len({name.rsplit("-", 1)[0] for name in names}) == NIGHTS, names
        assert all(re.fullmatch(r"nightly-\d{4}-\d\d-\d\d-\d{4}-[0-9a-f]{6}", name) for name in names), names
        for name in names:
            run = open_existing(folder.open_store(), name)
            assert Progress(run).num_committed("rl", 1) == 1 and run.config.budget.wall_clock_h == 6


def test_a_run_with_nothing_to_do_says_so(stands: Stands) -> None:
    """The night before, which the first test had."""
    stand, _ = stands["sqlite"]
    (night, *_) = begun(stand)
    name = night["name"].removeprefix("post-train ")
    again = stand.start(
        "post-train/post-train", **(night["parameters"] | {"changes": night["parameters"]["changes"] | {"run": name}})
    )
    state = stand.wait(again)
    assert state["name"] == "NothingToTrain" and f"run {name} was complete" in state["message"]
    assert f"run:{name}" in stand.api("GET", f"/flow_runs/{again}")["tags"]
