"""A real Prefect server and worker for the end-to-end tests."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from flows.server import DEFAULTS
from rlpipe.base.values import JsonDict
from rlpipe.processes.launch import answers, free_port
from tests.deadlines import DEADLINE_S, PIPELINE_S, until
from tests.living import signal_all
from tests.paths import ROOT
from tests.pipeline import BIN, kill_group
from tests.prefect_home import new_deployed_home, new_home

CALLS_MAX = 20
POOLS = ("cpu", "train-gpu", "rollout-gpu")
DONE = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Stand:
    """A Prefect server and a process worker in a folder, with the repository's deployments."""

    def __init__(self, path: Path, environment: dict[str, str] | None = None) -> None:
        environment = environment or {}
        self.path, self.port, self.repository = path, free_port(), ROOT
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(path / "home"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            **DEFAULTS,
            "DO_NOT_TRACK": "1",
            **environment,
            "PYTHONPATH": ":".join(filter(None, (environment.get("PYTHONPATH"), str(ROOT), str(path)))),
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def spawn(self, name: str, *arguments: str) -> None:
        """Starts `prefect ARGUMENTS` under a name."""
        self.spawn_program(name, str(BIN / "prefect"), *arguments, cwd=ROOT)

    def spawn_program(self, name: str, *command: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Starts a program under a name, in the stand's folder."""
        with (self.path / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=cwd or self.path, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def start_server(self) -> None:
        self.spawn_program(
            "server", str(BIN / "rlpipe"), "server", "--host", "127.0.0.1", "--port", str(self.port), cwd=ROOT
        )

    def wait_ready(self) -> None:
        """Returns when the server that was started answers."""
        url, log = f"{self.environment['PREFECT_API_URL']}/health", self.path / "server.log"
        until(lambda: answers(url), lambda: log.read_text()[-2000:], running=self.processes["server"], look_s=0.2)

    def deploy(self) -> None:
        """Makes the repository's work pools and deployments."""
        from prefect.workers.process import ProcessWorker  # seconds

        template = ProcessWorker.get_default_base_job_template()
        for pool in POOLS:  # a deployment is refused where its pool is missing
            self.api("POST", "/work_pools/", {"name": pool, "type": "process", "base_job_template": template})
        self.prefect("deploy", "--all")

    def prefect(self, *arguments: str) -> str:
        """Output of `prefect ARGUMENTS`, tried again until it succeeds."""
        tried = []

        def succeeds() -> bool:
            command = [str(BIN / "prefect"), "--no-prompt", *arguments]
            tried.append(subprocess.run(command, cwd=ROOT, env=self.environment,
                                        capture_output=True, text=True, timeout=DEADLINE_S,
                                        stdin=subprocess.DEVNULL))  # fmt: skip
            return tried[-1].returncode == 0

        until(succeeds, lambda: tried[-1].stdout + tried[-1].stderr, look_s=1)
        return tried[-1].stdout

    def run(self, *arguments: object) -> str:
        """Output of a program that talks to the server; it has to succeed."""
        done = subprocess.run([str(each) for each in arguments], cwd=self.path,
                              env=self.environment, capture_output=True,
                              text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def api(self, method: str, path: str, body: object = None) -> Any:
        return call(
            method,
            f"{self.environment['PREFECT_API_URL']}{path}",
            body,
            self.environment.get("PREFECT_API_AUTH_STRING"),
        )

    def start(self, deployment: str, job_variables: JsonDict | None = None, **parameters: object) -> str:
        """The id of a new flow run of a deployment (FLOW/NAME)."""
        found = self.api("GET", f"/deployments/name/{deployment}")["id"]
        body = {"parameters": parameters, "job_variables": job_variables}
        return self.api("POST", f"/deployments/{found}/create_flow_run", body)["id"]

    def wait(self, flow_run: str) -> dict[str, str]:
        """The final state of a flow run."""
        return self.wait_for(flow_run, DONE)

    def wait_for(self, flow_run: str, told: tuple[str, ...]) -> dict[str, str]:
        """The state of a flow run once its type or name is one of these."""
        state: dict[str, str] = {}

        def faulty() -> str:
            return (
                f"flow run {flow_run} is {state}, not {told}; the worker said:\n"
                f"{(self.path / 'worker.log').read_text()[-3000:]}"
            )

        def reached() -> bool:
            state.update(self.api("GET", f"/flow_runs/{flow_run}")["state"])
            is_so = state["type"] in told or state["name"] in told
            assert is_so or state["type"] not in ("COMPLETED", "FAILED", "CANCELLED"), (
                faulty()
            )  # a crashed one may be retried
            return is_so

        until(reached, faulty, within_s=PIPELINE_S, look_s=1)
        return state

    def retry(self, flow_run: str) -> None:
        """As somebody does in the UI, with a flow run that has failed; returns
        when that is its state no more."""
        self.prefect("flow-run", "retry", flow_run)
        until(
            lambda: self.api("GET", f"/flow_runs/{flow_run}")["state"]["type"] != "FAILED",
            "it is not retried",
            look_s=0.5,
        )

    def states(self, flow_run: str) -> list[dict[str, str]]:
        """All states that a flow run was in, the oldest first."""
        told = self.api("GET", f"/flow_run_states/?flow_run_id={flow_run}")
        return sorted(told, key=lambda state: state["timestamp"])


def call(method: str, url: str, body: object = None, auth: str | None = None) -> Any:
    """The JSON answer of an HTTP call with a JSON body.

    Asked again, as Prefect's client does, when the database is locked or away (503), and where
    asking changes nothing when a busy disk kept the answer longer than a minute.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if auth:
        headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
    for attempt in range(CALLS_MAX):
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S / 5) as answer:
                return json.loads(answer.read() or b"null")
        except TimeoutError:
            if method != "GET" or attempt == CALLS_MAX - 1:
                raise
        except urllib.error.HTTPError as error:
            if error.code != 503 or attempt == CALLS_MAX - 1:
                raise
        time.sleep(1)
    raise AssertionError("the last call returned or raised")


@contextlib.contextmanager
def running_stand(path: Path, environment: dict[str, str] | None = None) -> Iterator[Stand]:
    """A server with the repository's deployments and a worker of pool `cpu`.

    `environment`: of all of them, beside this process's.
    """
    with running_server(path, environment) as stand:
        stand.spawn("worker", "worker", "start", "--pool", "cpu")
        yield stand


@contextlib.contextmanager
def bare_server(path: Path, environment: dict[str, str] | None = None) -> Iterator[Stand]:
    """A server that knows of no deployment, unless `home` in the path has some."""
    stand = Stand(path, environment)
    new_home(path / "home")
    try:
        stand.start_server()
        stand.wait_ready()
        yield stand
    finally:
        for process in reversed(stand.processes.values()):
            kill_tree(process)


@contextlib.contextmanager
def running_server(path: Path, environment: dict[str, str] | None = None) -> Iterator[Stand]:
    """A server with the repository's deployments, and nobody who works on them.

    With an `environment` they are made in it.
    """
    is_deployed = environment is None and new_deployed_home(path / "home", _deploy_in)
    with bare_server(path, environment) as stand:
        if not is_deployed:
            stand.deploy()
        yield stand


def _deploy_in(home: Path) -> None:
    with bare_server(home.parent) as stand:
        stand.deploy()


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process and all its descendants, whatever group they are in."""
    with contextlib.suppress(psutil.NoSuchProcess):
        signal_all(psutil.Process(process.pid).children(recursive=True))
    kill_group(process)
