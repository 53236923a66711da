"""`rl.overlap = "iteration"` beside "none", on two cores of a CPU, one for the engine and one for
the trainer: seconds an iteration, and what each learns.

    .venv/bin/python benchmarks/overlap.py [--seeds 3] [--iterations 8] [--own-cores]
        [--set A.B=C ...]

All start from the preset `tiny` after its SFT, without its filter. For one seed there is a run of
each, one at a time, for every other seed the other way round. Seconds are from commit to commit of
iteration.json, of `rlpipe run` with Prefect, MLflow and the store, without evaluations. The limit
is what would be left if the shorter of sampling (generate, score, filter) and training (train,
checkpoint) were hidden behind the longer, and nothing else changed.

`--own-cores` plays an engine and a trainer that have cores of their own: both sleep in each step
(benchmarks/slow), for most of an iteration, so that the two cores of this machine are no limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.compare_trl import ROOT, Comparison
from rlpipe.base.manifests import moment_of
from rlpipe.store.progress import Progress

MODES = ("none", "iteration")
SAMPLING, TRAINING = ("sample_prompts", "generate", "score", "filter"), ("train", "checkpoint")
SLOW = {"PYTHONPATH": f"{ROOT / 'benchmarks' / 'slow'}:{ROOT}", "SLOW_STEP_S": "0.1", "SLOW_UPDATE_S": "1.5"}


@dataclass(frozen=True)
class Seen:
    """What one run did, from its third iteration on: the second was sampled beside the first, which
    had to wait for its own."""

    seconds: list[float]
    sampling_s: list[float]
    training_s: list[float]
    staleness: set[float]
    last_reward: float  # the mean of the last quarter

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def limit(self) -> float:
        """Seconds of an iteration over those that would be left."""
        hidden = statistics.median(min(pair) for pair in zip(self.sampling_s, self.training_s, strict=True))
        return self.median_s / (self.median_s - hidden)


def run(comparison: Comparison, seed: int, overlap: str, sets: list[str]) -> Seen:
    """One run to its end."""
    alike = [
        f"model.path={comparison.model}",
        f"seed={seed}",
        "sft.num_steps=0",
        f"rl.num_iterations={comparison.iterations}",
    ]
    alike += ["rl.filters={}", "evaluation.every=0", "trainer.threads=1", "engines.count=1", "engines.threads=1"]
    alike += [f"rl.overlap={overlap}", *sets]
    records = Progress(comparison.rlpipe(f"seed-{seed}-{overlap}", alike)).iterations(comparison.iterations)
    ended = [moment_of(record.ended_at, "iteration.json").timestamp() for record in records]
    metrics = [record.metrics for record in records]
    # the last policy of a run is evaluated, whatever evaluation.every is
    evaluated_s = [values.get("time/evaluate_s", 0.0) for values in metrics]
    seconds = [after - before - spent for (before, after), spent in zip(pairwise(ended), evaluated_s[1:], strict=True)]
    rewards = [float(values["rollout/reward_mean"]) for values in metrics]
    sampling_s, training_s = (
        [sum(values[f"time/{verb}_s"] for verb in verbs) for values in metrics[2:-1]] for verbs in (SAMPLING, TRAINING)
    )
    return Seen(
        seconds=seconds[1:-1],  # the last iteration of a run samples none ahead
        sampling_s=sampling_s,
        training_s=training_s,
        staleness={values[f"rollout/staleness_{name}"] for values in metrics[1:] for name in ("mean", "max")},
        last_reward=statistics.mean(rewards[-max(1, len(rewards) // 4) :]),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=4, help="optimizer steps of an iteration")
    parser.add_argument("--own-cores", action="store_true", help="engine and trainer sleep in each step")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="of all runs")
    arguments = parser.parse_args()
    if arguments.iterations < 5:
        parser.error(f"--iterations {arguments.iterations}: use 5 or more; the first two and the last are not timed")
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(Path(scratch), arguments.iterations, "")
        comparison.slow = SLOW if arguments.own_cores else {}
        ratios = list[float]()
        for seed in range(arguments.seeds):
            order = MODES if seed % 2 == 0 else MODES[::-1]
            sets = [f"rl.num_steps={arguments.num_steps}", *arguments.sets]
            seen = {overlap: run(comparison, seed, overlap, sets) for overlap in order}
            none, other = seen["none"], seen["iteration"]
            print(
                f"seed {seed}: none {none.median_s:.2f} s an iteration, reward at the end {none.last_reward:.3f}",
                flush=True,
            )
            ratios.append(none.median_s / other.median_s)
            print(f"  iteration: {other.median_s:.2f} s, ratio {ratios[-1]:.2f} (limit {none.limit:.2f}); "
                  f"staleness {sorted(other.staleness)}; reward at the end {other.last_reward:.3f}",
                  flush=True)  # fmt: skip
        print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
