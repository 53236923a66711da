"""Shared by all tests: a real S3 server (SeaweedFS), and stores on both kinds of URL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from rlpipe.processes.launch import free_port
from rlpipe.store.backend import Store, open_store
from tests.pipeline import Folder, Undisturbed, run_undisturbed
from tests.prefect_stand import bare_server

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
START_TIMEOUT_S = 60
# no test asserts a time: on a busy machine the default of 200 ms an example is a coin toss
settings.register_profile("rlpipe", deadline=None)
settings.load_profile("rlpipe")


@dataclass(frozen=True)
class S3Server:
    """A SeaweedFS S3 server with one bucket and one pair of credentials."""

    endpoint: str
    bucket: str
    environment: dict[str, str]

    def url(self) -> str:
        return f"s3://{self.bucket}/{uuid.uuid4().hex[:8]}"


def _start_weed(folder: Path, endpoint_port: int) -> subprocess.Popen[bytes]:
    identity = {
        "name": "test",
        "credentials": [{"accessKey": "test-key", "secretKey": "test-secret"}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = ["master", "volume", "filer"]
    options = [f"-{name}.port={free_port()}" for name in ports] + [f"-{name}.port.grpc={free_port()}" for name in ports]
    command = [
        str(Path(sys.executable).parent / "weed"), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-s3.port={endpoint_port}", f"-s3.port.grpc={free_port()}", f"-admin.port={free_port()}", f"-admin.port.grpc={free_port()}",
        "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.config={folder}/s3.json", "-bucket=rlpipe", *options,
    ]  # fmt: skip
    log = (folder / "weed.log").open("wb")
    with log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GOMEMLIMIT": "512MiB"}, cwd=folder)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder = tmp_path_factory.mktemp("weed")
    port = free_port()
    process = _start_weed(folder, port)
    environment = {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        _wait_for_bucket(process, folder)
        yield S3Server(environment["AWS_ENDPOINT_URL"], "rlpipe", environment)
    finally:
        process.kill()
        process.wait(timeout=10)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _wait_for_bucket(process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    last = ""
    while time.monotonic() < deadline:
        assert process.poll() is None, (folder / "weed.log").read_text()[-2000:]
        try:
            open_store("s3://rlpipe/ready").put("probe", b"x")
            return
        except OSError as error:
            last = str(error)
            time.sleep(0.5)
    raise AssertionError(f"SeaweedFS did not start in {START_TIMEOUT_S} s: {last}\n{(folder / 'weed.log').read_text()[-2000:]}")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that others are compared with. The processes of pytest-xdist share one."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    with FileLock(f"{path}.lock", timeout=900):
        if not (path / "duration_s").exists():
            path.mkdir()
            duration_s = run_undisturbed(Folder(path, f"file://{path}/store", tracked=True))
            (path / "duration_s").write_text(str(duration_s))
    return Undisturbed(Folder(path, f"file://{path}/store"), float((path / "duration_s").read_text()))


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a command needs in its environment to use the Prefect server that all tests of this process share."""
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
