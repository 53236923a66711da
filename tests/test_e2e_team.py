"""A team's stand: a run whose gang and engines are runs of deployments, undisturbed, with everything killed once, and two at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from rlpipe.config_source import read_config
from rlpipe.services import ENGINES, TRAINER, registered
from rlpipe.store.backend import open_store
from tests.compose_world import POSTGRES
from tests.conftest import S3Server
from tests.pipeline import MINI, Folder
from tests.prefect_stand import ROOT
from tests.team_stand import TeamStand, team_stand

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not (POSTGRES / "initdb").exists(), reason="Postgres is not installed: apt-get install postgresql"),
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


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The same run where everything is a child process of one command, on a local store."""
    path = tmp_path_factory.mktemp("laptop")
    folder = Folder(path, f"file://{path}/store")
    folder.complete("a", *SETS)
    return folder


def start(stand: TeamStand, run: str) -> str:
    config = read_config("tiny", stand.config(run, *SETS), PRESETS)
    return stand.start("post-train/post-train", config=config.model_dump(mode="json"))


def wait_for_iteration(folder: Folder, run: str, iteration: int, timeout_s: float = 400) -> None:
    store, end = open_store(folder.store), time.monotonic() + timeout_s
    while not store.exists(f"runs/{run}/rl/{iteration:05d}/iteration.json"):
        assert time.monotonic() < end, f"iteration {iteration} of {run} was not committed in {timeout_s} s"
        time.sleep(0.2)


def process_of(stand: TeamStand, worker: str, words: str) -> psutil.Process:
    """The process of a flow run that a worker started: the child that works on it."""
    children = psutil.Process(stand.processes[worker].pid).children(recursive=True)
    found = [child for child in children if words in " ".join(child.cmdline())]
    assert found, [child.cmdline() for child in children]
    return found[0]


def test_a_run_on_the_stand_ends_as_on_a_laptop(stand: TeamStand, folder: Folder, laptop: Folder) -> None:
    state = stand.wait(start(stand, "a"), timeout_s=900)
    assert state["type"] == "COMPLETED", state
    assert folder.final_sha256("a", ITERATIONS) == laptop.final_sha256("a", ITERATIONS)
    assert folder.evaluation("a", ITERATIONS) == laptop.evaluation("a", ITERATIONS)
    for kind in (TRAINER, ENGINES):
        (served,) = stand.services("a", kind)
        assert stand.wait(served["id"], timeout_s=60)["type"] == "COMPLETED"
        assert not registered(open_store(folder.store), "runs/a", kind)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
