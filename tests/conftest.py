"""Shared by all tests: an S3 server, and stores on both kinds of URL."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from rlpipe.store.backend import Store, open_store
from tests import prefect_home
from tests.deadlines import DEADLINE_S, PIPELINE_S
from tests.pipeline import STARTED, Folder, Undisturbed, kill_group, run_undisturbed
from tests.prefect_stand import bare_server
from tests.s3_world import S3Proxy, S3Server, check_servers_serve, serving

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes of pytest-xdist share the cores
os.environ.setdefault(
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false"
)  # eight processes of its own, and nothing here has jobs
# no test asserts a time: on a busy machine the default of 200 ms an example is a coin toss
settings.register_profile("rlpipe", deadline=None)
settings.load_profile("rlpipe")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector looks through what tests make, and not through what they import: a
    million objects, nearly all of them for good."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that hangs fails, with the stack of each thread, in the place of the whole command
    that somebody ends by hand."""
    for item in items:
        whole = any(item.get_closest_marker(name) for name in ("e2e", "contract", "learning", "soak", "nightly"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PIPELINE_S if whole else 3 * DEADLINE_S))


@pytest.fixture(autouse=True)
def nothing_left_at_work() -> Iterator[None]:
    """A run that a failed test left is ended: the next tests would have half a machine."""
    before = len(STARTED)  # what fixtures of several tests started stays
    yield
    while len(STARTED) > before:
        process = STARTED.pop()
        if process.poll() is None:
            kill_group(process)
    check_servers_serve()  # which test ended one is seen at that test, not at those that need it


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def prefect_homes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The databases of Prefect servers that tests start are copies."""
    path = shared_folder(tmp_path_factory) / "prefect-homes"
    path.mkdir(exist_ok=True)
    prefect_home.shared[:] = [path]


@pytest.fixture
def patient_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a report gets what a minute gave; a test gets all."""
    monkeypatch.setattr("rlpipe.extras.why.today.SECONDS_MAX", DEADLINE_S)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serving(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def s3_proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A proxy before the S3 server; stores that are opened now go through it."""
    proxy = S3Proxy(s3_server.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that others are compared with. The processes of pytest-xdist share one."""
    path = shared_folder(tmp_path_factory) / "undisturbed"
    with FileLock(f"{path}.lock", timeout=PIPELINE_S):
        if not (path / "duration_s").exists():
            path.mkdir()
            duration_s = run_undisturbed(Folder(path, f"file://{path}/store", tracked=True))
            (path / "duration_s").write_text(str(duration_s))
    return Undisturbed(Folder(path, f"file://{path}/store"), float((path / "duration_s").read_text()))


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a command needs in its environment to use the Prefect server that
    all tests of this process share."""
    with bare_server(tmp_path_factory.mktemp("prefect")) as stand:
        yield {"PREFECT_API_URL": stand.environment["PREFECT_API_URL"]}


@pytest.fixture
def folder(tmp_path: Path, prefect_api: dict[str, str]) -> Folder:
    """Where a test runs `rlpipe`, on the shared Prefect server and without MLflow."""
    return Folder(tmp_path, f"file://{tmp_path}/store", prefect_api)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store, once on a local path and once on S3."""
    if request.param == "file":
        return open_store(f"file://{tmp_path}/store")
    return open_store(request.getfixturevalue("s3_server").url())
