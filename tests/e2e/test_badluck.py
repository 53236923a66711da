"""Bad luck with a defined answer: graders that fail, a loss that is not finite,
MLflow away, a full disk; and forks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.processes.launch import free_port
from rlpipe.store.opening import open_existing
from tests.deadlines import SHORT_S
from tests.pipeline import MINI, Folder, read_record

pytestmark = pytest.mark.e2e
SHORT = [*MINI, "sft.num_steps=4", "sft.decay_steps=4"]  # one segment of SFT
REWARDS = """
import time

from rlpipe.data.sources import split_point

def brittle(prompt, completion):
    if completion and split_point(prompt["messages"]) >= 0.1:
        raise RuntimeError("this grader breaks on what RL samples, and not in evaluations")
    return 0.0

def flaky(prompt, completion):
    number = int(prompt["prompt_id"].rsplit("/", 1)[-1])
    if number % 4 == 0:
        raise RuntimeError("this grader dislikes multiples of four")
    if number % 32 == 5:
        time.sleep(3600)
    return float(len(completion))

def enormous(prompt, completion):
    return 1e100 * len(completion)
"""


def rewards(name: str) -> str:
    return f'rl.rewards={{"graders:{name}" = 1.0}}'


@pytest.fixture
def folder(folder: Folder) -> Folder:
    (folder.path / "graders.py").write_text(REWARDS)
    return folder


def test_graders_that_raise_or_hang_are_counted_and_an_absent_mlflow_does_no_harm(folder: Folder) -> None:
    away = f"tracking.uri=http://127.0.0.1:{free_port()}"
    two_rounds = ["rl.rounds_max=2", "rl.groups_min=17", "rl.num_prompts=16"]  # one round has 16 groups
    output = folder.complete(
        "a", *SHORT, "rl.num_iterations=2", rewards("flaky"), f"rl.reward_timeout_s={SHORT_S / 2}", *two_rounds, away
    )
    faults: dict[str, float] = {}
    for iteration in range(2):
        metrics = read_record(folder, "a", iteration)["metrics"]
        assert isinstance(metrics, dict)
        assert (metrics["rollout/rounds"], metrics["rollout/groups_kept"]) == (2, 17)  # as many as were asked for
        assert metrics["rollout/num_left_out"] == 0, "a completion may make its grader raise or hang: it is scored"
        assert metrics["rollout/faults_policy"] == sum(
            metrics[name] for name in metrics if name.startswith("rollout/fault_")
        )
        for name, count in metrics.items():
            if name.startswith("rollout/fault_"):
                faults[name] = faults.get(name, 0) + count
    assert faults["rollout/fault_reward_error"] > 0
    assert faults["rollout/fault_reward_timeout"] > 0
    assert "dislikes multiples of four" in output
    assert "MLflow at" in output


@pytest.mark.nightly  # trainer/test_jobs.py has what is refused and said
def test_a_step_that_is_not_finite_is_refused_and_names_its_batch(folder: Folder) -> None:
    code, output = folder.rlpipe(*folder.run_arguments("a", *SHORT, rewards("enormous"), "rl.estimator=dr_grpo"))
    assert code == 1, output[-3000:]
    assert "runs/a/rl/00000/batch" in output
    assert not folder.open_store().exists("runs/a/rl/00000/policy/manifest.json")
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0, output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB; skipped where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.nightly  # store/test_relay.py and test_cache.py have a disk that is full for one file
def test_a_full_disk_fails_the_run_and_a_second_start_goes_on(folder: Folder, small_disk: Path) -> None:
    folder.store = f"file://{small_disk}/store"
    once = [*MINI, "rl.num_iterations=1"]  # its SFT alone is larger than the disk
    code, output = folder.rlpipe(*folder.run_arguments("a", *once))
    assert code == 1, output[-3000:]
    assert "No space left on device" in output
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    subprocess.run(["mount", "-o", "remount,size=600m", str(small_disk)], check=True)
    folder.complete("a", *once)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0


@pytest.mark.nightly
def test_a_fork_shares_its_prefix_goes_on_differently_and_changed_settings_are_refused(folder: Folder) -> None:
    # with a reference, which the trainer loads beside the policy
    mini = [*MINI, "rl.kl=loss", "rl.kl_coef=0.05"]
    folder.complete("a", *mini)
    metrics = read_record(folder, "a", 4)["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["train/kl"] > 0
    code, output = folder.rlpipe(*folder.run_arguments("a", *mini, "rl.clip_high=0.4"))
    assert code == 2
    assert "rl.clip_high: 0.4 -> 0.28" in output or "rl.clip_high: 0.28 -> 0.4" in output
    assert "rlpipe fork a" in output
    assert "rlpipe resume a" in output
    code, output = folder.rlpipe(
        "fork", "a", "--at", "2", "--run", "c", "--set", "rl.learning_rate=0.001", "--store", folder.store
    )
    assert code == 0, output[-3000:]
    assert not folder.open_store().exists("runs/c/rl/00002/iteration.json")
    assert folder.open_store().exists("runs/c/rl/00003/iteration.json")
    assert folder.rlpipe("verify", "c", "--store", folder.store)[0] == 0
    assert folder.final_sha256("c", 5) != folder.final_sha256("a", 5)
    listed = folder.rlpipe("runs", "--store", folder.store)[1]
    assert "forked from a at 2" in listed
    assert "RL iterations 5/5" in listed


@pytest.mark.nightly
def test_a_reward_that_breaks_after_sft_costs_no_sft(folder: Folder) -> None:
    short = [*SHORT, "rl.num_iterations=1"]
    code, output = folder.rlpipe(*folder.run_arguments("a", *short, rewards("brittle")))
    assert code == 2, output[-3000:]
    assert "this grader breaks on what RL samples" in output
    assert "rlpipe fork a --at sft --run NEW" in output
    (folder.path / "sums.jsonl").write_text(json.dumps({"prompt": "What is 2 + 2?", "answer": "4"}) + "\n")
    changes = ["rl.rewards={exact = 1.0, format = 0.5}", "data.words.source=sums.jsonl", "data.words.part=all"]
    fork = ["fork", "a", "--at", "sft", "--run", "b", "--store", folder.store]
    code, output = folder.rlpipe(*fork, *[part for change in changes for part in ("--set", change)])
    assert code == 0, output[-3000:]
    assert "run b is forked from a at sft" in output
    store = folder.open_store()
    assert store.folders("runs/b/sft") == ["00000"]
    assert store.folders("runs/b/sft/00000") == [
        "evaluation"
    ]  # the parent's was made with the other reward, on other prompts
    runs = [open_existing(store, name) for name in ("a", "b")]
    assert len({run.policy(0)[1].file("model.safetensors").sha256 for run in runs}) == 1
    assert {*folder.evaluation("b", 0)} != {*folder.evaluation("a", 0)}
    assert folder.rlpipe("verify", "b", "--store", folder.store)[0] == 0
