"""infra/ against real servers: the stand of compose.yaml (tests/compose_world.py), and the job
templates on a Prefect server."""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from tests import compose_world
from tests.compose_world import BIN, OUTSIDE, ROOT, Compose
from tests.deadlines import PIPELINE_S, until
from tests.prefect_stand import Stand, bare_server

pytestmark = pytest.mark.e2e
SECRETS = {
    "POSTGRES_PASSWORD": "planted-postgres",
    "PREFECT_API_AUTH_STRING": "admin:planted-prefect",
    "AWS_ACCESS_KEY_ID": "planted-id",
    "AWS_SECRET_ACCESS_KEY": "planted-aws",
    "RLPIPE_SERVICE_KEY": "planted-service",
}
STATUS = (
    "import sys, urllib.request as u\ntry: print(u.urlopen(u.Request(sys.argv[1], headers=dict(a.split('=', "
    "1) for a in sys.argv[2:])), timeout=20).status)\n"
)
STATUS += "except u.HTTPError as e: print(e.code)\nexcept OSError as e: print(type(e.reason).__name__)"
TRACK = """
import json, boto3, mlflow
mlflow.set_experiment("e")
with mlflow.start_run() as run:
    mlflow.log_metric("reward", 0.5)
    mlflow.log_text("hello", "hello.txt")
keys = [each["Key"] for each in boto3.client("s3").list_objects_v2(Bucket="rlpipe", Prefix="mlflow/")["Contents"]]
print(json.dumps({"keys": keys, "metric": mlflow.get_run(run.info.run_id).data.metrics["reward"]}))
"""


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    if why := compose_world.unavailable():
        pytest.skip(why)
    stand = Compose(tmp_path_factory.mktemp("compose"), SECRETS)
    try:
        stand.up()
        yield stand
    finally:
        stand.close()


def status(compose: Compose, url: str, *headers: str) -> str:
    """The HTTP status that a service gets at a URL, or the name of the error."""
    told = compose.run("worker-cpu", "python", "-c", STATUS, url, *headers)
    return told.stdout.strip() or told.stderr


@pytest.mark.nightly
def test_the_stand_asks_for_keys(compose: Compose) -> None:
    assert status(compose, "http://prefect:4200/api/flows/count") in ("401", "403", "405")
    assert status(compose, "http://prefect:4200/api/admin/version") == "401"
    assert status(compose, "http://s3:8333/rlpipe") == "403"
    assert status(compose, "http://s3:8333/healthz") == "200"
    # SeaweedFS behind its S3 port: not for other containers
    for port in (8888, 9333, 8080 + 10000, 18888):
        assert status(compose, f"http://{OUTSIDE}:{port}/") == "ConnectionRefusedError"


@pytest.mark.nightly
def test_the_worker_polls_the_pool_of_the_authenticated_server(compose: Compose) -> None:

    def pool() -> tuple[str, str]:
        told = compose.run("worker-cpu", "prefect", "work-pool", "inspect", "cpu", "--output", "json")
        assert told.returncode == 0, told.stderr
        return operator.itemgetter("type", "status")(json.loads(told.stdout))

    # a worker of a busy machine may be late with a heartbeat
    until(lambda: pool() == ("process", "READY"), pool)
    told = compose.run("worker-cpu", "prefect", "deployment", "ls")
    assert "post-train/post-train" in told.stdout


@pytest.mark.nightly
def test_a_flow_run_is_started_as_on_the_page(compose: Compose) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    (start,) = re.findall(r"^.venv/bin/(prefect deployment run .*)", page, re.M)
    start = start.replace("my.toml", str(ROOT / "flows/presets/tiny.toml")) + " --start-in 100hours"
    told = compose.run("worker-cpu", "bash", "-c", start)
    assert told.returncode == 0 and "post-train" in told.stdout, told.stdout + told.stderr


@pytest.mark.nightly
def test_artifacts_of_mlflow_are_in_s3_and_foreign_hosts_are_refused(compose: Compose) -> None:
    told = compose.run("worker-cpu", "python", "-c", TRACK)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["metric"] == 0.5 and any(key.endswith("hello.txt") for key in found["keys"])
    assert status(compose, "http://mlflow:5000/api/2.0/mlflow/experiments/search?max_results=1") == "200"
    assert (
        status(compose, "http://mlflow:5000/api/2.0/mlflow/experiments/search?max_results=1", "Host=evil.example")
        == "403"
    )


@pytest.mark.nightly
def test_no_secret_is_in_a_log_of_the_stand(compose: Compose) -> None:
    for name in compose.processes:
        text = (compose.folder / f"{name}.log").read_text()
        assert not [secret for key, secret in SECRETS.items() if key != "AWS_ACCESS_KEY_ID" and secret in text], name


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with bare_server(tmp_path_factory.mktemp("stand")) as stand:
        yield stand


def test_the_server_takes_the_templates_and_the_deployments(stand: Stand) -> None:
    environment = {**stand.environment, "PATH": f"{BIN}:{os.environ['PATH']}"}
    for _ in range(2):  # again updates them
        told = subprocess.run(
            ["infra/deploy.sh", "kubernetes"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PIPELINE_S,
        )
        assert told.returncode == 0, told.stdout + told.stderr
    for pool in ("cpu", "train-gpu", "rollout-gpu"):
        kept: Any = stand.api("GET", f"/work_pools/{pool}")
        assert kept["type"] == "kubernetes"
        assert kept["base_job_template"] == json.loads((ROOT / "infra/work-pools" / f"{pool}.json").read_text())


@pytest.fixture(scope="module")
def train_pool(stand: Stand) -> str:
    """The name of a work pool that has its job template."""
    template = str(ROOT / "infra/work-pools/train-gpu.json")
    stand.prefect(
        "work-pool", "create", "train-gpu", "--type", "kubernetes", "--overwrite", "--base-job-template", template
    )
    return "train-gpu"


@pytest.mark.parametrize(
    ("variables", "taken"),
    [
        ({"gpus": 4}, True),
        ({"gpus": 0}, False),
        ({"gpus": "many"}, False),
        ({"memory": "512Gi"}, True),
        ({"memory": "a lot"}, False),
    ],
)
def test_the_server_checks_job_variables(
    stand: Stand, train_pool: str, variables: dict[str, Any], taken: bool
) -> None:  # fmt: skip
    flow: Any = stand.api("POST", "/flows/", {"name": "probe"})
    body = {"name": "probe", "flow_id": flow["id"], "work_pool_name": train_pool, "job_variables": variables}
    if taken:
        stand.api("POST", "/deployments/", body)
    else:
        with pytest.raises(urllib.error.HTTPError, match="HTTP Error 4"):
            stand.api("POST", "/deployments/", body)
