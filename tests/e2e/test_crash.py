"""Kill anything at any moment: the run ends with the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S, PIPELINE_S
from tests.living import descendants, until_all_gone
from tests.pipeline import MINI, Folder, Undisturbed, kill_group

pytestmark = pytest.mark.e2e
ITERATIONS = 5
# iterations of a run that is killed once: at each version the undisturbed one has the same bits
SHORT = 4


@pytest.mark.first
@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.soak)])
def test_kill_the_whole_group_at_random_moments(tmp_path: Path, undisturbed: Undisturbed, kills: int) -> None:
    """With a Prefect server of its own and MLflow: they are killed too."""
    folder, moments = Folder(tmp_path, f"file://{tmp_path}/store", tracked=True), random.Random(7)
    for _ in range(kills):
        process = folder.start(*folder.run_arguments("a", *MINI))
        time.sleep(moments.uniform(0.2, 0.9) * undisturbed.duration_s)
        kill_group(process)
    folder.complete("a", *MINI)
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0, output
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.sha256()


@pytest.mark.parametrize(
    "victim",
    [
        "rlpipe.trainer.server",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("rlpipe.trainer.launcher", "rlpipe.extras.local_engine.server")
        ),
    ],
)
def test_kill_a_service_in_the_middle_and_the_run_goes_on_by_itself(
    folder: Folder, undisturbed: Undisturbed, victim: str
) -> None:
    sets = [*MINI, f"rl.num_iterations={SHORT}"]
    process = folder.start(*folder.run_arguments("a", *sets))
    try:
        folder.wait_for("a", "rl/00002/prompts/round-0/manifest.json", process)
        victims = descendants(process, victim)
        assert victims, f"no {victim} runs"
        victims[-1].kill()
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    assert folder.final_sha256("a", SHORT) == undisturbed.sha256(SHORT)


def test_kill_the_flow_alone_and_its_services_are_gone_and_a_second_start_is_refused(tmp_path: Path) -> None:
    """A Prefect server of its own is one of them.

    The run goes on in `e2e/test_nights.py`, to the same bits.
    """
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    process = folder.start(*folder.run_arguments("a", *MINI))
    try:
        folder.wait_for("a", "sft/00000/policy/manifest.json", process)
        code, output = folder.rlpipe(*folder.run_arguments("a", *MINI))
        assert code == 2
        assert f"held by pid {process.pid}" in output
        folder.wait_for("a", "rl/00000/iteration.json", process)
        services = descendants(process, "python")
        assert len(services) >= 4
        process.kill()
        process.wait(timeout=DEADLINE_S)
        until_all_gone(services)
    finally:
        kill_group(process)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
