"""Whether trainer and engine that share a machine's memory ever hold both their shares at once.

    .venv/bin/python benchmarks/colocate.py

A run of three iterations with `engines.colocate`, on a CPU, of a new model of 32M parameters (126
MB of weights in float32, another 252 MB of moments). The memory that each process has alone (USS)
is looked up many times a second. A process holds its share when it has more than half of the
weights above the least that it had when it was the other's turn. Draws docs/colocate-memory.png;
the exit code is 1 when both ever held theirs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import psutil

from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing

PLOT = Path(__file__).parent.parent / "docs" / "colocate-memory.png"
POLL_S, TIMEOUT_S = 0.02, 1800
ITERATIONS = 3
MODEL = [
    "model.hidden_size=512",
    "model.intermediate_size=2048",
    "model.num_layers=8",
    "model.num_heads=8",
    "model.num_kv_heads=4",
]
SMALL = [
    "sft.num_steps=2", "sft.segment_steps=2", "sft.decay_steps=2", "sft.warmup_steps=0", "sft.batch_size=8",
    f"rl.num_iterations={ITERATIONS}", "rl.num_prompts=8", "rl.group_size=4", "rl.shard_prompts=8", "rl.num_steps=2",
    "rl.filters={}",
    "evaluation.every=0", "evaluation.prompts_max=8", "engines.count=1", "engines.threads=1", "trainer.threads=1",
    "trainer.tokens_max=512",
]  # fmt: skip
PROCESSES = {"trainer": "rlpipe.trainer.server", "engine": "rlpipe.extras.local_engine.server"}


@dataclass(frozen=True)
class Look:
    """Memory at one moment, MB by process; a process that does not run has none."""

    at_s: float
    held: dict[str, float]


def watch(folder: Path) -> list[Look]:
    """A run from its start to its end, and what its processes held meanwhile."""
    settings = [*MODEL, *SMALL, "engines.colocate=true", f"store=file://{folder}/store", "tracking.uri="]
    command = [str(Path(sys.executable).parent / "rlpipe"), "run", "tiny", "--run", "shared"]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    environment.pop("PREFECT_API_URL", None)
    looks: list[Look] = []
    started = time.monotonic()
    with (folder / "output.log").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    members: dict[int, str] = {}  # by process id
    try:
        while process.poll() is None:
            assert time.monotonic() - started < TIMEOUT_S, f"it is not done after {TIMEOUT_S} s"
            if len(set(members.values())) < len(PROCESSES):
                members = members_of(process.pid)
            looks.append(Look(time.monotonic() - started, {name: held_mb(members, name) for name in PROCESSES}))
            time.sleep(POLL_S)
    finally:
        process.terminate()
        process.wait(timeout=120)
    assert process.returncode == 0, (folder / "output.log").read_text()[-3000:]
    return looks


def members_of(flow: int) -> dict[int, str]:
    """The trainer's ranks and the engines among the descendants of the flow."""
    members = {}
    for child in psutil.Process(flow).children(recursive=True):
        try:
            line = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        role = next((name for name, word in PROCESSES.items() if word in line[:4]), None)
        if role:
            members[child.pid] = role
    return members


def held_mb(members: dict[int, str], name: str) -> float:
    held = 0.0
    for pid, role in members.items():
        if role == name:
            try:
                held += psutil.Process(pid).memory_full_info().uss / 1e6
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    return held


def least_mb(looks: list[Look], name: str) -> float:
    """The least that a process had but for a few looks: one that ends gives
    its memory back piece by piece."""
    return sorted(look.held[name] for look in looks)[len(looks) // 50]


def report(folder: Path, looks: list[Look]) -> bool:
    """Prints what each held, draws it, and says whether both never held theirs at once."""
    run = open_existing(open_store(f"file://{folder}/store"), "shared")
    weights_mb = run.policy(ITERATIONS)[1].file("model.safetensors").bytes / 1e6
    turns = [look for look in looks if all(look.held.values())]
    parked_mb = least_mb(turns, "trainer")
    # the engine has released for the first time when the trainer comes back after it began
    back = next(
        index for index, look in enumerate(turns) if index and look.held["trainer"] > parked_mb + weights_mb / 2
    )
    least = {"trainer": parked_mb, "engine": least_mb(turns[back:], "engine")}
    both = [look for look in turns if all(look.held[name] > least[name] + weights_mb / 2 for name in PROCESSES)]
    print(f"weights: {weights_mb:.0f} MB; looks at both processes: {len(turns)}")
    for name in PROCESSES:
        print(f"{name:8s} released {least[name]:6.0f} MB, at most {max(look.held[name] for look in turns):6.0f} MB")
    print(
        f"together at most {max(sum(look.held.values()) for look in turns):6.0f} MB; "
        f"both held theirs in {len(both)} looks"
    )
    figure, axes = plt.subplots(figsize=(11, 4))
    begun = next(index for index, look in enumerate(looks) if any(look.held.values()))
    for name in PROCESSES:
        axes.plot(
            [look.at_s - looks[begun].at_s for look in looks[begun:]],
            [look.held[name] for look in looks[begun:]],
            label=name,
        )
    axes.set(
        title=f"memory of one process each, {weights_mb:.0f} MB of weights, {ITERATIONS} iterations",
        xlabel="seconds", ylabel="MB (USS)", ylim=(0, None),
    )  # fmt: skip
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=80)
    return not both


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        looks = watch(Path(scratch))
        return 0 if report(Path(scratch), looks) else 1


if __name__ == "__main__":
    sys.exit(main())
