"""Whether `rlpipe why` names what was planted: twelve faults, and healthy runs in
which there is nothing to name.

    .venv/bin/python benchmarks/why.py [--seeds 1] [--healthy 20] [--first-healthy 0]
        [--folder /tmp/why]

Makes the runs (rlpipe run and fork, minutes; those that are in the folder are kept), asks
`rlpipe why RUN` of each as a process of its own, without saying which iteration, and prints a
table. Ends with exit code 1 when fewer than 10 of 12 faults are named first, more than one healthy
run of 20 has a false alarm, or a report takes 60 s.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.why_world import AT, FAULTS, World
from tests.pipeline import BIN
from tests.prefect_stand import bare_server

NO_CAUSE = 4  # the exit code
SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Asked:
    """What `rlpipe why` said of a run."""

    at: int
    suspects: list[str]
    seconds: float


def asked(world: World, run: str) -> Asked:
    started = time.perf_counter()
    command = [str(BIN / "rlpipe"), "why", run, "--store", world.folder.store]
    environment = {**os.environ, **world.folder.environment}
    done = subprocess.run(
        command, cwd=world.path, env=environment, capture_output=True, text=True, errors="replace", timeout=600
    )
    seconds, output = time.perf_counter() - started, done.stdout
    assert done.returncode in (0, NO_CAUSE), done.stderr[-3000:]
    (world.path / f"why-{run}.txt").write_text(output)
    match = re.search(r"iteration (\d+): reward", output)
    assert match, output
    return Asked(int(match[1]), re.findall(r"^   suspect (\w+):", output, re.M), seconds)


def planted(world: World, seeds: list[int]) -> tuple[int, list[float]]:
    """How many are named first, and the seconds of each report."""
    print("seed  planted             named first          at  rank  seconds  others", flush=True)
    first, seconds = 0, []
    for seed in seeds:
        for fault, run in world.plant(seed).items():
            answer = asked(world, run)
            rank = next((number for number, name in enumerate(answer.suspects, start=1) if name in FAULTS[fault]), 0)
            first += rank == 1
            seconds.append(answer.seconds)
            names = answer.suspects or ["no cause found"]
            at = f"{answer.at:2d}" + (" " if answer.at == AT else "*")
            print(
                f"{seed:4d}  {fault:18s}  {names[0]:18s}  {at}  {rank or '-':>4}  {answer.seconds:7.1f}  "
                f"{', '.join(names[1:])}",
                flush=True,
            )
    return first, seconds


def healthy(world: World, numbers: range) -> int:
    """How many of the healthy runs have a cause named."""
    alarms = 0
    for number in numbers:
        run = world.healthy(number)
        answer = asked(world, run)
        alarms += bool(answer.suspects)
        print(
            f"healthy {number:2d}  {', '.join(answer.suspects) or 'no cause found'}  {answer.seconds:.1f} s", flush=True
        )
    return alarms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--first-healthy", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/why"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with bare_server(arguments.folder) as stand:
        world = World(arguments.folder, stand.environment)
        world.base()
        first, seconds = planted(world, arguments.seeds)
        alarms = healthy(world, range(arguments.first_healthy, arguments.first_healthy + arguments.healthy))
    total = len(FAULTS) * len(arguments.seeds)
    print(
        f"{first} of {total} planted faults are named first, {alarms} of {arguments.healthy} healthy "
        "runs have a false alarm"
    )
    print(f"a report takes {max(seconds, default=0.0):.1f} s at most")
    if 12 * first < 10 * total or 20 * alarms > arguments.healthy or max(seconds, default=0.0) >= SECONDS_MAX:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
