"""Trainer and engines that take turns in one memory: the same bits as apart, whoever is killed in
whosever turn. A run that nobody kills: e2e/test_lora.py."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.deadlines import PIPELINE_S, until
from tests.living import descendants
from tests.network_world import Node, network
from tests.pipeline import MINI, Folder, Undisturbed, kill_group

pytestmark = pytest.mark.e2e
ITERATIONS = 3
COLOCATED = [*MINI, f"rl.num_iterations={ITERATIONS}", "engines.colocate=true"]
TRAINER, ENGINE, FLOW = "rlpipe.trainer.server", "rlpipe.extras.local_engine.server", "the flow"
NODES = ["trainer.place=elsewhere", "trainer.nodes=2", "engines.place=elsewhere", "engines.nodes=2"]


def offloaded(folder: Folder) -> bool:
    """Whether the trainer's memory is in its file: it is the engines' turn."""
    return any(folder.path.glob(".rlpipe/*/trainer/offload/rank-0"))


def until_turn(folder: Folder, process: subprocess.Popen[str], turn: str) -> None:
    """Until the engines sample iteration 1, or the trainer trains it."""
    if turn == "engines":
        folder.wait_for("a", "rl/00001/prompts/round-0/manifest.json", process)
        until(lambda: offloaded(folder), folder.said, running=process, within_s=PIPELINE_S, look_s=0.01)
    else:
        folder.wait_for("a", "rl/00001/batch/round-0/manifest.json", process)
        until(lambda: not offloaded(folder), folder.said, running=process, within_s=PIPELINE_S, look_s=0.01)


def killed_run(folder: Folder, victim: str, turn: str, *sets: str) -> str:
    """The final policy of a run in which somebody is killed, and which
    ends all the same; its sha256."""
    process = folder.start(*folder.run_arguments("a", *COLOCATED, *sets))
    try:
        until_turn(folder, process, turn)
        if victim == FLOW:
            kill_group(process)
            folder.complete("a", *COLOCATED, *sets)
        else:
            victims = descendants(process, victim)
            assert victims, f"no {victim} runs"
            victims[-1].kill()
            assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0, output
    return folder.final_sha256("a", ITERATIONS)


@pytest.mark.parametrize(
    ("victim", "turn"),
    [
        pytest.param(victim, turn, marks=() if (victim, turn) == (TRAINER, "engines") else pytest.mark.nightly)
        for victim in (TRAINER, ENGINE, FLOW)
        for turn in ("engines", "trainer")
    ],
)
def test_a_kill_in_any_turn_ends_with_the_bits_of_apart(
    folder: Folder, undisturbed: Undisturbed, victim: str, turn: str
) -> None:
    assert killed_run(folder, victim, turn) == undisturbed.sha256(ITERATIONS)


@contextlib.contextmanager
def nodes_of_both(folder: Folder) -> Iterator[tuple[Folder, dict[str, subprocess.Popen[str]]]]:
    """Two nodes with a node of the trainer and a host each, as somebody starts them there; the
    folder as a third node sees it."""
    join, started = ["--store", folder.store, "--run", "a"], dict[str, subprocess.Popen[str]]()
    with network("flow", "node-0", "node-1") as nodes:

        def on(node: Node) -> Folder:
            own = {"RLPIPE_ADDRESS": node.address, "RLPIPE_SERVICE_KEY": "the key of the nodes"}
            return replace(folder, inside=node.inside, environment=own)

        try:
            for number in (0, 1):
                there = on(nodes[f"node-{number}"])
                started[f"trainer-{number}"] = there.start("trainer", *join, "--node", str(number))
                started[f"host-{number}"] = there.start("host", *join)
            yield on(nodes["flow"]), started
        finally:
            for process in started.values():
                kill_group(process)


def nodes_offloaded(folder: Folder) -> int:
    """On how many nodes the trainer's memory is in its file."""
    return sum(1 for _ in folder.path.glob(".rlpipe/trainer-a-node-*/*/trainer/offload/rank-*"))


@pytest.mark.nightly
@pytest.mark.parametrize("turn", ["engines", "trainer"])
def test_nodes_take_turns_and_the_next_start_takes_them_over_without_a_bit_lost(folder: Folder, turn: str) -> None:
    with nodes_of_both(folder) as (here, started):
        flow = here.start(*folder.run_arguments("a", *COLOCATED, *NODES))
        try:
            folder.wait_for("a", "rl/00001/prompts/round-0/manifest.json", flow)
            if turn == "engines":
                until(lambda: nodes_offloaded(folder) == 2, folder.said, running=flow, within_s=PIPELINE_S, look_s=0.01)
            else:
                folder.wait_for("a", "rl/00001/batch/round-0/manifest.json", flow)
                until(lambda: nodes_offloaded(folder) == 0, folder.said, running=flow, within_s=PIPELINE_S, look_s=0.01)
                for process in descendants(started["trainer-1"], TRAINER):
                    process.kill()  # and the trainer processes have to meet again
        finally:
            kill_group(flow)
        here.complete("a", *COLOCATED, *NODES)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    folder.complete("apart", *MINI, f"rl.num_iterations={ITERATIONS}", "trainer.ranks=2")
    assert folder.final_sha256("a", ITERATIONS) == folder.final_sha256("apart", ITERATIONS)


@pytest.mark.nightly
def test_two_ranks_and_two_engines_as_apart(folder: Folder) -> None:
    several = ["trainer.ranks=2", "engines.count=2", "rl.kl=loss", "rl.kl_coef=0.01"]
    sha256 = killed_run(folder, ENGINE, "trainer", *several)
    folder.complete("apart", *COLOCATED, *several, "engines.colocate=false")
    assert folder.final_sha256("apart", ITERATIONS) == sha256
