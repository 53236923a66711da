"""A run that a budget or a stop rule ends goes on, when it is raised, to the same bits."""

from __future__ import annotations

import pytest
from mlflow import MlflowClient

from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from tests.pipeline import MINI, Folder, Undisturbed, read_record

pytestmark = pytest.mark.e2e
ITERATIONS = 5


@pytest.mark.nightly
def test_a_stopped_run_goes_on_to_the_same_bits(folder: Folder, undisturbed: Undisturbed) -> None:
    tokens = read_record(undisturbed.folder, "a", 2)["metrics"]["spent/rollout_tokens"]  # type: ignore[index]
    code, output = folder.rlpipe(*folder.run_arguments("a", *MINI, f"budget.rollout_tokens={tokens}"))
    assert code == 3, output
    assert f"was stopped: budget.rollout_tokens={tokens:g} is spent" in output
    assert f"3 of {ITERATIONS} iterations are committed" in output
    assert (folder.path / "a-curves.png").exists()
    assert Progress(open_existing(folder.open_store(), "a")).num_committed("rl", ITERATIONS) == 3
    code, output = folder.rlpipe(
        *folder.run_arguments("a", *MINI, "stop.reward_plateau=1", "rl.on_mismatch=stop", "rl.mismatch_max=1e-12")
    )
    assert code == 3 and ("stop.reward_plateau=1" in output or "rl.mismatch_max" in output), (
        output
    )  # and no iteration more
    assert Progress(open_existing(folder.open_store(), "a")).num_committed("rl", ITERATIONS) == 3
    folder.complete("a", *MINI, f"budget.rollout_tokens={100 * tokens}")
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.sha256(ITERATIONS)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0


def test_a_budget_that_is_spent_in_sft_ends_there(folder: Folder) -> None:
    code, output = folder.rlpipe(*folder.run_arguments("a", *MINI, "budget.wall_clock_h=1e-7"))
    assert code == 3, output
    assert "budget.wall_clock_h=1e-07 is spent" in output and "1 of 3 SFT segments are committed" in output
    assert not Progress(open_existing(folder.open_store(), "a")).sft_complete


def test_a_run_in_which_nothing_is_kept_says_so_and_registers_nothing(folder: Folder) -> None:
    nothing = ["sft.num_steps=0", "rl.num_iterations=1", "rl.filters={min_reward = 9.0}"]
    code, output = folder.rlpipe(*folder.run_arguments("a", *MINI, *nothing))
    assert code == 4, output
    assert "nothing was trained (low_reward " in output and "MLflow" not in output
    assert "run a trained nothing: nothing was trained in 1 of 1 iterations" in output
    assert not MlflowClient(f"sqlite:///{folder.path}/mlflow.db").search_registered_models()
