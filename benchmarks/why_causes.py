"""Whether `rlpipe why` tells one cause from another, whatever the reward: twelve causes and none,
for three kinds of reward.

    .venv/bin/python benchmarks/why_causes.py [--seeds 1 2] [--kinds exact partial two]
        [--folder /tmp/why-causes] [--ask-only]

Makes the runs (minutes a kind and seed; those that are in the folder are kept), asks
`rlpipe why RUN` of each without saying which iteration, and prints a table: what is named first,
what else is named that nobody touched, and the symptoms. Ends with exit code 1 where a cause is not
first, or something that nobody touched is named.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.why import NO_CAUSE
from benchmarks.why_world import AT, PROMPTS, World, asked_otherwise, harder, healthy_rows
from rlpipe.base.values import JsonDict
from tests.pipeline import BIN
from tests.prefect_stand import bare_server


@dataclass(frozen=True)
class Kind:
    """A kind of reward: what runs are scored by, the part whose code is broken,
    and other weights of the parts."""

    rewards: str
    breaks: str
    reweighted: str


KINDS = {
    "exact": Kind('{"scorers:spelled" = 1.0}', "broken", '{"scorers:spelled" = 0.6}'),
    "partial": Kind('{"scorers:near" = 0.8, format = 0.2}', "broken_near", '{"scorers:near" = 0.4, format = 0.6}'),
    "two": Kind(
        '{"scorers:spelled" = 0.5, "scorers:near" = 0.5}', "broken", '{"scorers:spelled" = 0.9, "scorers:near" = 0.1}'
    ),
}
CAUSES: dict[str, tuple[str, ...]] = {  # what was planted -> the suspects that are it
    "temperature up": ("settings",),
    "temperature down": ("settings",),
    "rate": ("settings",),
    "warm-up": ("rate",),
    "reward code": ("reward_part",),
    "a part's weight": ("reward_settings",),
    "a tenth of labels": ("labels",),
    "harder data": ("mix",),
    "shorter completions": ("truncation",),
    "template": ("template",),
    "stale engine": ("mismatch", "staleness"),
    "clip": ("settings",),
    "rate from the start": ("rate",),
    "none": (),
}


def shuffled(rng: random.Random, rows: list[JsonDict]) -> list[JsonDict]:
    """A tenth of the rows have each other's labels."""
    chosen = rng.sample(range(len(rows)), len(rows) // 10)
    answers = {place: rows[other]["answer"] for place, other in zip(chosen, [*chosen[1:], chosen[0]], strict=True)}
    return [{**row, "answer": answers.get(place, row["answer"])} for place, row in enumerate(rows)]


def run_names(seed: int) -> dict[str, str]:
    """Cause -> the run that has it."""
    return {cause: f"{re.sub('[^a-z]+', '-', cause)}-{seed}" for cause in CAUSES}


class Causes:
    """The runs of one kind of reward."""

    def __init__(self, path: Path, environment: dict[str, str], kind: str) -> None:
        self.world = World(path / kind, environment)
        self.kind = KINDS[kind]
        self.rewards = f"rl.rewards={self.kind.rewards}"

    def changed_rows(
        self,
        run: str,
        seed: int,
        change: Callable[[random.Random, list[JsonDict]], list[JsonDict]],
        prompts: int = PROMPTS,
    ) -> None:
        rng = random.Random(f"{run}/{seed}")
        rows = healthy_rows(rng, prompts=prompts)
        changed = [*rows[: AT * prompts], *change(rng, rows[AT * prompts :])]
        self.world.from_rows(
            run, changed, self.rewards, f"rl.num_prompts={prompts}", f"rl.group_size={max(4, 128 // prompts)}"
        )

    def plant(self, seed: int) -> dict[str, str]:
        """Makes the run of each cause, which has it from iteration AT on but for rates that rise or
        are too high from the start."""
        world, runs = self.world, run_names(seed)
        parent = runs["none"]
        rows = healthy_rows(random.Random(seed))
        world.from_rows(parent, rows, self.rewards)
        world.fork(parent, AT - 1, runs["temperature up"], "rl.temperature=2.0")
        world.fork(parent, AT - 1, runs["temperature down"], "rl.temperature=0.4")
        world.fork(parent, AT - 1, runs["rate"], "rl.learning_rate=1e-2")
        world.from_rows(runs["warm-up"], rows, self.rewards, "rl.learning_rate=3e-3", "rl.warmup_steps=20")
        world.from_rows(runs["rate from the start"], rows, self.rewards, "rl.learning_rate=2e-3")
        with world.file(self.kind.breaks):
            world.fork(parent, AT - 1, runs["reward code"])
        world.fork(parent, AT - 1, runs["a part's weight"], f"rl.rewards={self.kind.reweighted}")
        self.changed_rows(
            runs["a tenth of labels"], seed, shuffled, 64
        )  # of 16 prompts a tenth is no proof: 7 groups of 70
        self.changed_rows(runs["harder data"], seed, harder)
        self.changed_rows(runs["template"], seed, asked_otherwise)
        world.fork(parent, AT - 1, runs["shorter completions"], "rl.completion_tokens_max=7")
        world.stale(parent, runs["stale engine"], seed)
        world.fork(parent, AT - 1, runs["clip"], "rl.clip_low=0.999", "rl.clip_high=1000")  # none, in effect
        return runs

    def ask(self, cause: str, run: str, seed: int) -> tuple[str, bool]:
        """A line of the table, and whether all is as it should be.

        Of even seeds the code is asked that was broken, of odd ones the mended.
        """
        environment = {**os.environ, **self.world.folder.environment}
        broken = self.world.path / self.kind.breaks
        if cause == "reward code" and seed % 2 == 0:
            broken.write_text("x")
        command = [str(BIN / "rlpipe"), "why", run, "--store", self.world.folder.store]
        done = subprocess.run(
            command, cwd=self.world.path, env=environment, capture_output=True, text=True, timeout=600
        )
        broken.unlink(missing_ok=True)
        assert done.returncode in (0, NO_CAUSE), done.stderr[-3000:]
        (self.world.path / f"why-{run}.txt").write_text(done.stdout)
        found = re.findall(r"^   suspect (\w+): (a symptom)?", done.stdout, re.M)
        named, symptoms = [name for name, symptom in found if not symptom], [name for name, symptom in found if symptom]
        first = found[0][0] if found else ""
        wanted = CAUSES[cause]
        others = [name for name in named if name not in wanted]
        unfelt = "and the reward is what it was" in done.stdout  # of a changed setting: exit code 4 is right
        right = not others and (first in wanted or (unfelt and not found) if wanted else not found)
        at = re.search(r"iteration (\d+): reward", done.stdout)
        assert at is not None, done.stdout
        cells = (
            f"{first or ('unfelt' if unfelt else 'no cause found'):18s}  {at[1]:>2s}  "
            f"{', '.join(others) or '-':24s}  {', '.join(symptoms) or '-'}"
        )
        return f"{cause:20s}  {'yes' if right else 'NO ':3s}  {cells}", right


def of_kind(path: Path, environment: dict[str, str], kind: str, seeds: list[int], asks_only: bool) -> int:
    """Prints the lines of a kind; how many of them are right."""
    causes = Causes(path, environment, kind)
    if not asks_only:
        causes.world.base()
    right = 0
    for seed in seeds:
        runs = run_names(seed) if asks_only else causes.plant(seed)
        for cause, run in runs.items():
            line, is_right = causes.ask(cause, run, seed)
            right += is_right
            print(f"{kind:8s}  {seed:4d}  {line}", flush=True)
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/why-causes"))
    parser.add_argument("--ask-only", action="store_true", help="the runs are there")
    parser.add_argument("--at-once", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(
        "reward    seed  planted               right  first             at  others                    symptoms",
        flush=True,
    )
    with bare_server(given.folder) as stand, ThreadPoolExecutor(given.at_once) as threads:
        right = sum(
            threads.map(
                lambda kind: of_kind(given.folder, stand.environment, kind, given.seeds, given.ask_only), given.kinds
            )
        )
    total = len(CAUSES) * len(given.seeds) * len(given.kinds)
    print(f"{right} of {total}: the cause is first, and nothing that nobody touched is named")
    if right < total:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
