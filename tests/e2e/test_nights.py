"""Unattended nights against a real Prefect server and worker: approvals, two flow runs of one run,
and a process that is killed."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.base.values import JsonDict
from rlpipe.config.source import read_config
from rlpipe.processes.launch import answers, free_port
from rlpipe.store.lease import acquire, check_free
from tests.deadlines import PIPELINE_S, until
from tests.living import descendants
from tests.pipeline import BIN, MINI, Folder, Undisturbed, kill_group
from tests.prefect_stand import ROOT, Stand, call, kill_tree, running_stand

pytestmark = pytest.mark.e2e
ITERATIONS = 5
GIVEN_UP_S = 20  # longer than the worker takes to look for work
BLOCK = """
from prefect.blocks.notifications import CustomWebhookNotificationBlock
CustomWebhookNotificationBlock(name="team", url="http://127.0.0.1:{port}/", json_data={{"text": "{{{{subject}}}} {{{{body}}}}"}},
                               allow_private_urls=True).save("team", overwrite=True)
"""  # noqa: E501


class Listener(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted."""

    told: list[str]

    def do_POST(self) -> None:
        self.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def notifications() -> Iterator[tuple[list[str], int]]:
    told: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Listener,), {"told": told}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield told, server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, notifications: tuple[list[str], int]) -> Iterator[Stand]:
    with running_stand(tmp_path_factory.mktemp("stand")) as stand:
        stand.run(BIN / "python", "-c", BLOCK.format(port=notifications[1]))
        assert "created rlpipe-retry-crashed" in stand.run(
            BIN / "rlpipe", "automations", "--notify", "custom-webhook/team"
        )
        assert "updated rlpipe-notify" in stand.run(BIN / "rlpipe", "automations", "--notify", "custom-webhook/team")
        yield stand


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("runs")
    return Folder(path, f"file://{path}/store")


def parameters(folder: Folder, run: str, *sets: str) -> JsonDict:
    tracking = f"tracking.uri=sqlite:///{folder.path}/m.db"
    return read_config(
        "tiny", [f"run={run}", f"store={folder.store}", tracking, *MINI, *sets], ROOT / "flows" / "presets"
    ).model_dump(mode="json")


def is_free(folder: Folder, run: str) -> bool:
    try:
        check_free(folder.open_store(), f"runs/{run}")
    except ValueError:
        return False
    return True


@pytest.mark.nightly
def test_a_run_waits_for_a_person_and_while_another_holds_it(
    stand: Stand, folder: Folder, notifications: tuple[list[str], int], undisturbed: Undisturbed
) -> None:
    config = parameters(folder, "a", 'approval=["rl", "register"]')
    first = stand.start("post-train/post-train", config=config)
    stand.wait_for(first, ("Suspended",))
    until(lambda: is_free(folder, "a"), "run a is held while it waits")
    assert not folder.open_store().exists("runs/a/rl/00000/iteration.json")
    held = acquire(folder.open_store(), "runs/a")
    stand.api("POST", f"/flow_runs/{first}/resume")
    assert f"run a is held by pid {os.getpid()}" in stand.wait_for(first, ("Waiting",))["message"]
    held.release()
    second = stand.start("post-train/post-train", config=config)  # two of one run: they take turns
    for flow_run in (first, second):
        assert (
            stand.wait_for(flow_run, ("Suspended",))["type"] == "PAUSED"
        )  # before the policy is registered; RL was approved once
        assert folder.open_store().exists(f"runs/a/rl/{ITERATIONS - 1:05d}/iteration.json")
    for flow_run in (first, second):
        stand.api("POST", f"/flow_runs/{flow_run}/resume")
    for flow_run in (first, second):
        assert stand.wait(flow_run)["type"] == "COMPLETED", stand.states(flow_run)
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.sha256()
    assert any("post-train a is Suspended" in told and "press Resume" in told for told in notifications[0]), (
        notifications[0]
    )


def test_a_killed_process_is_found_retried_and_ends_with_the_same_bits(
    stand: Stand, folder: Folder, notifications: tuple[list[str], int], undisturbed: Undisturbed
) -> None:
    last = ITERATIONS - 1
    sets = ["tracking.uri=", f"rl.num_iterations={last}"]
    flow_run = stand.start("post-train/post-train", config=parameters(folder, "b", *sets))
    wait_for_key(folder, "runs/b/rl/00000/iteration.json")
    # the flow run's process is its child: nobody is left to report
    kill_tree(stand.processes["worker"])
    assert stand.api("GET", f"/flow_runs/{flow_run}")["state"]["type"] == "RUNNING"
    stand.spawn("worker", "worker", "start", "--pool", "cpu")
    wait_for_key(folder, "runs/b/rl/00001/iteration.json")
    (process,) = (child for child in descendants(stand.processes["worker"], "prefect.engine"))
    process.kill()  # now the worker is there to report it, and does so twice
    assert stand.wait_for(flow_run, ("COMPLETED", "FAILED", "CANCELLED"))["type"] == "COMPLETED"
    time.sleep(GIVEN_UP_S)  # and nothing starts it again
    states = stand.states(flow_run)
    lost, killed = [state for state in states if state["type"] == "CRASHED"]
    assert "No heartbeat for 90 s" in lost["message"] and "status code: -9" in killed["message"]
    names = [state["name"] for state in states]
    assert names.count("AwaitingRetry") == 2 and names.count("Running") == 3 and names[-1] == "Completed", names
    assert folder.final_sha256("b", last) == undisturbed.sha256(last)
    assert any("is Crashed: No heartbeat" in told for told in notifications[0]), notifications[0]


