"""Runs whose trainer and engines are services of their own: found, killed, adopted by the next
start, ended when nobody needs them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.services.registration import ENGINES, TRAINER, registered
from tests.deadlines import DEADLINE_S
from tests.living import descendants
from tests.network_world import Node, network
from tests.pipeline import IDLE_S, MINI, SLOW_WORDS, Folder, kill_group

pytestmark = pytest.mark.e2e
SHORT = [*MINI, "rl.num_iterations=3"]
ELSEWHERE = ["trainer.place=elsewhere", "trainer.nodes=2", "engines.place=elsewhere"]


@contextlib.contextmanager
def services(folder: Folder, nodes: dict[str, Node]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two nodes of a trainer and a host, as somebody starts them on three nodes."""
    join = ["--store", folder.store, "--run", "a"]
    started = {
        f"node-{node}": on(nodes[f"node-{node}"], folder).start("trainer", *join, "--node", str(node))
        for node in (0, 1)
    }
    started["host"] = on(nodes["host"], folder).start("host", *join, "--idle-timeout-s", "600")
    try:
        yield started
    finally:
        for process in started.values():
            kill_group(process)


def on(node: Node, folder: Folder) -> Folder:
    """The folder, shared by all nodes, as that node sees it."""
    own = {"RLPIPE_ADDRESS": node.address, "RLPIPE_SERVICE_KEY": "the key of the nodes"}
    return replace(folder, inside=node.inside, environment=own)


@pytest.fixture
def two_ranks(tmp_path: Path, prefect_api: dict[str, str]) -> Folder:
    (tmp_path / "two-ranks").mkdir()
    folder = Folder(tmp_path / "two-ranks", f"file://{tmp_path}/two-ranks-store", prefect_api)
    folder.complete("a", *SHORT, "trainer.ranks=2")
    return folder


def test_a_trainer_of_two_nodes_loses_one_and_the_next_start_of_the_flow_adopts_all(
    folder: Folder, two_ranks: Folder
) -> None:
    with network("flow", "node-0", "node-1", "host") as nodes, services(folder, nodes) as started:
        here = on(nodes["flow"], folder)
        flow = started["flow"] = here.start(*folder.run_arguments("a", *SHORT, *ELSEWHERE))
        folder.wait_for("a", "rl/00000/iteration.json", flow)
        for process in descendants(started["node-1"], "rlpipe.trainer.server"):  # the rank, and the launcher above it
            process.kill()  # all trainer processes have to meet again
        folder.wait_for("a", "rl/00001/iteration.json", flow)
        kill_group(started.pop("flow"))  # and then nobody asks for anything
        urls = {record.name: record.url for record in registered(folder.open_store(), "runs/a", TRAINER)}
        assert list(urls) == ["node-0", "node-1"] and nodes["node-0"].address in urls["node-0"]
        before = registered(folder.open_store(), "runs/a", ENGINES)
        assert all(process.poll() is None for process in started.values())
        here.complete("a", *SHORT, *ELSEWHERE)
        assert registered(folder.open_store(), "runs/a", ENGINES) == before
        for process in started.values():
            process.terminate()
        assert [process.wait(timeout=DEADLINE_S) for process in started.values()] == [0, 0, 0]
    assert not registered(folder.open_store(), "runs/a", TRAINER) and not registered(
        folder.open_store(), "runs/a", ENGINES
    )
    logs = [log.read_text() for log in folder.path.glob(".rlpipe/trainer-a-node-*/*/trainer.log")]
    assert len(logs) == 2 and not any("SignalException" in log for log in logs)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    assert folder.final_sha256("a", 3) == two_ranks.final_sha256("a", 3)


@pytest.mark.nightly
def test_services_wait_for_a_slow_preflight_and_a_long_sft_and_end_by_themselves_when_their_flow_is_gone(
    folder: Folder,
) -> None:
    """Nobody would start them again: they are idle, however little they are asked for, only when
    nobody works on the run."""
    (folder.path / "slow_words.py").write_text(SLOW_WORDS)
    join = ["--store", folder.store, "--run", "a", "--idle-timeout-s", str(IDLE_S)]
    slow = ["data.all_words.source=slow_words:rows", "trainer.place=elsewhere", "engines.place=elsewhere"]
    with network("flow", "node-0", "host") as nodes:
        started = [on(nodes["node-0"], folder).start("trainer", *join), on(nodes["host"], folder).start("host", *join)]
        flow = on(nodes["flow"], folder).start(*folder.run_arguments("a", *MINI, *slow))
        try:
            folder.wait_for("a", "rl/00000/iteration.json", flow)
            assert [process.poll() for process in started] == [None, None]
            kill_group(flow)
            assert [process.wait(timeout=DEADLINE_S) for process in started] == [0, 0], folder.said()
            for kind in (TRAINER, ENGINES):
                assert not registered(folder.open_store(), "runs/a", kind)
        finally:
            for process in (flow, *started):
                kill_group(process)
