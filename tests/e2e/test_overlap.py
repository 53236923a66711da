"""One step off policy: the next iteration is sampled while this one is trained, by
the policy that it starts from."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from tests.living import descendants
from tests.pipeline import MINI, Folder, kill_group, read_record

pytestmark = pytest.mark.e2e
ITERATIONS = 5
OVERLAPPED = [*MINI, "rl.overlap=iteration"]
TRAINER, ENGINE = "rlpipe.trainer.server", "rlpipe.extras.local_engine.server"


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Folder:
    path = tmp_path_factory.mktemp("undisturbed")
    folder = Folder(path, f"file://{path}/store", prefect_api)
    folder.complete("a", *OVERLAPPED)
    return folder


@pytest.mark.first
def test_each_iteration_is_trained_on_what_the_version_before_sampled(overlapped: Folder) -> None:
    run = open_existing(overlapped.open_store(), "a")
    for iteration in range(ITERATIONS):
        lag, metrics = int(iteration > 0), run.record(iteration).metrics
        assert metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == lag
        _, shard = run.committed("rl", iteration, "rollouts/round-0/shard-000")
        assert (
            shard.inputs["policy"] == run.policy(iteration - lag)[0].sha256 and shard.weight_version == iteration - lag
        )
        assert metrics["time/generate_s"] > 0 and metrics["time/orchestration_s"] >= 0
        assert (metrics["train/mismatch_abs_mean"] < 1e-4) == (lag == 0), "the policy has moved since it sampled"
    began, ended = sampled_while_trained(run, 2)
    assert began < ended, "iteration 3 was sampled before iteration 2 was trained"


def sampled_while_trained(run: Run, iteration: int) -> tuple[datetime, datetime]:
    """When the sampling of the next iteration began, and when the
    policy of this one was committed."""
    shard, policy = run.committed("rl", iteration + 1, "rollouts/round-0/shard-000")[1], run.policy(iteration + 1)[1]
    return datetime.fromisoformat(shard.started_at), datetime.fromisoformat(policy.ended_at)


@pytest.mark.nightly
def test_trainer_engine_and_flow_are_killed_and_it_ends_with_the_same_bits(overlapped: Folder, tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    process = folder.start(*folder.run_arguments("a", *OVERLAPPED))
    try:
        for iteration, victim in ((1, TRAINER), (2, ENGINE)):
            folder.wait_for("a", f"rl/{iteration:05d}/prompts/round-0/manifest.json", process)
            descendants(process, victim)[-1].kill()
        folder.wait_for("a", "rl/00004/prompts/round-0/manifest.json", process)  # iteration 3 is trained
    finally:
        kill_group(process)
    assert read_record(folder, "a", 2) and not folder.open_store().exists("runs/a/rl/00004/iteration.json")
    folder.complete("a", *OVERLAPPED)
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0, output
    assert folder.final_sha256("a", ITERATIONS) == overlapped.final_sha256("a", ITERATIONS)


@pytest.mark.nightly
def test_a_fork_samples_what_nobody_did_ahead_of_it(overlapped: Folder) -> None:
    """Alone, with the version before the one that it stands at: what its parent
    sampled ahead is the parent's."""
    code, output = overlapped.rlpipe("fork", "a", "--at", "2", "--run", "b", "--store", overlapped.store)
    assert code == 0, output
    shard = "rl/00003/rollouts/round-0/shard-000/manifest.json"
    assert overlapped.open_store().exists(f"runs/b/{shard}")
    assert overlapped.final_sha256("b", ITERATIONS) == overlapped.final_sha256("a", ITERATIONS)


@pytest.mark.nightly
def test_where_the_next_batch_cannot_be_had_the_iteration_before_it_is_committed(tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    (tmp_path / "filters_of_mine.py").write_text(
        "def old(group, threshold):\n    return 'old' if group[0]['weight_version'] >= threshold else None\n"
    )
    failing = ["rl.filters={'filters_of_mine:old' = 1.0}", "rl.on_too_few=fail", "sft.num_steps=4", "sft.decay_steps=4"]
    code, output = folder.rlpipe(*folder.run_arguments("a", *OVERLAPPED, *failing))
    assert code != 0 and "rl.groups_min=1: only 0 groups survived" in output, output[
        -3000:
    ]  # of iteration 2, by version 1
    assert read_record(folder, "a", 1) and not folder.open_store().exists("runs/a/rl/00002/policy/manifest.json")
