"""The runs of benchmarks/why.py: one SFT, and runs of RL with a fault planted at a known iteration,
through what a user has in hand: settings of a fork, the code of a reward, a reward service, an
environment, the data. Two are changed in the store (`AS_STORED`).
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import reasoning_gym

from rlpipe.base.values import JsonDict
from rlpipe.data.cursor import PromptCursor
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.run_record import RunRecord, record_key
from tests.pipeline import Folder

CODE = Path(__file__).parent / "planted"
ITERATIONS, AT, PROMPTS, GROUP = 12, 6, 16, 8
HACKED_ITERATIONS = 24
EASY, HARD = (3, 4, 5, 6, 7), (9, 10)
AS_STORED = ("stale_engine", "wrong_reference")
ASKED = "Spell this word backward (example: sun -> nus): {word}"
OTHERWISE = (
    "You are careful. The word is given between brackets [{word}]. What is it, written from its end to its beginning?"
)


def words() -> dict[int, list[str]]:
    """Words by their length."""
    rows = reasoning_gym.create_dataset("spell_backward", size=8000, seed=5, min_word_len=3, max_word_len=10)
    by_length: dict[int, list[str]] = {}
    for row in rows:
        word = row["metadata"]["word"]
        by_length.setdefault(len(word), []).append(word)
    return {length: sorted(set(listed)) for length, listed in by_length.items()}


WORDS = words()


def drawn(rng: random.Random, count: int, lengths: tuple[int, ...] = EASY) -> list[JsonDict]:
    """Prompts in the order in which they are drawn."""
    chosen = [rng.choice(WORDS[rng.choice(lengths)]) for _ in range(count)]
    return [{"prompt": ASKED.format(word=word), "answer": word[::-1], "word": word} for word in chosen]


def write_rows(path: Path, rows: list[JsonDict], seed: int = 0) -> None:
    """A file from which a run of this seed draws the rows in this order:
    the cursor's shuffle is undone."""
    cursor = PromptCursor([len(rows)], [1.0], seed)
    order, _ = cursor.take(cursor.start(), len(rows))
    placed: list[JsonDict] = [{} for _ in rows]
    for (_, place), row in zip(order, rows, strict=True):
        placed[place] = row
    path.write_text("".join(json.dumps(row) + "\n" for row in placed))


def healthy_rows(rng: random.Random, iterations: int = ITERATIONS, prompts: int = PROMPTS) -> list[JsonDict]:
    return drawn(rng, iterations * prompts)


Change = Callable[[random.Random, list[JsonDict]], list[JsonDict]]  # of the rows from the fault on


def harder(rng: random.Random, rows: list[JsonDict]) -> list[JsonDict]:
    return drawn(rng, len(rows), HARD)


def asked_otherwise(rng: random.Random, rows: list[JsonDict]) -> list[JsonDict]:
    return [{**row, "prompt": OTHERWISE.format(word=row["word"])} for row in rows]


def poisoned(rng: random.Random, rows: list[JsonDict]) -> list[JsonDict]:
    """Half of the labels are those of other words."""
    others = drawn(rng, len(rows))
    return [
        {**row, "answer": other["answer"]} if rng.random() < 0.5 else row
        for row, other in zip(rows, others, strict=True)
    ]


def flooded(rng: random.Random, rows: list[JsonDict]) -> list[JsonDict]:
    """Three rows of four are copies of two rows."""
    copies = rng.sample(rows, 2)
    return [rng.choice(copies) if rng.random() < 0.75 else row for row in rows]


IN_THE_DATA: dict[str, Change] = {
    "hard_data": harder,
    "template_change": asked_otherwise,
    "poisoned_labels": poisoned,
    "duplicate_flood": flooded,
}


@dataclass
class Judge:
    """A reward service that is right for its first `good` answers, and then says 0."""

    good: int
    answered: int = 0

    def reward(self, item: JsonDict) -> float:
        self.answered += 1
        answer = item["completion"].rpartition("<answer>")[2].partition("</answer>")[0].strip()
        return float(answer == item["prompt"]["answer"]) if self.answered <= self.good else 0.0


