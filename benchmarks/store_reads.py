"""What one SFT segment and one RL iteration read from a store on S3: requests and bytes, by kind of
file.

    .venv/bin/python benchmarks/store_reads.py [--code DIR] [--wait-ms 30] [--keys]

Runs a short `rlpipe run tiny` on SeaweedFS, behind a proxy that counts the requests of all
processes: flow, trainer, engines. `--code` is another checkout, whose code runs instead: the same
script measures before and after a change. `--wait-ms`: added to every request, as a network does. A
segment is what happens between the commits of two segments, an iteration what happens between those
of two iterations: the second and third of each.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.base.values import JsonDict
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from tests.s3_world import S3Proxy, S3Request, serving

ROOT = Path(__file__).parent.parent
RUN = "reads"
SETTINGS = [
    "sft.num_steps=24", "sft.segment_steps=8", "sft.decay_steps=24", "rl.num_iterations=4",
    "evaluation.every=0", "trainer.ranks=2", "trainer.threads=1", "tracking.uri=",
]  # fmt: skip
VERBS = ("sample_prompts", "generate", "score", "filter", "train", "checkpoint", "reload_engines")
WINDOWS = {  # title -> the commits that begin and end it
    "one SFT segment": ("sft/00001/policy/manifest.json", "sft/00002/policy/manifest.json"),
    "one RL iteration": ("rl/00001/iteration.json", "rl/00002/iteration.json"),
}
ATTEMPT = re.compile(r"(\d{6,18}l)?[0-9a-f]{12,32}")


def kind_of(request: S3Request) -> str:
    """What is read: the folder of the artifact, without numbers, and the file."""
    _, _, key = request.path.partition(f"/runs/{RUN}/")
    if not key:
        return "(listing)" if "list-type" in request.query else request.path
    parts = [part for part in key.split("/") if not ATTEMPT.fullmatch(part)]
    numberless = [re.sub(r"\d{5,6}", "*", re.sub(r"-\d+$", "", part)) for part in parts]
    return "/".join(part for part in numberless if part != "*")


def window(requests: list[S3Request], first: str, last: str) -> list[S3Request]:
    """The requests between two commits."""
    commits = [
        next(i for i, one in enumerate(requests) if one.method == "PUT" and one.path.endswith(f"/{end}"))
        for end in (first, last)
    ]
    return requests[commits[0] + 1 : commits[1] + 1]


def report(title: str, requests: Iterable[S3Request], by_key: bool) -> None:
    reads = [request for request in requests if request.method in ("GET", "HEAD")]
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    seen: set[str] = set()
    for request in reads:
        row, is_get = rows[request.path if by_key else kind_of(request)], request.method == "GET"
        again = is_get and f"{request.path} {request.headers.get('Range', '')}" in seen
        seen.add(f"{request.path} {request.headers.get('Range', '')}" if is_get else "")
        for place, number in enumerate((is_get, again, not is_get, is_get * request.answered_bytes)):
            row[place] += number
    rows["in all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(f"\n{title:<52}{'GET':>6}{'again':>7}{'HEAD':>6}{'bytes':>12}")
    for name, row in sorted(rows.items(), key=lambda item: (item[0] == "in all", -item[1][3])):
        print(f"  {name:<50}{row[0]:>6}{row[1]:>7}{row[2]:>6}{row[3]:>12,}", flush=True)


def report_seconds(metrics: JsonDict) -> None:
    seconds = [f"{verb} {metrics[f'time/{verb}_s']:.2f}" for verb in VERBS if f"time/{verb}_s" in metrics]
    print(f"\nseconds of that iteration: {', '.join(seconds)}")


def run_pipeline(code: Path, folder: Path, settings: list[str]) -> None:
    arguments = [part for setting in [*SETTINGS, *settings] for part in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": str(code), "PREFECT_HOME": str(folder / "prefect")}
    command = [sys.executable, "-m", "flows.cli", "run", "tiny", "--run", RUN, *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, default=ROOT, help="the checkout whose code runs")
    parser.add_argument("--wait-ms", type=float, default=0, help="added to every request")
    parser.add_argument("--keys", action="store_true", help="a line for each key")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "weed").mkdir()
        with serving(folder / "weed") as server:
            proxy = S3Proxy(server.endpoint)
            proxy.holds = lambda method, target: bool(time.sleep(options.wait_ms / 1000))
            os.environ["AWS_ENDPOINT_URL"], store = proxy.url, server.url()
            run_pipeline(options.code.resolve(), folder, [f"store={store}", *options.set])
            for title, ends in WINDOWS.items():
                report(title, window(proxy.requests, *ends), options.keys)
            report_seconds(open_existing(open_store(store), RUN).record(2).metrics)
            proxy.close()


if __name__ == "__main__":
    main()
