"""Do two checkouts compute the same? Small pipelines with the code of each; policies, Parquet files, inputs and settings are compared.

usage: .venv/bin/python scripts/same_bits.py OLD NEW [FOLDER]     (a checkout each; about 10 minutes on two cores)

The last run is begun by OLD, goes on with NEW, and has to end as the one that OLD did alone. Needs nothing of rlpipe itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SMALL = [
    "sft.num_steps=12", "sft.segment_steps=4", "sft.decay_steps=12", "sft.warmup_steps=2", "sft.batch_size=16", "rl.num_prompts=8",
    "rl.group_size=4", "rl.shard_prompts=4", "rl.warmup_steps=2", "rl.filters={}", "evaluation.every=2",
    "evaluation.prompts_max=8", "checkpoint.state_every=2", "tracking.uri=",
]  # fmt: skip
TINY = [
    *SMALL, "data.short_words.rows_max=400", "data.all_words.rows_max=100", "data.words.rows_max=300", "rl.num_steps=2",
    "rl.num_iterations=5",
]  # fmt: skip
CALCULATOR = [*SMALL, "data.demonstrations.rows_max=300", "data.products.rows_max=200", "rl.num_iterations=3"]
MANY_OPTIONS = [
    "seed=1", "sft.validation_fraction=0.1", "rl.filters={nonzero_std=0.0}", "rl.rounds_max=2", "rl.groups_min=6", "rl.kl=loss",
    "rl.kl_coef=0.01", "rl.curriculum=band", "rl.mask_truncated=true", "trainer.ranks=2", "engines.count=2",
    "rl.num_iterations=4",
]  # fmt: skip
AS_IT_WAS = (
    "rl.reward_fallback=0.0"  # a default that has changed; the run that goes on does not give it, and keeps what it began with
)
RUNS: dict[str, list[str]] = {
    "plain": ["run", "tiny", "--run", "plain", *TINY, AS_IT_WAS],
    "options": ["run", "tiny", "--run", "options", *TINY, *MANY_OPTIONS, AS_IT_WAS],
    "environment": ["run", "calculator", "--run", "environment", *CALCULATOR, AS_IT_WAS],
    "stored": ["run", "tiny", "--run", "stored", *TINY, "rl.rollouts_from=run:plain", AS_IT_WAS],
    "redone": ["fork", "plain", "--at", "2", "--run", "redone", "--redo", "score", "rl.rewards={exact=1.0}"],
    "forked": ["fork", "plain", "--at", "2", "--run", "forked", "rl.clip_high=0.4"],
}
COMPARED = ("data", "prompts", "rollouts", "scores", "batch", "evaluation", "policy", "state")


def rlpipe(code: Path, folder: Path, arguments: list[str]) -> None:
    """`rlpipe` with the code of a checkout; what looks like a setting becomes one."""
    command = [part for entry in arguments for part in (["--set", entry] if "=" in entry else [entry])]
    environment = {**os.environ, "PYTHONPATH": str(code), "PREFECT_HOME": str(folder / "prefect")}
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"{code}: rlpipe {' '.join(command)} failed\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")


def facts(folder: Path, run: str) -> Iterator[tuple[str, object]]:
    """(stage, what it came to) of every committed stage: files by name and hash, settings, names of inputs from inside the run."""
    for path in sorted((folder / "rlpipe-store" / "runs" / run).rglob("manifest.json")):
        manifest = json.loads(path.read_text())
        if manifest["stage"].split("/", 1)[0] in COMPARED:
            files = sorted(
                (record["name"].rpartition("/")[2], record["sha256"]) for record in whole_files(path.parent, manifest)
            )
            inputs = sorted(name for name in manifest["inputs"] if not name.startswith("source "))
            stage = f"{manifest['phase']}/{manifest['iteration']:05d}/{manifest['stage']}"
            yield stage, (files, manifest["settings_sha256"], inputs)


def whole_files(folder: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The files of an artifact as they are when whole, also of a policy that is stored as a difference."""
    deltas = [folder / record["name"] for record in manifest["files"] if record["name"].endswith("/delta.json")]
    return json.loads(deltas[0].read_text())["files"] if deltas else manifest["files"]


def compared(old: Path, new: Path, run: str, other: str = "") -> int:
    """Prints what differs; how much that is."""
    before, after = dict(facts(old, run)), dict(facts(new, other or run))
    assert before, f"the run {run} committed nothing"
    differ = [stage for stage in sorted({*before, *after}) if before.get(stage) != after.get(stage)]
    print(f"{other or run}: {len(before)} stages, {len(differ)} differ", *differ[:10], sep="\n  ", flush=True)
    return len(differ)


def main() -> None:
    """Exits with 1 when something differs."""
    old, new, *more = (Path(argument).resolve() for argument in sys.argv[1:])
    root = more[0] if more else Path(tempfile.mkdtemp())
    folders = {code: root / name for code, name in ((old, "old"), (new, "new"))}
    differences = 0
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    for run, arguments in RUNS.items():
        for code, folder in folders.items():
            rlpipe(code, folder, arguments)
        differences += compared(folders[old], folders[new], run)
    begun = ["run", "tiny", "--run", "begun", *TINY]
    rlpipe(old, folders[old], [*begun, "rl.num_iterations=2", AS_IT_WAS])
    rlpipe(new, folders[old], begun)
    rlpipe(new, folders[old], ["verify", "begun"])
    rlpipe(new, folders[old], ["show", "begun"])
    differences += compared(folders[old], folders[old], "plain", "begun")
    raise SystemExit(bool(differences))


if __name__ == "__main__":
    main()
