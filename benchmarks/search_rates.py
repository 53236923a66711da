"""Successive halving beside full runs: eight learning rates of the preset `tiny` from iteration 10.

    .venv/bin/python benchmarks/search_rates.py FOLDER [--seeds 0 1 2] [--iterations 20] [--explore]

A seed is a base run of its own. From its iteration 10 on, eight forks are trained to the end
(`rlpipe search` with one rung), and searched (three rungs: a fifth, half and all of the
iterations). Both have the same seeds and prompts. The search passes where its winner's
`evaluation/words_pass_at_1` is that of the best full run, or less by no more than the standard
error of that, and its forks sampled at most half the tokens. What FOLDER has already is not
computed again: the same command goes on. `--explore` trains a population, too, and prints it beside
them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.algorithms.answers import STDERR
from rlpipe.extras.search.halving import Decision
from rlpipe.report.curves import evaluation_of
from rlpipe.store.documents import read_document
from rlpipe.store.limits import TOKENS, spent_before
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from tests.pipeline import Folder, kill_group

AT, METRIC = 10, "words_pass_at_1"
RATES = ["2.5e-5", "5e-5", "1e-4", "2e-4", "4e-4", "8e-4", "1.6e-3", "3.2e-3"]
SHARE_MAX = 0.5  # of the tokens of the full runs
TIMEOUT_S = 12 * 3600.0


@dataclass(frozen=True)
class Searched:
    """What a search ended with: its winner's learning rate and score with the standard error; the
    tokens that its forks sampled.
    """

    rate: float
    score: float
    error: float
    tokens: int


def done_or_raise(folder: Folder, arguments: list[str]) -> None:
    process = folder.start(*arguments)
    try:
        code = process.wait(timeout=TIMEOUT_S)
    finally:
        kill_group(process)
    if code:
        raise SystemExit(f"exit {code} of rlpipe {' '.join(arguments)}\n{folder.said()}")


def base_run(folder: Folder, seed: int) -> str:
    """The run of a seed up to the iteration that all forks share."""
    store, name = folder.open_store(), f"base-{seed}"
    if not store.exists(f"runs/{name}/rl/{AT:05d}/iteration.json"):
        sets = [f"seed={seed}", f"rl.num_iterations={AT + 1}", "evaluation.every=0"]
        done_or_raise(folder, folder.run_arguments(name, *sets))
    return name


def searched(folder: Folder, base: str, name: str, rungs: list[int], *options: str) -> Searched:
    """Searches, unless the store has the last decision."""
    store, last = folder.open_store(), f"searches/{name}/rung-{len(rungs) - 1}.json"
    if not store.exists(last):
        search = ["search", base, "--at", str(AT), "--vary", f"rl.learning_rate={','.join(RATES)}"]
        search += ["--rungs", ",".join(map(str, rungs)), "--by", f"evaluation/{METRIC}", "--name", name]
        done_or_raise(folder, [*search, *options, "--store", folder.store])
    decisions = [read_document(store, f"searches/{name}/rung-{number}.json", Decision) for number in range(len(rungs))]
    runs = [open_existing(store, run) for run in sorted({run for decision in decisions for run in decision.scores})]
    winner = open_existing(store, decisions[-1].kept[0])
    evaluation = evaluation_of(winner, AT + 1 + rungs[-1])
    assert evaluation is not None, f"{winner.name} was compared after its last iteration"
    return Searched(
        winner.config.rl.learning_rate,
        evaluation.metrics[METRIC],
        evaluation.metrics[METRIC + STDERR],
        int(sum(spent_before(run, Progress(run).num_iterations)[TOKENS] for run in runs)),
    )


def row(seed: int, kind: str, one: Searched, full: Searched) -> str:
    passes = one.score >= full.score - full.error and one.tokens <= SHARE_MAX * full.tokens
    verdict = "" if one is full else "passes" if passes else "FAILS"
    cells = [str(seed), kind, f"{one.rate:g}", f"{one.score:.3f} ± {one.error:.3f}"]
    return " | ".join([*cells, f"{one.tokens:,}", f"{one.tokens / full.tokens:.1%}", verdict])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=20, help="of each full run after iteration 10")
    parser.add_argument("--explore", action="store_true", help="train a population, too")
    given = parser.parse_args()
    if given.iterations < 5:
        parser.error(f"--iterations {given.iterations}: the first rung is a fifth of them; use 5 or more")
    given.folder.mkdir(parents=True, exist_ok=True)
    folder = Folder(given.folder.resolve(), f"file://{given.folder.resolve()}/store")
    last = given.iterations
    rungs, rows = [last // 5, last // 2, last], []
    print("seed | search | learning rate | pass@1 of its winner | tokens | of the full runs |", flush=True)
    for seed in given.seeds:
        base = base_run(folder, seed)
        full = searched(folder, base, f"full-{seed}-{last}", [last])
        halving = searched(folder, base, f"halving-{seed}-{last}", rungs)
        rows += [row(seed, "full", full, full), row(seed, "halving", halving, full)]
        print(*rows[-2:], sep="\n", flush=True)
        if given.explore:
            population = searched(folder, base, f"population-{seed}-{last}", rungs, "--explore")
            print(row(seed, "population", population, full), flush=True)
    failed = sum(line.endswith("FAILS") for line in rows)
    print(json.dumps({"seeds": given.seeds, "iterations": last, "rungs": rungs, "failed": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
