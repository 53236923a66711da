"""Whether an adapter learns what full training learns: RL of both from the same
models, over seeds and presets.

    .venv/bin/python benchmarks/lora.py [--presets tiny:20:4 smollm2:6:10] [--seeds 3]
        [--folder DIR]

A preset has its number of RL iterations behind it, and how many times the preset's learning rate
the adapter's is; smollm2 is there after `make smollm2`.

For each preset and seed: SFT of the preset, full training, makes the model that both start from.
Then RL at the preset's own learning rate, and RL of an adapter at so many times that. A folder that
is named keeps the runs: the same command goes on where it was. Prints a table (final reward is the
mean over the last TAIL iterations; the standard error is over seeds), and draws
docs/lora-curves.png.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from rlpipe.config.source import read_config
from rlpipe.models.whole import whole_policy
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress

ROOT = Path(__file__).parent.parent
PRESETS, PLOT = ROOT / "flows" / "presets", ROOT / "docs" / "lora-curves.png"
RANK, ALPHA = 16, 32.0
TAIL = 5
TIMEOUT_S = 4 * 3600


@dataclass(frozen=True)
class Trained:
    """One RL run. `reload_s`: the median time of reload_engines."""

    rewards: list[float]
    policy_bytes: int
    reload_s: float
    iteration_s: float

    @property
    def final(self) -> float:
        return fmean(self.rewards[-TAIL:])


def rlpipe_run(folder: Path, preset: str, run: str, *sets: str) -> None:
    """Starts a run, or goes on with it, to its end."""
    settings = [f"store=file://{folder}/store", "tracking.uri=", *sets]
    command = [str(Path(sys.executable).parent / "rlpipe"), "run", preset, "--run", run]
    for setting in settings:
        command += ["--set", setting]
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    with (folder / f"{run}.log").open("a") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=TIMEOUT_S, check=True)


def train(folder: Path, preset: str, seed: int, iterations: int, adapter_rate: float | None) -> Trained:
    """RL from the model that the preset's SFT makes; of an adapter at `adapter_rate` times the
    preset's learning rate."""
    config = read_config(preset, [], PRESETS)
    store, base = open_store(f"file://{folder}/store"), f"{preset}-sft-{seed}"
    rlpipe_run(folder, preset, base, f"seed={seed}", "rl.num_iterations=0", "evaluation.prompts_max=1")
    model = whole_policy(store, open_existing(store, base).policy(0)[0], folder / "models")
    rate = config.rl.learning_rate * (adapter_rate or 1)
    sets = [f"seed={seed}", f"model.path={model}", "sft.num_steps=0", f"rl.num_iterations={iterations}",
            f"rl.learning_rate={rate}",
            "evaluation.every=0", "evaluation.prompts_max=1"]  # fmt: skip
    if adapter_rate:
        sets += ["model.adapter=lora", f"model.adapter_rank={RANK}", f"model.adapter_alpha={ALPHA}"]
    name = f"{preset}-{f'lora-{adapter_rate:g}' if adapter_rate else 'full'}-{seed}"
    rlpipe_run(folder, preset, name, *sets)
    run = open_existing(store, name)
    records = Progress(run).iterations(iterations)
    weights = [file for file in run.policy(iterations)[1].files if file.plain_name.endswith(".safetensors")]
    return Trained(
        rewards=[float(record.metrics["rollout/reward_mean"]) for record in records],
        policy_bytes=sum(file.bytes for file in weights),
        reload_s=median(float(record.metrics["time/reload_engines_s"]) for record in records),
        iteration_s=median(float(record.metrics["time/iteration_s"]) for record in records[1:] or records),
    )


def standard_error(values: list[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def table(results: dict[str, dict[str, list[Trained]]]) -> list[str]:
    """Lines of markdown: one for each preset and kind of training."""
    lines = [
        "| preset | trained | reward, last iterations | by seed | weights of a policy | reload | iteration |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, kinds in results.items():
        for kind, runs in kinds.items():
            finals = [run.final for run in runs]
            lines.append(
                f"| {preset} | {kind} | {fmean(finals):.3f} ± {standard_error(finals):.3f} | "
                f"{', '.join(f'{value:.3f}' for value in finals)} | "
                f"{runs[0].policy_bytes:,} B | {median(run.reload_s for run in runs):.2f} s | "
                f"{median(run.iteration_s for run in runs):.1f} s |"
            )
    return lines


def draw(results: dict[str, dict[str, list[Trained]]], path: Path) -> None:
    """Mean reward of each iteration, a thin line for each seed and a thick one for their mean."""
    figure, axes = plt.subplots(1, len(results), figsize=(5.5 * len(results), 3.8), squeeze=False)
    for axis, (preset, kinds) in zip(axes[0], results.items(), strict=True):
        for colour, (kind, runs) in zip(("tab:blue", "tab:orange"), kinds.items(), strict=True):
            for run in runs:
                axis.plot(run.rewards, color=colour, alpha=0.3, linewidth=0.8)
            mean = [fmean(values) for values in zip(*(run.rewards for run in runs), strict=True)]
            axis.plot(mean, color=colour, linewidth=2, label=f"{kind}, mean of {len(runs)} seeds")
        axis.set(title=preset, xlabel="iteration", ylabel="mean reward")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--presets", nargs="+", default=["tiny:20:4", "smollm2:6:10"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="rlpipe-lora-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, list[Trained]]] = {}
    for preset, iterations, times in (entry.split(":") for entry in arguments.presets):
        kinds: dict[str, list[Trained]] = {"full": [], f"LoRA, rank {RANK}, {times} times the rate": []}
        for seed in range(arguments.seeds):
            for kind, adapter_rate in zip(kinds, (None, float(times)), strict=True):
                kinds[kind].append(train(folder, preset, seed, int(iterations), adapter_rate))
                print(f"{preset} seed {seed} {kind}: {kinds[kind][-1].final:.3f}", flush=True)
        results[preset] = kinds
    print("\n".join(table(results)))
    draw(results, PLOT)


if __name__ == "__main__":
    main()
