"""How long `rlpipe sql` takes over many rollouts, on the disk and on
S3 (SeaweedFS on this machine).

    .venv/bin/python benchmarks/queries.py [--iterations 200] [--rollouts 5000] [--rounds 3]
        [--folder /tmp] [--no-s3]

Writes one run with the store's own writers: iterations of rollouts in ten shards, their scores, the
batch of the groups whose rewards differ. Each query is a process of its own, as a user starts it; a
figure is the median of the rounds, in brackets the least and the most. `cpu` is the processor time
of the process. The first line is a query of next to nothing: starting Python, importing, listing
the store.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.synthetic import copied, written
from tests.s3_world import serving

ROOT = Path(__file__).parent.parent
QUERIES = {
    "mean reward by iteration": "select iteration, avg(reward), avg(num_tokens) from scores group by all order by all",
    "parts of the reward": (
        "select iteration // 50 as part, avg(reward_parts['exact']), avg(reward_parts['format']) "
        "from scores group by all"
    ),
    "trained and dropped": (
        "select finish_reason, trained, count(*), avg(advantage), count(dropped_reason) from rollouts "
        "group by all order by all"
    ),
    "prompts never solved": (
        "select prompt_id, count(*) from rollouts group by prompt_id having max(reward) < 1 order by count(*) "
        "desc, prompt_id limit 20"
    ),
    "one iteration's best": (
        "select prompt_id, reward, completion from rollouts where iteration = 150 order by reward "
        "desc, prompt_id limit 10"
    ),
    "runs and iterations": (
        "select run, iteration, reward_mean, metrics['rollout/pass_rate'] from iterations order by all desc limit 5"
    ),
}


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of the processor in children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def asked(url: str, query: str) -> None:
    command = [sys.executable, "-m", "flows.cli", "sql", query, "--store", url, "--format", "csv"]
    subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def text_of(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(place: str, url: str, rounds: int) -> None:
    print(f"\n{place}: {url}\n{'query':28s}  {'wall s':22s}  cpu s")
    for name, query in {"nothing (select 1 from runs)": "select 1 from runs", **QUERIES}.items():
        figures = [seconds(lambda query=query: asked(url, query)) for _ in range(rounds)]
        walls, cpus = zip(*figures, strict=True)
        print(f"{name:28s}  {text_of(list(walls)):22s}  {text_of(list(cpus))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=5000, help="of an iteration")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--no-s3", action="store_true")
    arguments = parser.parse_args()
    started = time.perf_counter()
    store = written(arguments.folder, arguments.iterations, arguments.rollouts)
    assert store.local
    size = sum(path.stat().st_size for path in store.local.rglob("*") if path.is_file())
    total = arguments.iterations * arguments.rollouts
    print(f"{total:,} rollouts, {size / 1e9:.2f} GB, written in {time.perf_counter() - started:.0f} s", flush=True)
    measure("disk", store.url, arguments.rounds)
    if arguments.no_s3:
        return
    weed = Path(tempfile.mkdtemp(prefix="weed-", dir=arguments.folder))
    try:
        with serving(weed):
            url = "s3://rlpipe/queries"
            copied(store, url)
            measure("SeaweedFS", url, arguments.rounds)
    finally:
        shutil.rmtree(weed, ignore_errors=True)


if __name__ == "__main__":
    main()
