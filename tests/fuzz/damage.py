"""A store with two runs and a fork, the ways in which a record of it can be
damaged, and what is then asked of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.base.hashing import canonical_json, sha256_of
from rlpipe.config.source import override_config
from rlpipe.report.show import iteration_report, iterations_report, runs_report
from rlpipe.store import audit, lease
from rlpipe.store.backend import Store
from rlpipe.store.documents import SEAL, sealed
from rlpipe.store.opening import create_or_continue, fork, open_existing
from rlpipe.store.progress import Progress
from tests.report.test_show import commit_rows
from tests.rows import BATCH, PROMPTS, fill, to_parquet
from tests.store.test_run import commit_sft, commit_stage, record_of, tiny

METRICS: dict[str, float] = {
    "rollout/reward_mean": 0.5, "rollout/pass_rate": 0.5, "rollout/groups_kept": 4, "rollout/length_tokens_mean": 7.0,
    "rollout/num_tokens": 70, "train/mismatch_abs_mean": 0.0, "time/iteration_s": 1.0, "evaluation/words_greedy": 0.25,
}  # fmt: skip
RAW: dict[str, bytes] = {
    "empty": b"", "an open brace": b"{", "a list": b"[]", "null": b"null", "text": b'"text"',
    "a number": b"7", "an empty object": b"{}",
    "binary": b"\xff\xfe\x00", "brackets": b"[" * 100_000, "NaN": b'{"schema_version": NaN}',
    "two objects": b"{}{}", "zeros": b"\0" * 64,
    "a parquet file": b"PAR1....PAR1", "a key twice": b'{"run": "a", "run": "b"}',
    "a huge number": b'{"at": 1' + b"0" * 5000 + b"}",
}  # fmt: skip
VALUES: dict[str, Any] = {
    "null": None,
    "number": 5,
    "below zero": -1,
    "text": "x",
    "list": [],
    "object": {},
    "true": True,
    "huge": 10**400,
}
NESTED: dict[str, list[tuple[str, Any]]] = {  # below the first level: (dotted place, value)
    "runs/a/run.json": [
        ("config.run", "b"), ("config.run", "../b"), ("config.run", None), ("config.store", 5), ("config.rl", None),
        ("config.rl.num_iterations", "x"),
        ("config.rl.no_such", 1), ("config.data", {}), ("config.data", [1]), ("config.sft.segment_steps", 0),
        ("libraries.torch", None),
    ],
    "runs/b/run.json": [
        ("fork.run", "b"), ("fork.run", "../a"), ("fork.run", "nobody"), ("fork.run", None), ("fork.at", -7),
        ("fork.at", 10**9), ("fork.at", "1"),
        ("fork.redo", "zzz"), ("fork.redo", "train"), ("fork.redo", None), ("fork.more", 1),
    ],
    "runs/a/rl/00001/iteration.json": [
        ("run", "b"), ("iteration", 0), ("metrics.rollout/reward_mean", None), ("metrics.rollout/reward_mean", "x"),
        ("artifacts.policy", None),
        ("artifacts.policy.folder", "../../x"), ("artifacts.policy.folder", "runs/a/rl/00000/policy"),
        ("artifacts.policy.sha256", "0" * 64),
        ("artifacts.policy.sha256", "x"), ("artifacts.batch.folder", "nowhere"),
        ("artifacts.prompts.folder", "runs/a"), ("best.reward", None),
        ("best.iteration", "x"), ("curve", [[None, 1]]), ("ended_at", "yesterday"),
        ("ended_at", "2026-99-99T00:00:00"), ("state_iteration", 77),
        ("weight_version", 9), ("artifacts", {}), ("metrics", {}),
    ],
    "runs/a/rl/00001/policy/manifest.json": [
        ("run", "b"), ("phase", "sft"), ("iteration", 0), ("stage", "batch"), ("stage", "../x"),
        ("files", [{}]), ("files", [None]),
        ("files", [{"name": "../x", "bytes": 1, "sha256": "0" * 64}]), ("inputs", {"batch": None}),
        ("inputs", {"batch": "0" * 64}),
        ("files.0.name", "evil"), ("files.0.bytes", -1), ("files.0.bytes", "x"),
        ("files.0.sha256", "x"), ("files.0.sha256", None),
        ("ended_at", "yesterday"),
    ],
    "runs/a/sft/00002/policy/manifest.json": [("ended_at", "yesterday"), ("started_at", ""),
                                              ("metrics", None), ("files", [])],
    "runs/a/lease/000000.json": [("pid", 10**30), ("process_started", "x"), ("host", ""),
                                 ("beats", -1), ("released", "no")],
}  # fmt: skip
DOCUMENTS = list(NESTED)


@dataclass(frozen=True)
class Damage:
    """One fault of a store: `do` makes it, in the folder of the store."""

    key: str
    name: str
    do: Callable[[Path], object]

    @property
    def label(self) -> str:
        return f"{self.key.removeprefix('runs/')}: {self.name}"


def make_store(store: Store) -> None:
    """Run a: SFT and three iterations; b: forked from it, with one of its own; c: on its own,
    nothing is wrong with it."""
    run = create_or_continue(tiny(store, "rl.num_iterations=5"))
    commit_sft(run)
    commit_rl(run, range(3))
    lease.acquire(store, run.root).release()
    commit_rl(fork(run, 1, override_config(run.config, ["run=b"])), range(2, 3))
    commit_rl(create_or_continue(tiny(store, "run=c", "sft.num_steps=0")), range(1))


def commit_rl(run: Any, iterations: range) -> None:
    for iteration in iterations:
        prompts = to_parquet([fill({"prompt_id": "p0", "answer": "x"}, PROMPTS)], PROMPTS)
        row = {"prompt_id": "p0", "prompt": "what?", "completion": "x", "reward": 0.5, "reward_parts": '{"exact": 0.5}'}
        refs = {
            "prompts": commit_rows(run, iteration, "prompts/round-0", "prompts.parquet", prompts),
            "batch": commit_rows(
                run, iteration, "batch/round-0", "batch.parquet", to_parquet([fill(row, BATCH)], BATCH)
            ),
            "policy": commit_stage(run, iteration, "policy"),
        }
        assert run.store.create(run.iteration_key(iteration), sealed(record_of(run, iteration, METRICS, refs)))


def _write(key: str, data: bytes) -> Callable[[Path], object]:
    return lambda store: (store / key).write_bytes(data)


def _cut(key: str, share: float) -> Callable[[Path], object]:
    return lambda store: (store / key).write_bytes((data := (store / key).read_bytes())[: int(len(data) * share)])


def _set(key: str, place: str, value: Any, seal: bool) -> Callable[[Path], object]:
    """Another value in a document; with a seal that fits, or none, as older versions wrote it.

    `...` for a value: the field is away.
    """

    def do(store: Path) -> None:
        tree = json.loads((store / key).read_bytes())
        tree.pop(SEAL, None)
        *outer, last = place.replace("rollout/reward_mean", "@").split(".")
        node: Any = tree
        for part in outer:
            node = node[int(part)] if isinstance(node, list) else node[part]
        last = last.replace("@", "rollout/reward_mean")
        if value is ...:
            node.pop(last, None)
        else:
            node[last] = value
        (store / key).write_bytes(canonical_json(tree | ({SEAL: sha256_of(tree)} if seal else {})))

    return do


def _replace(key: str, how: Callable[[Path], Any]) -> Callable[[Path], object]:
    def do(store: Path) -> None:
        path = store / key
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        how(path)

    return do


def _flip(key: str, where: float) -> Callable[[Path], object]:
    def do(store: Path) -> None:
        data = bytearray((store / key).read_bytes())
        data[int(len(data) * where)] ^= 4
        (store / key).write_bytes(data)

    return do


def damages(store: Path) -> Iterator[Damage]:
    """All of them. `store`: the whole one, to see which fields there are."""
    for key in DOCUMENTS:
        yield from (Damage(key, f"is {name}", _write(key, data)) for name, data in RAW.items())
        yield from (Damage(key, f"cut to {share:.0%}", _cut(key, share)) for share in (0.01, 0.5, 0.99))
        yield from (Damage(key, f"a byte flipped at {where:.0%}", _flip(key, where)) for where in (0.1, 0.4, 0.9))
        for field in sorted(json.loads((store / key).read_bytes()).keys() - {SEAL}):
            yield Damage(key, f"{field} is away", _set(key, field, ..., seal=True))
            yield from (
                Damage(key, f"{field} is {name}", _set(key, field, value, seal=True)) for name, value in VALUES.items()
            )
        for place, value in NESTED[key]:
            yield from (
                Damage(key, f"{place}={value!r:.40}{' without a seal' * (not seal)}", _set(key, place, value, seal))
                for seal in (True, False)
            )
    yield from _places()


def _places() -> Iterator[Damage]:
    """What lies where something else should: folders, links, files of others."""
    for key in [*DOCUMENTS, "runs/a/rl/00001/policy/a1/data.bin", "runs/a/rl/00001/batch/round-0/a1/batch.parquet"]:
        yield Damage(key, "away", _replace(key, lambda _: None))
        yield Damage(key, "a folder", _replace(key, Path.mkdir))
        yield Damage(key, "a link to nothing", _replace(key, lambda path: path.symlink_to("nothing")))
        yield Damage(key, "a link to itself", _replace(key, lambda path: path.symlink_to(path.name)))
    for folder in (
        "runs/a/rl/00001",
        "runs/a/rl/00001/policy",
        "runs/a/sft",
        "runs/a/sft/00001/state",
        "runs/a/base",
        "runs/a/lease",
        "runs/b/rl",
    ):
        yield Damage(folder, "away", _replace(folder, lambda _: None))
        yield Damage(folder, "a file", _replace(folder, lambda path: path.write_bytes(b"x")))
        yield Damage(folder, "empty", _replace(folder, Path.mkdir))
    for key in ("runs/a/rl/x/iteration.json", "runs/a/rl/00009/iteration.json",
                "runs/a/rl/99999999999999/policy/manifest.json",
                "runs/a/sft/odd/place/manifest.json", "runs/a/manifest.json", "runs/a/lease/999999999999999999999.json",
                "runs/a/lease/x.json",
                "runs/a b/run.json", "runs/-x/run.json", "runs/d/run.json", "runs/x.json",
                "runs/a/services/trainer/node-0.json"):  # fmt: skip
        yield Damage(key, "put there", _foreign(key))


def _foreign(key: str) -> Callable[[Path], object]:
    def do(store: Path) -> None:
        (store / key).parent.mkdir(parents=True, exist_ok=True)
        (store / key).write_bytes(b'{"foreign": 1}')

    return do


@contextlib.contextmanager
def damaged(store: Path, scratch: Path, damage: Damage) -> Iterator[None]:
    """The store with the damage done; whole again afterwards."""
    shutil.copytree(store, scratch, symlinks=True)
    try:
        damage.do(store)
        yield
    finally:
        shutil.rmtree(store)
        scratch.rename(store)


def readers(store: Store) -> dict[str, Callable[[], Any]]:
    """What the commands call, by the command."""

    def resume() -> None:
        run = create_or_continue(tiny(store, "rl.num_iterations=5"))
        Progress(run).iterations(count := Progress(run).num_committed("rl", 5))
        run.policy(count)
        lease.acquire(store, run.root).release()

    return {
        "verify a": lambda: audit.verify(open_existing(store, "a"))[1],
        "verify b": lambda: audit.verify(open_existing(store, "b"))[1],
        "runs": lambda: runs_report(store).lines(),
        "show b": lambda: iterations_report(open_existing(store, "b")).lines(),
        "show a --iteration 1": lambda: iteration_report(open_existing(store, "a"), 1, 9).lines(),
        "gc a": lambda: audit.unreferenced(open_existing(store, "a")),
        "files b": lambda: audit.files(open_existing(store, "b"), "policy"),
        "run a": resume,
    }


def contents(folder: Path) -> dict[str, str]:
    """The hash of each file below a folder: what was written shows."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
