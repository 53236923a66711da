"""Trainer and engines that take turns in one memory: the same bits as apart, whoever is killed in whosever turn."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import pytest

from tests.pipeline import MINI, Folder, Undisturbed, descendants, kill_group

pytestmark = pytest.mark.e2e
ITERATIONS = 3
COLOCATED = [*MINI, f"rl.num_iterations={ITERATIONS}", "engines.colocate=true"]
TRAINER, ENGINE, FLOW = "rlpipe.trainer.server", "rlpipe.engines.local.server", "the flow"
DEADLINE_S = 180.0


def offloaded(folder: Folder) -> bool:
    """Whether the trainer's memory is in its file: it is the engines' turn."""
    return any(folder.path.glob(".rlpipe/*/trainer/offload/rank-0"))


def until(process: subprocess.Popen[str], folder: Folder, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert process.poll() is None, f"it ended first:\n{(folder.path / 'output.log').read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not reached in {DEADLINE_S} s"
        time.sleep(0.01)


def until_turn(folder: Folder, process: subprocess.Popen[str], turn: str) -> None:
    """Until the engines sample iteration 1, or the trainer trains it."""
    if turn == "engines":
        folder.wait_for("a", "rl/00001/prompts/round-0/manifest.json", process)
        until(process, folder, lambda: offloaded(folder))
    else:
        folder.wait_for("a", "rl/00001/batch/round-0/manifest.json", process)
        until(process, folder, lambda: not offloaded(folder))


def killed_run(folder: Folder, victim: str, turn: str, *sets: str) -> str:
    """The final policy of a run in which somebody is killed, and which ends all the same; its sha256."""
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
            assert process.wait(timeout=300) == 0, (folder.path / "output.log").read_text()[-4000:]
    finally:
        kill_group(process)
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0, output
    return folder.final_sha256("a", ITERATIONS)


@pytest.mark.parametrize(
    ("victim", "turn"),
    [
        (TRAINER, "engines"),
        *(
            pytest.param(victim, turn, marks=pytest.mark.nightly)
            for victim, turn in [
                (ENGINE, "trainer"),
                (FLOW, "engines"),
                (FLOW, "trainer"),
                (ENGINE, "engines"),
                (TRAINER, "trainer"),
            ]
        ),
    ],
)
def test_a_kill_in_any_turn_ends_with_the_bits_of_apart(
    folder: Folder, undisturbed: Undisturbed, victim: str, turn: str
) -> None:
    assert killed_run(folder, victim, turn) == undisturbed.sha256(ITERATIONS)


@pytest.mark.nightly
def test_two_ranks_and_two_engines_as_apart(folder: Folder) -> None:
    several = ["trainer.ranks=2", "engines.count=2", "rl.kl=loss", "rl.kl_coef=0.01"]
    sha256 = killed_run(folder, ENGINE, "trainer", *several)
    folder.complete("apart", *COLOCATED, *several, "engines.colocate=false")
    assert folder.final_sha256("apart", ITERATIONS) == sha256
