"""Do two checkouts compute the same?

Small pipelines with the code of each; policies, Parquet files, inputs and settings are compared.

usage: .venv/bin/python scripts/same_bits.py OLD NEW [FOLDER]
           (a checkout each; about 25 minutes on two cores)

The runs `begun` are begun by OLD, go on with NEW, and have to end as those that OLD did alone. A
run that fails counts as a difference, and the others go on. Needs nothing of rlpipe itself.
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
    "sft.num_steps=12", "sft.segment_steps=4", "sft.decay_steps=12", "sft.warmup_steps=2", "sft.batch_size=16",
    "rl.num_prompts=8",
    "rl.group_size=4", "rl.shard_prompts=4", "rl.warmup_steps=2", "rl.filters={}", "evaluation.every=2",
    "evaluation.prompts_max=8", "checkpoint.state_every=2", "tracking.uri=",
]  # fmt: skip
TINY = [
    *SMALL, "data.short_words.rows_max=400", "data.all_words.rows_max=100", "data.words.rows_max=300", "rl.num_steps=2",
    "rl.num_iterations=5",
]  # fmt: skip
CALCULATOR = [*SMALL, "data.demonstrations.rows_max=300", "data.products.rows_max=200", "rl.num_iterations=3"]
MANY_OPTIONS = [
    "seed=1", "sft.validation_fraction=0.1", "rl.filters={nonzero_std=0.0}", "rl.rounds_max=2", "rl.groups_min=6",
    "rl.kl=loss",
    "rl.kl_coef=0.01", "rl.curriculum=band", "rl.mask_truncated=true", "trainer.ranks=2", "engines.count=2",
    "rl.num_iterations=4",
]  # fmt: skip
AGENT = [
    *SMALL,
    "data.demonstrations.rows_max=300",
    "data.products.rows_max=200",
    "evaluation.every=0",
    "rl.num_iterations=2",
]
# defaults that have changed: a run that goes on does not give them, and keeps what it began with
AS_IT_WAS = ["rl.reward_fallback=0.0", "evaluation.pass_threshold=1.0"]
SINCE = {"control_tokens": "model.control_tokens=as_written"}  # fields that OLD may not know
STEPS = ["rl.overlap=steps", "rl.num_iterations=4"]
RUNS: dict[str, list[str]] = {
    "plain": ["run", "tiny", *TINY],
    "options": ["run", "tiny", *TINY, *MANY_OPTIONS],
    "environment": ["run", "calculator", *CALCULATOR],
    "agent": ["run", "agent", *AGENT],
    "branches": ["run", "agent", *AGENT, "rl.branches=all"],
    "lora": ["run", "tiny", *TINY, "model.adapter=lora", "rl.num_iterations=3"],
    "deltas": [
        "run",
        "tiny",
        *TINY,
        "checkpoint.full_every=3",
        "checkpoint.keep_policies_last=2",
        "checkpoint.keep_states=1",
    ],
    "colocated": ["run", "tiny", *TINY, "engines.colocate=true", "rl.num_iterations=3"],
    "whitened": ["run", "tiny", *TINY, "rl.estimator=reinforce_plus_plus_baseline", "rl.num_iterations=3"],
    "iteration": ["run", "tiny", *TINY, "rl.overlap=iteration", "rl.importance=token_truncate", "rl.num_iterations=4"],
    "steps": ["run", "tiny", *TINY, *STEPS],
    "stored": ["run", "tiny", *TINY, "rl.rollouts_from=run:plain"],
    "redone": ["fork", "plain", "--at", "2", "--redo", "score", "rl.rewards={exact=1.0}"],
    "forked": ["fork", "plain", "--at", "2", "rl.clip_high=0.4"],
}
BEGUN = {  # by OLD, so many iterations, and ended by NEW: the run that it has to end as
    "plain": ["run", "tiny", *TINY, "rl.num_iterations=2"],
    "deltas": [*RUNS["deltas"], "rl.num_iterations=2"],
    "steps": ["run", "tiny", *TINY, *STEPS, "rl.num_iterations=2"],
}
COMPARED = (
    "tokenizer", "probe", "reference", "data", "selection", "imported", "prompts", "rollouts", "scores", "batch",
    "evaluation", "policy", "state", "gap",
)  # fmt: skip


def rlpipe(code: Path, folder: Path, arguments: list[str]) -> bool:
    """`rlpipe` with the code of a checkout; what looks like a setting becomes one.

    Returns whether it succeeded, and prints why not.
    """
    command = [part for entry in arguments for part in (["--set", entry] if "=" in entry else [entry])]
    environment = {**os.environ, "PYTHONPATH": str(code), "PREFECT_HOME": str(folder / "prefect")}
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        print(f"{code}: rlpipe {' '.join(command)} failed\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}", flush=True)
    return ended.returncode == 0


def since(code: Path) -> list[str]:
    """The settings of SINCE whose field a checkout knows."""
    fields = "".join(path.read_text() for path in (code / "rlpipe" / "config").glob("*.py"))
    return [setting for field, setting in SINCE.items() if f"{field}:" in fields]


def facts(folder: Path, run: str, as_stored: bool) -> Iterator[tuple[str, object]]:
    """(stage, what it came to) of every committed stage: files by name and hash, settings, names of
    inputs from inside the run.

    `as_stored`: of a policy that is stored as a difference, that file too. It names its run, and
    whether a policy has one depends on what was planned as the last.
    """
    for path in sorted((folder / "rlpipe-store" / "runs" / run).rglob("manifest.json")):
        manifest = json.loads(path.read_text())
        if manifest["stage"].split("/", 1)[0] in COMPARED:
            files = sorted(
                (record["name"].rpartition("/")[2], content(path.parent, record))
                for record in whole_files(path.parent, manifest)
                if as_stored or not record["name"].endswith(("/delta.json", ".xor.zst"))
            )
            inputs = sorted(name for name in manifest["inputs"] if not name.startswith("source "))
            stage = f"{manifest['phase']}/{manifest['iteration']:05d}/{manifest['stage']}"
            yield (
                stage,
                (files, manifest["settings_sha256"], inputs, manifest["weight_version"], steering(manifest["metrics"])),
            )


def content(folder: Path, record: dict[str, Any]) -> object:
    """The hash of a file; of one that names other artifacts, what it says but for their hashes,
    which are of manifests with times."""
    file = folder / record["name"]
    if file.name in ("base.json", "delta.json", "state.json") and file.exists():  # a pruned one is not
        return json.dumps(without_hashes(json.loads(file.read_text())))
    return record["sha256"]


def without_hashes(part: Any) -> Any:
    """A document without the hashes of references: those of objects with a folder."""
    if isinstance(part, list):
        return [without_hashes(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    return {
        key: without_hashes(value)
        for key, value in part.items()
        if key not in ("sha256", "seal") or (key == "sha256" and "folder" not in part)
    }


def steering(metrics: dict[str, Any]) -> dict[str, Any]:
    """What of the metrics steers a run: names without a slash, and no time."""
    return {name: value for name, value in metrics.items() if "/" not in name and not name.endswith("_s")}


def whole_files(folder: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The files of an artifact, and what they are when whole where a
    policy is stored as a difference."""
    deltas = [folder / record["name"] for record in manifest["files"] if record["name"].endswith("/delta.json")]
    return [*manifest["files"], *(json.loads(deltas[0].read_text())["files"] if deltas else [])]


