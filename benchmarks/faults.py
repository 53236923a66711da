"""Faults by their cause, beside one rule for all: does a policy learn to take an exit, and does an
outage cost it anything?

    .venv/bin/python benchmarks/faults.py [--worlds agent calculator tiny] [--iterations 12]
        [--folder /tmp/faults] [--plot docs/faults-curves.png]

Three presets, one each with an agent, an environment, and a reward function alone. SFT shows each
policy a word that makes its agent, environment or reward hang, in 20 % of the conversations; in
20 % of the rollouts, drawn by chance, something that they need is away. Forks of one SFT are
trained: by cause without outages, by cause with outages, and with outages by the two rules for all,
`left_out` and 0. Prints, for the first and the last three iterations, the share of rollouts that
hung and the mean reward of those without a fault, with its standard error over groups. Minutes a
world; forks that are in the folder are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.why_world import World
from rlpipe.config.faults import POLICY, cause_of_fault
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.store.artifacts import read_records
from rlpipe.store.opening import open_existing
from tests.prefect_stand import bare_server

SHARE = 0.2
COMMON = ["rl.num_prompts=16", "rl.group_size=8", "rl.shard_prompts=16", "rl.reward_workers=2", "evaluation.every=0",
          "tracking.uri="]  # fmt: skip
SHOWN = ["data.demonstrations.source=exits:demonstrations"]
WORLDS = {  # preset -> its settings
    "agent": [
        *SHOWN, "data.demonstrations.args={as_calls=true}", "data.products.source=exits:problems",
        "rl.agent=exits:agent", "rl.agent_timeout_s=4", "rl.agents_max=8", "rl.learning_rate=2e-4",
    ],
    "calculator": [
        *SHOWN, "data.demonstrations.args={}", "rl.environment=exits:Environment", "rl.environment_timeout_s=2",
    ],
    "tiny": [
        "data.short_words.weight=8", "data.all_words.weight=2", "data.all_words.args={min_word_len=3, max_word_len=6}",
        'data.all_words.completion_template="wait <answer>{answer}</answer>"', "rl.completion_tokens_max=20",
        'rl.rewards={"exits:spelled" = 1.0}', "rl.reward_timeout_s=1",
    ],
}  # fmt: skip
RULES = {  # name -> rules, share of outages, colour
    "by cause, no outages": ("{}", 0.0, "tab:green"),
    "by cause": ("{}", SHARE, "tab:blue"),
    "all left out": ("{policy = 'left_out', outside = 'left_out'}", SHARE, "tab:orange"),
    "all scored 0": ("{policy = 0.0, outside = 0.0}", SHARE, "tab:red"),
}


def runs_of(world: World, preset: str, iterations: int) -> dict[str, str]:
    """Rule -> its run; makes those that are not there."""
    base = f"{preset}-base"
    sets = [f"store={world.folder.store}", "rl.num_iterations=0", *COMMON, *WORLDS[preset]]
    world.complete("run", preset, "--run", base, *[part for entry in sets for part in ("--set", entry)])
    runs = {}
    for number, (name, (rules, share, _)) in enumerate(RULES.items()):
        runs[name] = f"{preset}-{number}"
        world.folder.environment["AWAY"] = str(share)
        world.fork(base, "sft", runs[name], f"rl.faults={rules}", iterations=iterations)
    return runs


Curves = dict[str, list[tuple[float, float, float]]]  # rule -> of each iteration: share, reward, its standard error


def curves_of(world: World, runs: dict[str, str], iterations: int) -> Curves:
    """The share of rollouts with a fault of the policy, and the reward of those without one."""
    return {name: [_point(world, run, iteration) for iteration in range(iterations)] for name, run in runs.items()}


def _point(world: World, run_name: str, iteration: int) -> tuple[float, float, float]:
    run = open_existing(world.folder.open_store(), run_name)
    ref, _ = run.committed("rl", iteration, "scores/round-0")
    rows = read_records(run.store, ref, "scores.parquet", Rollout, SCORES)
    share = np.mean([bool(row.reward_fault) and cause_of_fault(row.reward_fault) == POLICY for row in rows])
    groups: dict[int, list[float]] = {}
    for row in rows:
        if not row.reward_fault and row.reward is not None:
            groups.setdefault(row.group_index, []).append(row.reward)
    means = [float(np.mean(rewards)) for rewards in groups.values()]
    return float(share), float(np.mean(means)), float(np.std(means, ddof=1) / len(means) ** 0.5)


def printed(preset: str, curves: Curves, last: int = 3) -> None:
    print(f"{preset:22s} {'hung, first and last three':28s} reward of the others, first and last three", flush=True)
    for name, points in curves.items():
        values = np.array(points)
        share = [values[part, 0].mean() for part in (slice(None, last), slice(-last, None))]
        reward = [values[part, 1].mean() for part in (slice(None, last), slice(-last, None))]
        error = float(np.sqrt((values[-last:, 2] ** 2).sum()) / last)
        shares = f"{share[0]:.3f} -> {share[1]:.3f}"
        print(f"  {name:20s} {shares:28s} {reward[0]:.3f} -> {reward[1]:.3f} +- {error:.3f}", flush=True)


def plot(path: Path, all_curves: dict[str, Curves]) -> None:
    figure, axes = plt.subplots(2, len(all_curves), figsize=(4.2 * len(all_curves), 6), squeeze=False, sharex=True)
    for column, (preset, curves) in enumerate(all_curves.items()):
        for name, points in curves.items():
            values, colour = np.array(points), RULES[name][2]
            axes[0, column].plot(values[:, 0], color=colour, label=name)
            axes[1, column].plot(values[:, 1], color=colour, label=name)
            low, high = values[:, 1] - values[:, 2], values[:, 1] + values[:, 2]
            axes[1, column].fill_between(range(len(values)), low, high, color=colour, alpha=0.15)
        axes[0, column].set_title(preset)
        axes[1, column].set_xlabel("iteration")
    axes[0, 0].set_ylabel("share of rollouts that hung")
    axes[1, 0].set_ylabel("reward of rollouts without a fault")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/faults"))
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    all_curves: dict[str, Curves] = {}
    with bare_server(arguments.folder) as stand:
        world = World(arguments.folder, stand.environment)
        for preset in arguments.worlds:
            runs = runs_of(world, preset, arguments.iterations)
            all_curves[preset] = curves_of(world, runs, arguments.iterations)
            printed(preset, all_curves[preset])
            if arguments.plot:
                plot(arguments.plot, all_curves)


if __name__ == "__main__":
    main()
