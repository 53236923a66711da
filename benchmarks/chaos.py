"""SIGKILLs whole runs of the preset `tiny` (flow, trainer, engines, Prefect server) at random
moments until it has done so N times.

    .venv/bin/python benchmarks/chaos.py FOLDER [--kills 20] [--run a] [--mean-s 20]

Then lets the run finish and prints the sha256 of its final policy, to hold against that of a run
that nothing happened to (--kills 0).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.pipeline import Folder, kill_group

ITERATIONS = 70


def progress(folder: Folder, run: str) -> str:
    """How far the run is, in artifacts."""
    count = sum(key.endswith(("manifest.json", "iteration.json")) for key in folder.open_store().list(f"runs/{run}"))
    return f"{count} artifacts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--run", default="a")
    parser.add_argument("--mean-s", type=float, default=20.0)
    told = parser.parse_args()
    told.folder.mkdir(parents=True, exist_ok=True)
    folder = Folder(told.folder.resolve(), f"file://{told.folder.resolve()}/store")
    moments = random.Random(11)
    killed = 0
    while killed < told.kills:
        process = folder.start(*folder.run_arguments(told.run))
        pause_s = 8.0 + moments.uniform(0, 2 * (told.mean_s - 8.0))
        time.sleep(pause_s)
        if process.poll() is not None:
            assert process.returncode == 0, (folder.path / "output.log").read_text()[-3000:]
            break
        kill_group(process)
        killed += 1
        print(f"kill {killed:2d} after {pause_s:5.1f} s: {progress(folder, told.run)}", flush=True)
    folder.complete(told.run)
    code, output = folder.rlpipe("verify", told.run, "--store", folder.store)
    print(output.strip().splitlines()[-1], "exit", code)
    print(f"killed {killed} times; final policy sha256 {folder.final_sha256(told.run, ITERATIONS)}")


if __name__ == "__main__":
    main()
