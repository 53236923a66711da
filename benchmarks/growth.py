"""Whether a run stays as quick and as small as it was: many iterations of next to no
work, and what grows with them.

    .venv/bin/python benchmarks/growth.py [--iterations 1000]

One run of `rlpipe run tiny` with Prefect, MLflow (SQLite) and the store, of 4 rollouts an
iteration. It is ended and started again after its first 20 iterations and before its last 20: so
the resumes are timed, and the processes between are the same from end to end. Early is from
iteration 50 on, late before the last 50; each is the median of 50 iterations, and the ratio of both
is what grew. Draws docs/growth.png.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import psutil

from rlpipe.base.manifests import moment_of
from rlpipe.store.backend import Store, open_store
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress

EDGE = 50  # iterations that are compared, at each end
RESTARTED = 20  # from either end of the run
POLL_S, TIMEOUT_S = 0.5, 6 * 3600
PLOT = Path(__file__).parent.parent / "docs" / "growth.png"
NEAR_EMPTY = [
    "sft.num_steps=4", "sft.segment_steps=4", "sft.decay_steps=4", "sft.warmup_steps=0", "sft.batch_size=8",
    "rl.num_prompts=2", "rl.group_size=2", "rl.shard_prompts=2", "rl.num_steps=1", "rl.filters={}",
    "rl.completion_tokens_max=4",
    "evaluation.every=0", "evaluation.prompts_max=2",
]  # fmt: skip
PROCESSES = {  # a word of their command line
    "trainer": "rlpipe.trainer.server", "engine": "rlpipe.extras.local_engine.server",
    "Prefect's server": "prefect_server", "flow": "rlpipe run",
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """What there was when an iteration was seen to be committed."""

    iteration: int
    memory: dict[str, float]  # MB, by process
    databases: dict[str, float]  # MB
    listing_ms: float  # of the iterations in the store


@dataclass
class Growth:
    """The run, in a folder of its own."""

    folder: Path
    moments: list[Moment] = field(default_factory=list)
    # from the command to the first iteration that it committed
    resumes_s: list[float] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return open_store(f"file://{self.folder}/store")

    def run(self, iterations: int) -> None:
        """Goes on to a number of iterations."""
        settings = [
            *NEAR_EMPTY,
            f"rl.num_iterations={iterations}",
            f"store=file://{self.folder}/store",
            f"tracking.uri=sqlite:///{self.folder}/mlflow.db",
        ]
        command = [
            str(Path(sys.executable).parent / "rlpipe"),
            "run",
            "tiny",
            "--run",
            "growth",
            *[part for each in settings for part in ("--set", each)],
        ]
        environment = {**os.environ, "PREFECT_HOME": str(self.folder / "prefect")}
        environment.pop("PREFECT_API_URL", None)
        started, first = time.monotonic(), self.moments[-1].iteration + 1 if self.moments else 0
        with (self.folder / "output.log").open("a") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        try:
            number = first
            while process.poll() is None:
                assert time.monotonic() - started < TIMEOUT_S, f"it is not done after {TIMEOUT_S} s"
                if self.store.exists(f"runs/growth/rl/{number:05d}/iteration.json"):
                    if number == first:
                        self.resumes_s.append(time.monotonic() - started)
                    self.moments.append(self._now(number, process))
                    number += 1
                else:
                    time.sleep(POLL_S)
        finally:
            process.terminate()
            process.wait(timeout=120)
        assert process.returncode == 0, (self.folder / "output.log").read_text()[-3000:]

    def _now(self, iteration: int, process: subprocess.Popen[bytes]) -> Moment:
        memory: dict[str, float] = {}
        for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            try:
                line, size = " ".join(child.cmdline()), child.memory_info().rss / 1e6
            except psutil.NoSuchProcess:
                continue
            role = next((name for name, word in PROCESSES.items() if word in line), None)
            if role:
                memory[role] = max(size, memory.get(role, 0.0))
        files = {"Prefect": "prefect/prefect.db", "MLflow": "mlflow.db"}
        databases = {name: _megabytes(self.folder, f"{file}*") for name, file in files.items()}
        started = time.perf_counter()
        self.store.folders("runs/growth/rl")
        return Moment(iteration, memory, databases, 1000 * (time.perf_counter() - started))


def _megabytes(folder: Path, pattern: str) -> float:
    """The size of the files that have such names; journals of SQLite come and go meanwhile."""
    size = 0
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size / 1e6


def report(growth: Growth, iterations: int) -> None:
    """Prints early, late and their ratio, and draws the plot."""
    records = Progress(open_existing(growth.store, "growth")).iterations(iterations)
    ended = [moment_of(record.ended_at, "iteration.json").timestamp() for record in records]
    seconds, moments = [after - before for before, after in pairwise(ended)], growth.moments

    def row(name: str, values: list[float]) -> None:
        first, last = (statistics.median(values[at : at + EDGE]) for at in (EDGE, iterations - 2 * EDGE))
        print(f"{name:45s} {first:9.3f} {last:9.3f}   {last / first:5.2f} x")

    row("seconds an iteration", seconds)
    for name in PROCESSES:
        row(f"MB of the {name}", [moment.memory.get(name, 0.0) for moment in moments])
    for name in moments[0].databases:
        sizes = [moment.databases[name] for moment in moments]
        row(
            f"KB an iteration in {name}'s database",
            [1000 * (sizes[at] - sizes[max(0, at - EDGE)]) / EDGE for at in range(len(sizes))],
        )
    row("ms to list the iterations", [moment.listing_ms for moment in moments])
    early_s, late_s = growth.resumes_s[1:]
    print(f"{'seconds from a second start to a commit':45s} {early_s:9.3f} {late_s:9.3f}   {late_s / early_s:5.2f} x")
    draw(seconds, moments)


def draw(seconds: list[float], moments: list[Moment]) -> None:
    figure, (times, memory, databases) = plt.subplots(1, 3, figsize=(15, 4))
    smooth = [statistics.median(seconds[max(0, at - 10) : at + 11]) for at in range(len(seconds))]
    times.plot(smooth)
    times.set(title="seconds an iteration (median of 21)", xlabel="iteration", ylim=(0, None))
    at = [moment.iteration for moment in moments]
    for name in PROCESSES:
        memory.plot(at, [moment.memory.get(name, 0.0) for moment in moments], label=name)
    memory.set(title="memory of the processes, MB", xlabel="iteration", ylim=(0, None))
    memory.legend()
    for name in ("Prefect", "MLflow"):
        databases.plot(at, [moment.databases[name] for moment in moments], label=name)
    databases.set(title="databases, MB", xlabel="iteration", ylim=(0, None))
    databases.legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    iterations = parser.parse_args().iterations
    if iterations < 6 * EDGE:
        parser.error(f"--iterations {iterations}: use {6 * EDGE} or more, {EDGE} are compared at each end")
    with tempfile.TemporaryDirectory() as scratch:
        growth = Growth(Path(scratch))
        for end in (RESTARTED, iterations - RESTARTED, iterations):
            growth.run(end)
            print(f"{end} iterations, {growth.resumes_s[-1]:.1f} s to the first of them", flush=True)
        report(growth, iterations)


if __name__ == "__main__":
    main()