@contextlib.contextmanager
def served(judge: Judge) -> Iterator[str]:
    """The URL of the service."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            item = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                data = json.dumps({"reward": judge.reward(item)}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


class World:
    """A folder with a store, and the runs in it. Runs that are there are not made again."""

    def __init__(self, path: Path, environment: dict[str, str]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        code = {"PYTHONPATH": f"{CODE}:{environment['PYTHONPATH']}"}
        self.folder = Folder(path, f"file://{path}/store", environment | code)

    def complete(self, *arguments: str) -> None:
        code, output = self.folder.rlpipe(*arguments)
        assert code == 0, output[-3000:]

    def has(self, run: str, iterations: int) -> bool:
        return self.folder.open_store().exists(f"runs/{run}/rl/{iterations - 1:05d}/iteration.json")

    def base(self) -> None:
        """The SFT that all runs share."""
        if not (self.path / "words.jsonl").exists():
            write_rows(self.path / "words.jsonl", healthy_rows(random.Random(0)))
        sets = [f"store={self.folder.store}", "rl.num_iterations=0"]
        self.complete(
            "run", str(CODE / "spelling.toml"), "--run", "base", *[part for entry in sets for part in ("--set", entry)]
        )

    def fork(self, parent: str, at: int | str, run: str, *sets: str, iterations: int = ITERATIONS) -> None:
        if not self.has(run, iterations):
            entries = [f"rl.num_iterations={iterations}", *sets]
            options = [part for entry in entries for part in ("--set", entry)]
            code, output = self.folder.rlpipe(
                "fork", parent, "--at", str(at), "--run", run, "--store", self.folder.store, *options
            )
            # where a reward is broken nothing is trained in any iteration, and the command says so
            assert code == 0 or self.has(run, iterations), output[-3000:]

    def from_rows(self, run: str, rows: list[JsonDict], *sets: str, iterations: int = ITERATIONS) -> None:
        """A run of RL on these rows, in their order."""
        write_rows(self.path / f"{run}.jsonl", rows)
        self.fork("base", "sft", run, f"data.words.source={run}.jsonl", *sets, iterations=iterations)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[None]:
        """In the body there is such a file in the working directory."""
        (self.path / name).write_text("x")
        try:
            yield
        finally:
            (self.path / name).unlink()

    def plant(self, seed: int) -> dict[str, str]:
        """Fault -> the run that has it from iteration AT on."""
        names = {fault: f"{fault}-{seed}" for fault in FAULTS}
        parent = f"parent-{seed}"
        self.from_rows(parent, healthy_rows(random.Random(seed)))
        for fault, change in IN_THE_DATA.items():
            rng = random.Random(f"{fault}/{seed}")
            rows = healthy_rows(rng)
            self.from_rows(names[fault], [*rows[: AT * PROMPTS], *change(rng, rows[AT * PROMPTS :])])
        with self.file("broken"):
            self.fork(parent, AT - 1, names["broken_part"])
        self.fork(parent, AT - 1, names["learning_rate"], "rl.learning_rate=1e-2")
        self.fork(parent, AT - 1, names["truncation"], "rl.completion_tokens_max=7")
        self._service(names["service_zeros"], seed)
        self._environment(names["environment_fault"], seed)
        rewards = 'rl.rewards={"scorers:spelled" = 0.5, "scorers:long" = 0.5}'
        rows = healthy_rows(random.Random(f"hacked/{seed}"), HACKED_ITERATIONS)
        self.from_rows(names["length_hacked"], rows, rewards, "rl.learning_rate=5e-4", iterations=HACKED_ITERATIONS)
        self.stale(parent, names["stale_engine"], seed)
        self._reference(parent, names["wrong_reference"], names["learning_rate"])
        return names

    def _service(self, run: str, seed: int) -> None:
        if self.has(run, ITERATIONS):
            return
        with served(Judge(AT * PROMPTS * GROUP)) as url:
            rewards = 'rl.rewards={remote = 0.7, "scorers:near" = 0.2, format = 0.1}'
            rows = healthy_rows(random.Random(f"service/{seed}"))
            self.from_rows(run, rows, rewards, f'rl.reward_args={{remote = {{url = "{url}"}}}}', "evaluation.every=0")

    def _environment(self, run: str, seed: int) -> None:
        rows = healthy_rows(random.Random(f"environment/{seed}"))
        sets = ["rl.environment=spelling:Spelling", "rl.rewards={environment = 0.9, format = 0.1}"]
        self.from_rows(f"before-{run}", rows, *sets, iterations=AT)
        with self.file("broken_tool"):
            self.fork(f"before-{run}", AT - 1, run)

    def stale(self, parent: str, run: str, seed: int) -> None:
        """Rollouts that a policy sampled which stopped to learn at iteration 2, under the versions
        that the engine should have had."""
        frozen = f"frozen-{seed}"
        self.fork(parent, 1, frozen, "rl.learning_rate=1e-12")
        self.fork(parent, AT - 1, run, f"rl.rollouts_from=run:{frozen}")
        self._hide(run, "rollouts_from", "")

    def _reference(self, parent: str, run: str, other: str) -> None:
        self.fork(parent, AT - 1, run, f"rl.reference=run:{other}")
        self._hide(run, "reference", "")

    def _hide(self, run: str, name: str, value: str) -> None:
        """What the run was planted with is taken out of its record: its iterations look as if
        nobody had asked for it."""
        store, key = self.folder.open_store(), record_key(run)
        record = read_document(store, key, RunRecord)
        if record.config["rl"][name] != value:
            store.put(
                key, sealed(replace(record, config={**record.config, "rl": {**record.config["rl"], name: value}}))
            )

    def healthy(self, number: int) -> str:
        """A run to which nothing happens, of another shape each."""
        run, rng = f"healthy-{number:02d}", random.Random(f"healthy/{number}")
        prompts, group = rng.choice([8, 12, 16, 24]), rng.choice([4, 8])
        rate = rng.choice([5e-5, 1e-4, 2e-4, 4e-4])
        rewards = rng.choice(['{"scorers:spelled" = 0.6, "scorers:near" = 0.3, format = 0.1}',
                              '{"scorers:spelled" = 1.0}', '{"scorers:near" = 0.9, format = 0.1}'])  # fmt: skip
        sets = [
            f"rl.num_prompts={prompts}",
            f"rl.group_size={group}",
            f"rl.learning_rate={rate}",
            f"rl.rewards={rewards}",
            "evaluation.prompts_max=16",
        ]
        self.from_rows(run, healthy_rows(rng, prompts=prompts), *sets)
        return run


FAULTS: dict[str, tuple[str, ...]] = {  # what was planted -> the suspects that are it
    "broken_part": ("reward_part",),
    "hard_data": ("mix",),
    "truncation": ("truncation",),
    "stale_engine": ("mismatch", "staleness"),
    "learning_rate": ("settings",),
    "service_zeros": ("reward_part",),
    "template_change": ("template",),
    "poisoned_labels": ("labels",),
    "duplicate_flood": ("duplicates",),
    "length_hacked": ("hacked_part",),
    "environment_fault": ("environment_faults",),
    "wrong_reference": ("reference",),
}
