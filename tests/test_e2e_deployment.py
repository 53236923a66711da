"""The deployments against a real Prefect server and worker: start, fail, retry, resume."""

from __future__ import annotations

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlpipe.config import PipelineConfig
from rlpipe.config_source import override_config, read_config
from rlpipe.launch import free_port
from tests.pipeline import BIN, MINI, Folder, kill_group

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parent.parent
PRESETS = ROOT / "flows" / "presets"
DONE = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Stand:
    """A Prefect server and a process worker in a folder, with the repository's deployments."""

    def __init__(self, path: Path) -> None:
        self.path, self.port = path, free_port()
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(path / "home"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PYTHONPATH": f"{ROOT}:{path}",
            "DO_NOT_TRACK": "1",
        }
        self.processes: list[subprocess.Popen[str]] = []

    def spawn(self, name: str, *arguments: str) -> None:
        with (self.path / f"{name}.log").open("w") as log:
            self.processes.append(
                subprocess.Popen(
                    [str(BIN / "prefect"), *arguments],
                    cwd=ROOT,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
            )

    def prefect(self, *arguments: str, deadline_s: float = 60) -> str:
        """Output of `prefect ARGUMENTS`, tried again until it succeeds or the time is up."""
        end = time.monotonic() + deadline_s
        while True:
            done = subprocess.run([str(BIN / "prefect"), "--no-prompt", *arguments], cwd=ROOT, env=self.environment,
                                  capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)  # fmt: skip
            if done.returncode == 0:
                return done.stdout
            assert time.monotonic() < end, done.stdout + done.stderr
            time.sleep(1)

    def api(self, method: str, path: str, body: object = None) -> object:
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def start(self, deployment: str, config: PipelineConfig) -> str:
        """The id of a new flow run of a deployment, which has its flow's name."""
        found = self.api("GET", f"/deployments/name/{deployment}/{deployment}")["id"]  # type: ignore[index]
        parameters = {"parameters": {"config": config.model_dump(mode="json")}}
        return self.api("POST", f"/deployments/{found}/create_flow_run", parameters)["id"]  # type: ignore[index]

    def wait(self, flow_run: str, timeout_s: float = 400) -> dict[str, str]:
        """The final state of a flow run."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            state = self.api("GET", f"/flow_runs/{flow_run}")["state"]  # type: ignore[index]
            if state["type"] in DONE:
                return state
            time.sleep(1)
        raise AssertionError(
            f"flow run {flow_run} did not end; the worker said:\n{(self.path / 'worker.log').read_text()[-3000:]}"
        )


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("stand"))
    try:
        stand.spawn("server", "server", "start", "--host", "127.0.0.1", "--port", str(stand.port))
        stand.prefect("work-pool", "create", "local", "--type", "process", "--overwrite", deadline_s=120)
        stand.prefect("deploy", "--all")
        stand.spawn("worker", "worker", "start", "--pool", "local")
        yield stand
    finally:
        for process in reversed(stand.processes):
            kill_group(process)


def test_the_form_is_filled_with_the_tiny_preset() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert {entry["name"] for entry in deployments} == {"post-train", "sft", "rl", "evaluate"}
    for entry in deployments:
        assert entry["parameters"]["config"] == tomllib.loads((PRESETS / "tiny.toml").read_text())


def test_a_run_from_the_server_fails_is_retried_and_resumes(stand: Stand, tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    broken = tmp_path / "broken"
    (stand.path / "fragile.py").write_text(
        "import pathlib\ndef reward(prompt, completion):\n"
        f"    if pathlib.Path({str(broken)!r}).exists(): raise RuntimeError('the grader is down')\n    return float(len(completion))\n"
    )
    rewards = "rl.rewards={'fragile:reward' = 1.0, format = 0.0}".replace("'", '"')
    config = read_config(
        "tiny", ["run=night", f"store={folder.store}", f"tracking.uri=sqlite:///{tmp_path}/m.db", *MINI, rewards], PRESETS
    )
    broken.touch()
    flow_run = stand.start("post-train", config)
    state = stand.wait(flow_run)
    assert state["type"] == "FAILED", state
    assert "the grader is down" in state["message"]
    broken.unlink()
    stand.prefect("flow-run", "retry", flow_run)
    time.sleep(3)
    state = stand.wait(flow_run)
    assert state["type"] == "COMPLETED", state
    told = stand.api("POST", "/flow_runs/filter", {"flow_runs": {"name": {"like_": "night-0000"}}})
    assert len({entry["name"] for entry in told}) == 5  # type: ignore[union-attr,index]
    tasks = stand.api("POST", "/task_runs/filter", {"task_runs": {"state": {"name": {"any_": ["Cached"]}}}})
    assert any(entry["name"].startswith("prepare") for entry in tasks)  # type: ignore[union-attr]
    assert folder.rlpipe("verify", "night", "--store", folder.store)[0] == 0
    # the deployment rl does what the config says: here it trains on the rollouts of that run, and samples nothing
    stored = override_config(config, ["run=fed", "rl.rollouts_from=run:night", "rl.num_iterations=2", "sft.num_steps=0"])
    state = stand.wait(stand.start("rl", stored))
    assert state["type"] == "COMPLETED", state
    assert folder.open_store().exists("runs/fed/rl/00001/iteration.json")
    assert not folder.open_store().exists("runs/fed/rl/00000/rollouts/round-0/shard-001/manifest.json")  # imported as one
    assert folder.rlpipe("verify", "fed", "--store", folder.store)[0] == 0
