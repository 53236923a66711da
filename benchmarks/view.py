"""How long `rlpipe view` takes for a page of each kind, on the disk and on
S3 (SeaweedFS on this machine).

    .venv/bin/python benchmarks/view.py [--iterations 200] [--rollouts 4096] [--rounds 3]
        [--folder /tmp] [--no-s3]

Writes one run with the store's own writers (benchmarks/synthetic.py), as many metrics an iteration
as a real one has, ten evaluations, and a fork. `cold`: the first page that a new server answers,
with the processor time that took; `warm`: the same page once more. Both are of the whole answer
over HTTP, medians, in brackets the least and the most. `drawn` is Chromium's time from the address
to the drawn curves, in a new browser whose cache is empty.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psutil
import pyarrow as pa
from tokenizers import Tokenizer, models

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.synthetic import GROUP_SIZE, ROOT, VOCABULARY, artifact, copied, sampled, written
from rlpipe.config.source import override_config
from rlpipe.extras.view.groups import iteration_groups
from rlpipe.extras.view.library import Library
from rlpipe.records.columns import to_parquet
from rlpipe.records.rollout import SCORES
from rlpipe.store.backend import Store
from rlpipe.store.opening import fork, open_existing
from tests.browser import CHROMIUM, browser
from tests.s3_world import serving

METRICS = {f"time/stage_{index:02d}_s": index / 7 for index in range(60)}
EVALUATED_EVERY, PROMPTS = 20, 256
PAGES = {
    "runs": "/",
    "two runs side by side": "/compare?run=big&run=fork",
    "a run": "/runs/big",
    "an iteration's groups": "/runs/big/iterations/150",
    "a group": "/runs/big/iterations/150/groups/7",
    "a rollout's tokens": "/runs/big/iterations/150/groups/7/rollouts/3",
    "a prompt through the iterations": "/runs/big/prompts?id={prompt}",
    "answers before and after": "/runs/big/evaluations?before=20&after=200",
    "search (a word that is not there)": "/search?run=big&text=qqqqqq",
}


def completed(store: Store, iterations: int) -> None:
    """Adds a tokenizer, evaluations and a fork, where they are not there yet."""
    run = open_existing(store, "big")
    if "fork" in store.folders("runs"):
        return
    vocabulary = {f"w{index} ": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0 "))
    artifact(run, 0, "tokenizer", {"tokenizer.json": tokenizer.to_str().encode()}, {}, "base")
    for version in range(0, iterations + 1, EVALUATED_EVERY):
        table = sampled(version, PROMPTS * GROUP_SIZE, "lorem ipsum dolor " * 5000).table.select(SCORES)
        ids = pa.array([f"heldout/{index // GROUP_SIZE}" for index in range(table.num_rows)])
        data = to_parquet(table.set_column(table.column_names.index("prompt_id"), "prompt_id", ids))
        phase, number = run.policy_place(version)
        artifact(run, number, "evaluation", {"evaluation.parquet": data}, {"p_greedy": version / 400}, phase, version)
    fork(run, iterations - 1, override_config(run.config, ["run=fork", "rl.clip_high=0.4"]))


@contextmanager
def serving_view(url: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server of its own: its address without the slash, and its process."""
    command = [sys.executable, "-m", "flows.cli", "view", "--store", url, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout
        yield process.stdout.readline().split("/ shows")[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=30)


def fetched(address: str, server: psutil.Process) -> tuple[float, float, int]:
    """Seconds until the whole answer is there, processor seconds of the
    server, and the bytes of the answer."""
    before, started = server.cpu_times(), time.perf_counter()
    with urllib.request.urlopen(address, timeout=600) as answer:
        data = answer.read()
    seconds, after = time.perf_counter() - started, server.cpu_times()
    return seconds, after.user + after.system - before.user - before.system, len(data)


def drawn(root: str, path: str) -> float:
    """Seconds from the navigation to the load event, curves drawn, in a new browser; scripts are
    deferred, so the event is behind them."""
    with browser(root) as tab:
        started = time.perf_counter()
        tab.page.goto(f"{root}{path}", wait_until="load")
        seconds = time.perf_counter() - started
        assert tab.page.locator("[data-plots]").count() == tab.page.locator("[data-drawn]").count()
        return seconds


def text_of(values: list[float]) -> str:
    return f"{statistics.median(values):6.3f} ({min(values):.3f} to {max(values):.3f})"


def measure(place: str, url: str, rounds: int, prompt: str) -> None:
    print(f"\n{place}: {url}\n{'page':36s}{'KB':>6s}  {'cold s':26s}{'its CPU s':11s}{'warm s':26s}drawn s", flush=True)
    for name, template in PAGES.items():
        path = template.format(prompt=quote(prompt))
        cold, cpu, warm, shown, size = list[float](), list[float](), list[float](), list[float](), 0
        for _ in range(rounds):
            with serving_view(url) as (root, server):
                seconds, cpu_seconds, size = fetched(root + path, server)
                cold.append(seconds)
                cpu.append(cpu_seconds)
                warm.append(fetched(root + path, server)[0])
                if CHROMIUM:
                    shown.append(drawn(root, path))
        figures = (
            f"{text_of(cold):26s}{statistics.median(cpu):6.2f}     "
            f"{text_of(warm):26s}{text_of(shown) if shown else '-'}"
        )
        print(f"{name:36s}{size / 1e3:6.0f}  {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=4096, help="of an iteration")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--no-s3", action="store_true")
    arguments = parser.parse_args()
    assert arguments.iterations > 150, "the pages are of iteration 150"
    store = written(arguments.folder, arguments.iterations, arguments.rollouts, METRICS)
    completed(store, arguments.iterations)
    assert store.local
    size = sum(path.stat().st_size for path in store.local.rglob("*") if path.is_file())
    print(f"{arguments.iterations} iterations x {arguments.rollouts} rollouts, {size / 1e9:.2f} GB", flush=True)
    prompt = iteration_groups(Library(store), open_existing(store, "big"), 150).groups()[7].prompt_id
    measure("disk", store.url, arguments.rounds, prompt)
    if arguments.no_s3:
        return
    weed = Path(tempfile.mkdtemp(prefix="weed-", dir=arguments.folder))
    try:
        with serving(weed):
            url = "s3://rlpipe/view"
            copied(store, url)
            measure("SeaweedFS", url, arguments.rounds, prompt)
    finally:
        shutil.rmtree(weed, ignore_errors=True)


if __name__ == "__main__":
    main()