def test_a_second_process_of_a_flow_run_steps_aside(stand: Stand, folder: Folder) -> None:
    """The first was taken for dead: it holds the run, and the state is its own."""
    flow_run = stand.start("post-train/post-train", config=parameters(folder, "e"))
    held = acquire(folder.open_store(), "runs/e", flow_run)
    said, log = "'post-train e' - Finished in state Running()", stand.path / "worker.log"
    until(lambda: said in log.read_text(), lambda: log.read_text()[-3000:], look_s=0.5)
    assert stand.states(flow_run)[-1]["name"] == "Running" and not folder.open_store().exists("runs/e/run.json")
    held.release()
    stand.api("POST", f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLED"}, "force": True})


@pytest.mark.nightly
def test_a_flow_run_that_dies_before_it_starts_is_given_up(
    stand: Stand, folder: Folder, notifications: tuple[list[str], int]
) -> None:
    (retry,) = stand.api("POST", "/automations/filter", {"automations": {"name": {"any_": ["rlpipe-retry-crashed"]}}})
    retry["trigger"]["within"] = 10  # not a minute, six times
    stand.api(
        "PUT", f"/automations/{retry['id']}", {key: retry[key] for key in ("name", "description", "trigger", "actions")}
    )
    flow_run = stand.start("post-train/post-train", {"command": "false"}, config=parameters(folder, "d"))
    state = stand.wait_for(flow_run, ("FAILED", "COMPLETED", "CANCELLED"))
    assert state["type"] == "FAILED" and state["message"].startswith("It crashed 6 times within an hour"), state
    assert [each["name"] for each in stand.states(flow_run)].count("AwaitingRetry") == 6
    time.sleep(GIVEN_UP_S)  # and nothing starts it again
    assert stand.api("GET", f"/flow_runs/{flow_run}")["state"]["type"] == "FAILED"
    assert any("It crashed 6 times" in told for told in notifications[0]), notifications[0]


TOLD = """
from flows.events import tell_iteration
from prefect import flow
from rlpipe.base.manifests import BestReward, IterationRecord

METRICS = ["rollout/reward_mean", "rollout/pass_rate", "rollout/groups_kept", "rollout/length_tokens_mean", "train/mismatch_abs_mean", "train/num_tokens", "time/iteration_s"]

@flow(name="rl")
async def rl():
    for last in (12, 13, 14):  # the fall is seen at the second bad iteration, and told once
        curve = [[at, 0.5 + 0.01 * (at % 3) - 0.4 * (at > 11)] for at in range(last)]
        tell_iteration(IterationRecord("falls", last - 1, last, {}, -1, dict.fromkeys(METRICS, 1), curve, BestReward(0, 0.5), ""))

import asyncio
asyncio.run(rl())
"""  # noqa: E501


def test_a_reward_that_fell_fires_an_automation_once(stand: Stand, notifications: tuple[list[str], int]) -> None:
    stand.run(BIN / "python", "-c", TOLD)
    told = until(
        lambda: [text for text in notifications[0] if "falls: the reward fell" in text], lambda: notifications[0]
    )
    assert "was 0.511 in the 8 before" in told[0] and "rlpipe why falls --at 13" in told[0], told
    named = {"filter": {"event": {"name": ["rlpipe.reward.fell"]}}, "limit": 50}
    fell = until(lambda: stand.api("POST", "/events/filter", named)["events"], look_s=0.5)  # written in batches
    assert len(fell) == 1 and any(
        related["prefect.resource.id"].startswith("prefect.flow-run.") for related in fell[0]["related"]
    ), fell


def test_the_command_line_says_where_to_approve_and_outlives_a_deleted_flow_run(tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store", {"HOME": str(tmp_path / "home")})
    process = folder.start(*folder.run_arguments("c", *MINI, "rl.num_iterations=1", 'approval=["register"]'))
    try:
        log = folder.path / "output.log"
        folder.wait_for("c", "sft/00000/policy/manifest.json", process)
        page = log.read_text().split("Prefect UI ")[1].split()[0]
        (phase,) = call("POST", f"{page}/api/flow_runs/filter", {"flow_runs": {"name": {"any_": ["sft c"]}}})
        call("DELETE", f"{page}/api/flow_runs/{phase['id']}")
        until(
            lambda: "press Resume: " in log.read_text(), folder.said, running=process, within_s=PIPELINE_S, look_s=0.5
        )
        text = log.read_text()
        steps = (
            "run c: reading its data",
            "starting Prefect's server",
            "tokenizer, base model and SFT data",
            "SFT: the trainer starts",
            "RL: engines and trainer start",
        )
        assert [step for step in steps if step not in text] == []
        assert f"flow run {phase['id']} is gone from Prefect's server" in text
        check_free(folder.open_store(), "runs/c")
        assert folder.rlpipe("runs", "--store", folder.store)[1].rstrip().endswith("waits for an approval (register)")
        url = text.split("press Resume: ")[1].split()[0]
        server, flow_run = url.split("/runs/flow-run/")
        call("POST", f"{server}/api/flow_runs/{flow_run}/resume")
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    # its database is one of the store's runs
    command = log.read_text().splitlines()[-1].split()[1:]
    assert command[:2] == ["server", "--database"] and not (tmp_path / "home" / ".prefect" / "prefect.db").exists()
    port = free_port()
    server = folder.start(*command, "--port", str(port))
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/api/health"), folder.said, running=server, look_s=0.5)
        runs = call("POST", f"http://127.0.0.1:{port}/api/flow_runs/filter", {})
        assert {"post-train c": "Completed", "c-00000": "Completed"}.items() <= {
            run["name"]: run["state"]["name"] for run in runs
        }.items()
    finally:
        kill_group(server)


def wait_for_key(folder: Folder, key: str) -> None:
    until(lambda: folder.open_store().exists(key), key, within_s=PIPELINE_S, look_s=0.2)
