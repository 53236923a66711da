"""Runs with made-up evaluations, as artifacts of a real store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlpipe.base.manifests import BestReward, IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.config.source import read_config
from rlpipe.stages.evaluation import evaluate
from rlpipe.store.artifacts import commit, write_bytes
from rlpipe.store.documents import sealed
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from tests.paths import PRESETS
from tests.rows import SCORES, fill, to_parquet

MOMENT = "2026-11-30T05:06:07.000+00:00"
Passes = Sequence[Sequence[int]]  # by prompt: of the greedy completion, then of the sampled ones


def run_of(tmp_path: Path, name: str, *sets: str) -> Run:
    """A run with its base model and one iteration, so that it has the versions 0 and 1."""
    where = [f"run={name}", f"store=file://{tmp_path}/store", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    plain = ["sft.num_steps=0", "rl.num_iterations=1", "evaluation.num_completions=2", "evaluation.rewards={exact = 1}"]
    run = create_or_continue(read_config("tiny", [*where, *plain, *sets], PRESETS))
    _commit(run, "base", 0, "policy", {"one.bin": name.encode()}, 0)
    policy = _commit(run, "rl", 0, "policy", {"one.bin": f"{name} 1".encode()}, 1)
    record = IterationRecord(name, 0, 1, {"policy": policy}, -1, {}, [], BestReward(0, 0.5), MOMENT)
    assert run.store.create(run.iteration_key(0), sealed(record))
    return run


def commit_evaluation(run: Run, version: int, passes: Passes, prompt: str = "Spell") -> None:
    """The evaluation of a version in which a rollout has the reward 1 where it passes, else 0."""
    rows = [
        fill(
            {
                "prompt_id": f"words/{place}", "group_index": place, "rollout_index": index, "reward": float(is_right),
                "prompt": f"{prompt} {place}", "prompt_tokens": [1, place], "reward_parts": "{}",
                "completion": f"{run.name}@{version} says {'right' if is_right else 'wrong'}",
            },
            SCORES,
        )
        for place, told in enumerate(passes)
        for index, is_right in enumerate(told)
    ]  # fmt: skip
    phase, iteration = run.policy_place(version)
    files = {"evaluation.parquet": to_parquet(rows, SCORES)}
    _commit(run, phase, iteration, "evaluation", files, version)


def _commit(run: Run, phase: str, iteration: int, stage: str, files: dict[str, bytes], version: int) -> ArtifactRef:
    folder = run.folder(phase, iteration, stage)
    records = [write_bytes(run.store, folder, "a1", name, data) for name, data in files.items()]
    settings = evaluate.settings(run.config) if stage == "evaluation" else {}
    manifest = Manifest(run.name, phase, iteration, stage, {}, "0", settings, records, {}, version, "x", MOMENT, MOMENT)
    return commit(run.store, folder, manifest)[0]
