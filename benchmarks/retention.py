"""What a run of many iterations has in the store when it keeps few policies and states, and whether
what it pruned can be made again.

    .venv/bin/python benchmarks/retention.py [--iterations 200] [--kills 20]

One run of `rlpipe run tiny` of next to no work an iteration (that of benchmarks/growth.py). Prints
the bytes in the store by kind at some of its iterations, verifies the run, forks it at an iteration
whose policy was pruned, and compares the files that the fork made with the hashes of their
manifest. With --kills, the same run is done once more and killed so often while it prunes, at
moments drawn at random; it has to end with the same sha256.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.growth import NEAR_EMPTY
from rlpipe.store.artifacts import check_file, is_pruned
from rlpipe.store.backend import Store, open_store
from rlpipe.store.opening import open_existing

KEPT = ["checkpoint.keep_policies_every=50", "checkpoint.keep_policies_last=3", "checkpoint.keep_states=2"]
SHOWN = (1, 5, 10, 20, 50, 100, 150, 200)  # iterations that are committed
# of four tokens a completion none is ever right: without it all policies would be the same
MOVES = "rl.entropy_coef=0.01"
FORK_AT = 77
KINDS = ("policy", "state", "prompts", "rollouts", "scores", "batch", "gap", "documents")
POLL_S, TIMEOUT_S = 0.05, 3600
KILLED_S = 0.02


def rlpipe(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    with (folder / "output.log").open("a") as log:
        return subprocess.Popen(
            [str(Path(sys.executable).parent / "rlpipe"), *arguments], cwd=folder, env=environment,
            stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip


def ended(folder: Path, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(timeout=TIMEOUT_S) == 0, (folder / "output.log").read_text()[-3000:]


def sizes(root: Path) -> dict[str, int]:
    """KB below the iterations of a run, by kind: data files by their
    stage, and all JSON documents."""
    found: dict[str, int] = defaultdict(int)
    for path in root.glob("rl/*/**/*"):
        try:
            num_bytes = path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pruned at this moment
            continue
        kind = (
            "documents"
            if path.suffix == ".json" and path.parent.name in ("policy", "state")
            else path.relative_to(root).parts[2]
        )
        found[kind if kind in KINDS else "documents"] += num_bytes
    return {kind: found[kind] // 1000 for kind in KINDS}


def watch(folder: Path, process: subprocess.Popen[bytes], iterations: int) -> None:
    """Prints a line for each iteration of SHOWN while the run goes on."""
    root = folder / "store/runs/lean"
    print(f"{'iterations':>10s}  " + "".join(f"{kind:>10s}" for kind in KINDS) + "   KB")
    for count in [count for count in SHOWN if count < iterations]:
        while not (root / f"rl/{count - 1:05d}/iteration.json").exists():
            assert process.poll() is None, (folder / "output.log").read_text()[-3000:]
            time.sleep(POLL_S)
        line(root, count)
    ended(folder, process)
    line(root, iterations)


def line(root: Path, count: int) -> None:
    print(f"{count:10d}  " + "".join(f"{size:10d}" for size in sizes(root).values()), flush=True)


def prunings(root: Path) -> dict[Path, bool]:
    """What was pruned of a run, or began to be, and whether it was finished."""
    found = {}
    for path in root.glob("rl/*/*/pruned.json"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = bool(json.loads(path.read_text())["finished"])
    return found


def kill_while_pruning(folder: Path, command: list[str], kills: int) -> None:
    """Starts a run, kills it within KILLED_S of the beginning of a pruning, and starts it again;
    the last start goes to its end."""
    root, moments, unfinished = folder / "store/runs/killed", random.Random(0), 0
    for _ in range(kills):
        process, known = rlpipe(folder, *command), set(prunings(root))
        while not set(prunings(root)) - known:
            assert process.poll() is None, (folder / "output.log").read_text()[-3000:]
            time.sleep(0.001)
        time.sleep(moments.uniform(0, KILLED_S))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        unfinished += not all(prunings(root).values())
    ended(folder, rlpipe(folder, *command))
    print(
        f"killed {kills} times while it pruned, {unfinished} of them in the middle of one; all are finished: "
        f"{all(prunings(root).values())}"
    )


def final_sha256(store: Store, run: str, iterations: int) -> str:
    return open_existing(store, run).policy(iterations)[1].file("model.safetensors").sha256


def measure(folder: Path, iterations: int, kills: int) -> None:
    settings = [
        *NEAR_EMPTY,
        *KEPT,
        MOVES,
        f"rl.num_iterations={iterations}",
        "tracking.uri=",
        f"store=file://{folder}/store",
    ]
    sets = [part for setting in settings for part in ("--set", setting)]
    watch(folder, rlpipe(folder, "run", "tiny", "--run", "lean", *sets), iterations)
    store = ["--store", f"file://{folder}/store"]
    if kills:
        kill_while_pruning(folder, ["run", "tiny", "--run", "killed", *sets], kills)
        ended(folder, rlpipe(folder, "verify", "killed", *store))
        digests = {final_sha256(open_store(f"file://{folder}/store"), run, iterations) for run in ("lean", "killed")}
        assert len(digests) == 1, digests
        print(f"verify is clean; both runs end with {digests.pop()}")
    ended(folder, rlpipe(folder, "verify", "lean", *store))
    run = open_existing(open_store(f"file://{folder}/store"), "lean")
    kept = [version for version in range(1, iterations + 1) if not is_pruned(run.store, run.policy(version)[0].folder)]
    at = min(FORK_AT, iterations // 2)
    print(f"verify is clean; versions that have their files: {kept}")
    ref, manifest = run.policy(at + 1)
    assert is_pruned(run.store, ref.folder), f"version {at + 1} was kept"
    began = time.monotonic()
    ended(
        folder,
        rlpipe(
            folder, "fork", "lean", "--at", str(at), "--run", "again", "--set", f"rl.num_iterations={at + 2}", *store
        ),
    )
    for record in manifest.files:
        check_file(run.store, ref.folder, record)
    print(f"fork --at {at}, and one iteration more: {time.monotonic() - began:.0f} s; its {len(manifest.files)} "
          "files have the hashes of their manifest, "
          f"model.safetensors {manifest.file('model.safetensors').sha256}")  # fmt: skip
    for name in ("lean", "again"):
        ended(folder, rlpipe(folder, "verify", name, *store))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    iterations = arguments.iterations
    if iterations < 20:
        parser.error(f"--iterations {iterations}: use 20 or more")
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch), iterations, arguments.kills)


if __name__ == "__main__":
    main()
