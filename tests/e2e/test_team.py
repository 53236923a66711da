"""A team's stand: a run whose trainer and engines are runs of deployments, undisturbed, with
everything killed once, and two at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import pytest

from rlpipe.config.source import read_config
from rlpipe.services.registration import ENGINES, TRAINER, registered
from rlpipe.store.backend import open_store
from tests.conftest import S3Server
from tests.deadlines import DEADLINE_S, PIPELINE_S, until
from tests.living import until_all_gone, words_of
from tests.pipeline import MINI, Folder, Undisturbed, kill_group
from tests.postgres_world import INSTALLED
from tests.prefect_stand import ROOT
from tests.team_stand import TeamStand, team_stand

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not INSTALLED, reason="Postgres is not installed: apt-get install postgresql"),
]
ITERATIONS = 8
SETS = [*MINI, f"rl.num_iterations={ITERATIONS}"]
PRESETS = ROOT / "flows" / "presets"


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[TeamStand]:
    with team_stand(tmp_path_factory.mktemp("team"), s3_server) as stand:
        yield stand


@pytest.fixture(scope="module")
def folder(stand: TeamStand) -> Folder:
    return Folder(stand.path, f"s3://{stand.s3.bucket}/team")


def start(stand: TeamStand, run: str, *sets: str) -> str:
    config = read_config("tiny", stand.config(run, *SETS, *sets), PRESETS)
    return stand.start("post-train/post-train", config=config.model_dump(mode="json"))


def wait_for_iteration(folder: Folder, run: str, iteration: int) -> None:
    store, key = open_store(folder.store), f"runs/{run}/rl/{iteration:05d}/iteration.json"
    until(lambda: store.exists(key), f"{key} was not committed", within_s=PIPELINE_S, look_s=0.2)


def process_of(flow_run: str) -> psutil.Process | None:
    """The process that works on a flow run, wherever its worker is."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run and "prefect.engine" in words_of(process):
                return process
    return None


def kill(flow_run: str) -> None:
    """SIGKILL to the process of a flow run, and to nothing else."""
    process = process_of(flow_run)
    assert process is not None, f"no process works on flow run {flow_run}"
    process.kill()


def ended(stand: TeamStand, flow_run: str, retries_max: int) -> dict[str, str]:
    """The final state of a flow run; a failed one is retried, as somebody does in
    the UI, so many times at most."""
    while True:
        state = stand.wait_for(flow_run, ("COMPLETED", "FAILED", "CANCELLED"))
        if state["type"] != "FAILED" or retries_max == 0:
            return state
        retries_max -= 1
        stand.retry(flow_run)


def test_a_run_on_the_stand_ends_as_on_a_laptop(stand: TeamStand, folder: Folder, undisturbed: Undisturbed) -> None:
    last = 2  # the undisturbed run evaluates that one, too
    state = stand.wait(start(stand, "a", f"rl.num_iterations={last}"))
    assert state["type"] == "COMPLETED", state
    assert folder.final_sha256("a", last) == undisturbed.sha256(last)
    assert folder.evaluation("a", last) == undisturbed.folder.evaluation("a", last)
    for kind in (TRAINER, ENGINES):
        (served,) = stand.services("a", kind)
        assert stand.wait(served["id"])["type"] == "COMPLETED"
        assert not registered(open_store(folder.store), "runs/a", kind)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0


@pytest.mark.soak
def test_everything_is_killed_once_and_the_run_ends_with_the_same_bits(
    stand: TeamStand, folder: Folder, undisturbed: Undisturbed
) -> None:
    flow_run = start(stand, "b")
    wait_for_iteration(folder, "b", 0)
    kill(stand.services("b", TRAINER)[-1]["id"])
    wait_for_iteration(folder, "b", 1)
    kill(stand.services("b", ENGINES)[-1]["id"])
    wait_for_iteration(folder, "b", 2)
    stand.processes["cpu"].kill()  # the flow run goes on, and nobody watches it any more
    stand.processes["cpu"].wait(timeout=DEADLINE_S)
    stand.start_worker("cpu")
    wait_for_iteration(folder, "b", 3)
    # its worker, or the heartbeats that are missing, say so; the automation retries it
    kill(flow_run)
    wait_for_iteration(folder, "b", 5)
    kill_group(stand.processes["server"])
    time.sleep(5)
    stand.start_server()
    stand.prefect("flow-run", "inspect", flow_run)
    state = ended(stand, flow_run, retries_max=1)
    assert state["type"] == "COMPLETED", stand.states(flow_run)
    assert [len(stand.services("b", kind)) > 1 for kind in (TRAINER, ENGINES)] == [True, True]
    assert "Crashed" in [state["name"] for state in stand.states(flow_run)]
    assert folder.final_sha256("b", ITERATIONS) == undisturbed.sha256(ITERATIONS)
    assert folder.rlpipe("verify", "b", "--store", folder.store)[0] == 0


@pytest.mark.nightly
def test_of_two_runs_on_pools_with_room_for_one_the_second_waits_and_a_cancelled_one_leaves_nothing(
    stand: TeamStand, folder: Folder, undisturbed: Undisturbed
) -> None:
    for pool in ("train-gpu", "rollout-gpu"):
        stand.prefect("work-pool", "set-concurrency-limit", pool, "1")
    first = start(stand, "c", "rl.num_iterations=500")  # it will not get that far
    wait_for_iteration(folder, "c", 0)
    second = start(stand, "d")
    until(lambda: stand.services("d", TRAINER), "d asks for no trainer", within_s=PIPELINE_S, look_s=1)
    time.sleep(20)  # longer than a worker takes to start what it may
    (waiting,) = stand.services("d", TRAINER)
    assert waiting["state"]["type"] == "SCHEDULED" and process_of(waiting["id"]) is None
    at_work = [process_of(stand.services("c", kind)[-1]["id"]) for kind in (TRAINER, ENGINES)]
    family = [child for process in at_work if process for child in [process, *process.children(recursive=True)]]
    assert len(family) > 4  # each with what it started
    stand.prefect("flow-run", "cancel", first)
    until_all_gone(family)
    assert not registered(open_store(folder.store), "runs/c", TRAINER)
    assert stand.wait(first)["type"] == "CANCELLED"
    assert ended(stand, second, retries_max=0)["type"] == "COMPLETED"
    assert folder.final_sha256("d", ITERATIONS) == undisturbed.sha256(ITERATIONS)