def compared(old: Path, new: Path, run: str, other: str = "") -> int:
    """Prints what differs; how much that is."""
    before, after = (dict(facts(folder, name, not other)) for folder, name in ((old, run), (new, other or run)))
    if not before:
        print(f"{run}: nothing was committed", flush=True)
        return 1
    differ = [stage for stage in sorted({*before, *after}) if before.get(stage) != after.get(stage)]
    print(f"{other or run}: {len(before)} stages, {len(differ)} differ", *differ[:10], sep="\n  ", flush=True)
    return len(differ)


def main() -> None:
    """Exits with 1 when something differs."""
    old, new, *more = (Path(argument).resolve() for argument in sys.argv[1:])
    root = more[0] if more else Path(tempfile.mkdtemp())
    folders = {code: root / name for code, name in ((old, "old"), (new, "new"))}
    settings = {code: [*AS_IT_WAS, *since(code)] for code in (old, new)}
    differences = 0
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    for run, arguments in RUNS.items():
        given = {
            code: settings[code] if arguments[0] == "run" else [] for code in folders
        }  # a fork has those of its run
        ended = [rlpipe(code, folder, [*arguments, "--run", run, *given[code]]) for code, folder in folders.items()]
        differences += compared(folders[old], folders[new], run) + ended.count(False)
    for run, arguments in BEGUN.items():
        begun, here = f"{run}_begun", folders[old]
        ended = [
            rlpipe(old, here, [*arguments, "--run", begun, *settings[old]]),
            rlpipe(new, here, [*RUNS[run], "--run", begun]),
            rlpipe(new, here, ["verify", begun]),
            rlpipe(new, here, ["show", begun]),
        ]
        differences += compared(here, here, run, begun) + ended.count(False)
    raise SystemExit(bool(differences))


if __name__ == "__main__":
    main()
