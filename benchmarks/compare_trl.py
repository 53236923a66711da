"""rlpipe beside TRL's GRPOTrainer, on equal work on two cores of a CPU: seconds an iteration, and
whether both learn alike.

    .venv/bin/python benchmarks/compare_trl.py [--pairs 8] [--iterations 4] [--curves]
        [--model FOLDER] [--dtype bfloat16]

Both start from the preset `tiny` after its SFT (or from --model, a folder that such a run left) and
get the same prompts, group size, tokens, optimizer steps and learning rate. A pair is one seed:
runs of rlpipe that train on all groups (with the trainer's logprobs, and with the engine's), one of
TRL, one of rlpipe that drops groups of equal rewards, one at a time; every other pair goes the
other way round. rlpipe's seconds are from commit to commit of iteration.json, of `rlpipe run` with
Prefect, MLflow and the store; TRL's from the end of one generation cycle to the end of the next,
without logs and checkpoints. TRL has an environment of its own, ~/.cache/rlpipe/trl-VERSION, made
once. With `--dtype bfloat16` both compute in it, with weights and moments in float32 (rlpipe:
`model.dtype`, TRL: `bf16`). docs/benchmarks.md says what is equal and what is not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.base.manifests import moment_of
from rlpipe.base.values import JsonDict
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.store.artifacts import read_records
from rlpipe.store.backend import open_store
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.trainer.batches import read_rl_batch

ROOT = Path(__file__).parent.parent
TRL = {"trl": "1.16.0", "accelerate": "1.15.0", "datasets": "5.2.0"}
SHARED = ("torch", "transformers", "reasoning_gym")  # the versions that rlpipe has
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
HOME = Path.home() / ".cache" / "rlpipe" / f"trl-{TRL['trl']}"
CORES = 2
TIMEOUT_S = 3600  # of one process
ALL, ENGINE, DROPPED, OTHER = "rlpipe, all groups", "the same, engine's logprobs", "rlpipe, equal groups dropped", "TRL"
SETS = {ALL: ["rl.filters={}"], ENGINE: ["rl.filters={}", "rl.proximal=engine"], DROPPED: []}  # beside what all have
SETTINGS = ("num_prompts", "group_size", "completion_tokens_max", "num_steps", "learning_rate", "clip_low", "clip_high",
            "beta2", "weight_decay", "grad_clip")  # fmt: skip
ALIKE = 0.05  # the largest difference of the mean reward of the last iterations
CURVES = ROOT / "docs" / "compare-trl-curves.png"


@dataclass(frozen=True)
class Seen:
    """What one run did.

    An entry an iteration, the first of which warms up; `trained_tokens` and
    `sequences` an entry an optimizer step.
    """

    seconds: list[float]
    rewards: list[float]
    tokens: list[int]
    sequences: list[int]
    trained_tokens: list[int]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds[1:])

    @property
    def last_reward(self) -> float:
        """The mean of the last quarter of the iterations."""
        return statistics.mean(self.rewards[-max(1, len(self.rewards) // 4) :])


class Comparison:
    """A scratch folder with the store of rlpipe's runs, and the
    checkpoint that all runs start from."""

    def __init__(self, scratch: Path, iterations: int, model: str, dtype: str = "float32") -> None:
        self.scratch, self.iterations, self.dtype = scratch, iterations, dtype
        self.slow: dict[str, str] = {}  # environment variables of parts that sleep (overlap.py)
        self.store = open_store(f"file://{scratch}/store")
        self.model = model or self.taught()

    def rlpipe(self, run: str, overrides: list[str]) -> Run:
        """`rlpipe run tiny` to its end."""
        environment = {**os.environ, "PREFECT_HOME": str(self.scratch / "prefect"), "PYTHONPATH": str(ROOT)} | self.slow
        environment.pop("PREFECT_API_URL", None)
        command = [str(Path(sys.executable).parent / "rlpipe"), "run", "tiny", "--run", run]
        command += [part for each in (f"store=file://{self.scratch}/store", *overrides) for part in ("--set", each)]
        done_or_raise(command, self.scratch, environment)
        return open_existing(self.store, run)

    def taught(self) -> str:
        """The preset after SFT, as a model folder."""
        run = self.rlpipe("taught", ["rl.num_iterations=0", "evaluation.every=0"])
        ref, _ = run.policy(0)
        return str(materialise(self.store, ref, self.scratch / "model"))

    def ours(self, seed: int, name: str) -> tuple[Seen, Run]:
        """What both can do alike: no warm-up, no importance weight (TRL has none for transformers'
        generate), no evaluation."""
        alike = [f"model.path={self.model}", f"seed={seed}", "sft.num_steps=0", f"rl.num_iterations={self.iterations}"]
        alike += [
            "rl.warmup_steps=0",
            "rl.importance=none",
            "evaluation.every=0",
            f"model.dtype={self.dtype}",
            *SETS[name],
        ]
        run = self.rlpipe(f"seed-{seed}-{[*SETS].index(name)}", alike)
        records = Progress(run).iterations(self.iterations)
        ended = [moment_of(record.ended_at, "iteration.json").timestamp() for record in records]
        metrics = [record.metrics for record in records]
        # the last policy of a run is evaluated, whatever evaluation.every is: TRL's is not
        evaluated_s = [values.get("time/evaluate_s", 0.0) for values in metrics]
        seconds = [
            after - before - spent for (before, after), spent in zip(pairwise(ended), evaluated_s[1:], strict=True)
        ]
        with tempfile.TemporaryDirectory() as folder:
            read = partial(read_rl_batch, run.store, num_steps=run.config.rl.num_steps, folder=Path(folder))
            batches = [read(record.artifact("batch")) for record in records]
        steps = [[sequence.num_scored for sequence in step] for batch in batches for step in batch.steps]
        rewards = [float(values["rollout/reward_mean"]) for values in metrics]
        tokens = [int(values["rollout/num_tokens"]) for values in metrics]
        return Seen([0.0, *seconds], rewards, tokens, [len(step) for step in steps], [sum(step) for step in steps]), run

    def trl(self, seed: int, run: Run) -> Seen:
        """TRL on the prompts of a run of rlpipe, with its settings."""
        prompts: list[JsonDict] = []
        rollouts: list[tuple[list[int], str | None, float | None]] = []
        for iteration in range(self.iterations):
            read = read_records(run.store, run.record(iteration).artifact("prompts"), "prompts.parquet", Prompt)
            prompts += [
                {"messages": row.messages, "answer": row.answer, "tokens": row.prompt_tokens.tolist()} for row in read
            ]
            answers = {row.prompt_id: row.answer for row in read}
            scores, _ = run.committed("rl", iteration, "scores/round-0")
            scored = read_records(run.store, scores, "scores.parquet", Rollout, SCORES)
            rollouts += [(row.completion_tokens.tolist(), answers[row.prompt_id], row.reward) for row in scored]
        rl = run.config.rl
        fixed = (rl.estimator, rl.objective, rl.aggregation, rl.kl)
        assert fixed == ("grpo", "ppo", "token_mean", "none"), "trl_worker.py has these"
        job = {name: getattr(rl, name) for name in SETTINGS}
        job |= {"model": self.model, "seed": seed, "iterations": self.iterations, "threads": CORES, "prompts": prompts,
                "rollouts": rollouts, "dtype": self.dtype, "output": str(self.scratch / "trl")}  # fmt: skip
        job_path, result_path = self.scratch / "job.json", self.scratch / "result.json"
        job_path.write_text(json.dumps(job))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(CORES), "HF_HUB_OFFLINE": "1"}
        worker = [
            str(HOME / "bin" / "python"),
            str(ROOT / "benchmarks" / "trl_worker.py"),
            str(job_path),
            str(result_path),
        ]
        done_or_raise(worker, self.scratch, environment)
        return Seen(**json.loads(result_path.read_text()))

    def pair(self, seed: int) -> dict[str, Seen]:
        first, *others = [*SETS] if seed % 2 == 0 else [*SETS][::-1]
        seen, run = self.ours(seed, first)
        told = {first: seen, OTHER: self.trl(seed, run)}
        told |= {name: self.ours(seed, name)[0] for name in others}
        return {name: told[name] for name in (ALL, ENGINE, OTHER, DROPPED)}


def done_or_raise(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode} of {' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")


def make_environment() -> None:
    """TRL's environment, once; torch first, as the wheel for CPUs that
    rlpipe has (scripts/install.sh)."""
    stamp = HOME / ".installed"
    pins = [f"{name}=={number}" for name, number in (*((name, version(name)) for name in SHARED), *TRL.items())]
    if stamp.exists() and stamp.read_text() == "\n".join(pins):
        return
    print(f"making {HOME}: {' '.join(pins)}", flush=True)
    HOME.mkdir(parents=True, exist_ok=True)
    done_or_raise([sys.executable, "-m", "venv", str(HOME)], HOME)
    pip = [str(HOME / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    if subprocess.run([*pip, pins[0]], capture_output=True).returncode:
        done_or_raise([*pip, pins[0], "--extra-index-url", CPU_WHEELS], HOME)
    done_or_raise([*pip, *pins], HOME)
    stamp.write_text("\n".join(pins))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(pairs: list[dict[str, Seen]]) -> bool:
    """Prints what was seen; whether both learn alike."""
    print(f"\nmedians of {len(pairs)} pairs (least to most); reward, tokens and steps are means, an iteration")
    print(
        f"{'':28s} {'seconds':>22s} {'TRL takes times':>22s}  reward: first   last   tokens  trained  "
        "steps  sequences of a step"
    )
    for name in pairs[0]:
        runs = [pair[name] for pair in pairs]
        times = spread([pair[OTHER].median_s / pair[name].median_s for pair in pairs])
        first, last = statistics.mean(run.rewards[0] for run in runs), statistics.mean(run.last_reward for run in runs)
        count, sequences = sum(len(run.rewards) for run in runs), [number for run in runs for number in run.sequences]
        tokens = sum(sum(run.tokens) for run in runs) / count
        trained = sum(sum(run.trained_tokens) for run in runs) / count
        print(
            f"{name:28s} {spread([run.median_s for run in runs]):>22s} {times:>22s}  {first:13.3f} {last:6.3f} "
            f"{tokens:8.0f} {trained:8.0f} {len(sequences) / count:6.2f}  {min(sequences)} to {max(sequences)}"
        )
    apart = {
        name: statistics.mean(pair[name].last_reward - pair[OTHER].last_reward for pair in pairs) for name in pairs[0]
    }
    alike = max(map(abs, apart.values())) <= ALIKE
    print(
        "last reward less TRL's: "
        + "; ".join(f"{name} {difference:+.3f}" for name, difference in apart.items() if name != OTHER)
    )
    print(f"both learn alike (within {ALIKE}): {'yes' if alike else 'NO'}")
    print(", ".join(f"{name} {TRL.get(name) or version(name)}" for name in (*TRL, *SHARED, "prefect", "mlflow")))
    return alike


def draw(pairs: list[dict[str, Seen]]) -> None:
    """The reward of every run thin, the mean over seeds thick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, colour in ((ALL, "C0"), (ENGINE, "C3"), (DROPPED, "C2"), (OTHER, "C1")):
        runs = [pair[name].rewards for pair in pairs]
        for rewards in runs:
            axis.plot(rewards, color=colour, alpha=0.25, linewidth=0.8)
        axis.plot(
            [statistics.mean(values) for values in zip(*runs, strict=True)], color=colour, linewidth=2, label=name
        )
    axis.set(
        xlabel="iteration", ylabel="mean reward of its rollouts", title=f"preset tiny after SFT; seeds: {len(pairs)}"
    )
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(CURVES, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=0, help="of each run; 0: 4, with --curves 20")
    parser.add_argument("--curves", action="store_true", help=f"draw the rewards to {CURVES.relative_to(ROOT)}")
    parser.add_argument("--model", default="", help="the checkpoint to start from; without it SFT makes one first")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both sides' products")
    told = parser.parse_args()
    make_environment()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory() as scratch:
        iterations = told.iterations or (20 if told.curves else 4)
        comparison = Comparison(Path(scratch), iterations, told.model and str(Path(told.model).resolve()), told.dtype)
        pairs = []
        for seed in range(told.pairs):
            pairs.append(comparison.pair(seed))
            print(f"seed {seed}: " + json.dumps({name: asdict(seen) for name, seen in pairs[-1].items()}), flush=True)
    alike = report(pairs)
    if told.curves:
        draw(pairs)
        print(f"curves in {CURVES}")
    sys.exit(0 if alike else 1)


if __name__ == "__main__":
    main()
