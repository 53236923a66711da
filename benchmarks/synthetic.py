"""A run of many rollouts, written with the store's own writers: what benchmarks/queries.py and
benchmarks/view.py read.

Iterations of rollouts in ten shards, their scores, the batch of the groups whose rewards differ.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.base.manifests import BestReward, IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict, Metrics
from rlpipe.config.source import read_config
from rlpipe.records.columns import schema_of, to_parquet
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import BATCH, ROLLOUTS, SCORES, Rollout
from rlpipe.store.artifacts import commit, write_bytes
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import sealed
from rlpipe.store.opening import create_or_continue
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run

ROOT = Path(__file__).parent.parent
SHARDS, GROUP_SIZE, TOKENS = 10, 8, (16, 129)  # tokens of a completion: from, to below
VOCABULARY = 50_000
TIME = "2026-11-24T12:00:00.000+00:00"


@dataclass(frozen=True)
class Sampled:
    """One iteration's rollouts with advantages, which of them are trained,
    and the groups that are dropped."""

    table: pa.Table
    trained: pa.Table
    dropped: dict[str, str]
    pass_rate: float


def lists(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def sampled(iteration: int, count: int, text: str) -> Sampled:
    draw = np.random.Generator(np.random.PCG64(iteration))
    lengths = draw.integers(*TOKENS, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total, groups = int(offsets[-1]), np.arange(count) // GROUP_SIZE
    prompts = draw.integers(0, 20_000, groups[-1] + 1)[groups]
    skill = draw.beta(1 + iteration / 100, 1, groups[-1] + 1)[groups]
    exact, form = draw.random(count) < skill, draw.random(count) < 0.9
    rewards = exact + 0.1 * form
    deviations = np.array([rewards[groups == group].std() for group in range(groups[-1] + 1)])
    kept = deviations[groups] > 0
    starts = draw.integers(0, len(text) - 5 * TOKENS[1], count)
    spans = pa.StructArray.from_arrays(
        [pa.array(np.full(count, iteration, np.int32)), pa.array(lengths.astype(np.int32))],
        names=["version", "num_tokens"],
    )
    columns = {
        "prompt_id": pa.array([f"p/{number}" for number in prompts]),
        "group_index": pa.array(groups.astype(np.int32)),
        "rollout_index": pa.array((np.arange(count) % GROUP_SIZE).astype(np.int32)),
        "prompt": pa.array([text[number * 20 : number * 20 + 120] for number in prompts]),
        "prompt_tokens": lists(np.arange(count + 1) * 24, np.repeat(prompts.astype(np.int32), 24)),
        "completion": pa.array(
            [text[start : start + 5 * length] for start, length in zip(starts, lengths, strict=True)]
        ),
        "completion_tokens": lists(offsets, draw.integers(0, VOCABULARY, total, dtype=np.int32)),
        "loss_mask": lists(offsets, np.ones(total, np.int8)),
        "rollout_logprobs": lists(offsets, -draw.exponential(0.5, total).astype(np.float32)),
        "weight_version": pa.array(np.full(count, iteration, np.int32)),
        "weight_versions": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), spans),
        "finish_reason": pa.array(np.where(lengths == TOKENS[1] - 1, "length", "stop")),
        "seed": pa.array(draw.integers(0, 2**31, count)),
        "engine": pa.array([f"engine-{number % 4}" for number in groups]),
        "environment": pa.array([""] * count),
        "reward": pa.array(rewards),
        "reward_parts": pa.array(
            [f'{{"exact": {a:.1f}, "format": {b:.1f}}}' for a, b in zip(exact, form, strict=True)]
        ),
        "reward_fault": pa.array([""] * count),
        "advantage": pa.array(rewards - rewards.mean()),
    }
    table = pa.Table.from_arrays([columns[name] for name in BATCH], schema=schema_of(Rollout))
    dropped = {str(group): "zero_std" for group in np.flatnonzero(deviations == 0)}
    return Sampled(table, table.filter(pa.array(kept)), dropped, float(exact.mean()))


def artifact(
    run: Run,
    iteration: int,
    stage: str,
    files: dict[str, bytes],
    metrics: JsonDict,
    phase: str = "rl",
    version: int | None = None,
) -> ArtifactRef:
    folder = run.folder(phase, iteration, stage)
    records = [write_bytes(run.store, folder, f"a{iteration:011d}", name, data) for name, data in files.items()]
    return commit(
        run.store,
        folder,
        Manifest(run.name, phase, iteration, stage, {}, "0", {}, records, metrics, version, "x", TIME, TIME),
    )[0]


def prompts_of(table: pa.Table) -> pa.Table:
    first = table.filter(pa.array(table["rollout_index"].to_numpy() == 0))
    texts = [f'[{{"role": "user", "content": "{text}"}}]' for text in first["prompt"].to_pylist()]
    names = {"source": ["p"] * len(texts), "messages": texts, "answer": texts, "metadata": ["{}"] * len(texts)}
    columns = {name: pa.array(values) for name, values in names.items()} | {
        name: first[name] for name in ("prompt_id", "prompt_tokens")
    }
    schema = schema_of(Prompt)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def commit_iteration(run: Run, iteration: int, rows: Sampled, more: Metrics, curve: list[list[float]]) -> None:
    """Commits it, and adds its mean reward to the curve."""
    prompts = artifact(run, iteration, "prompts/round-0", {"prompts.parquet": to_parquet(prompts_of(rows.table))}, {})
    each = -(-rows.table.num_rows // SHARDS)
    for shard in range(SHARDS):
        data = to_parquet(rows.table.select(ROLLOUTS).slice(shard * each, each))
        artifact(run, iteration, f"rollouts/round-0/shard-{shard:03d}", {"rollouts.parquet": data}, {})
    artifact(run, iteration, "scores/round-0", {"scores.parquet": to_parquet(rows.table.select(SCORES))}, {})
    batch = artifact(
        run,
        iteration,
        "batch/round-0",
        {"batch.parquet": to_parquet(rows.trained)},
        {"dropped": rows.dropped, "needs_more": False},
    )
    policy = artifact(run, iteration, "policy", {"config.json": b"{}"}, {})
    reward = float(np.mean(rows.table["reward"].to_numpy()))
    metrics = {"rollout/reward_mean": reward, "rollout/pass_rate": rows.pass_rate, **more}
    curve.append([iteration, reward])
    refs = {"prompts": prompts, "batch": batch, "policy": policy}
    best = BestReward(iteration, reward)
    record = IterationRecord(run.name, iteration, iteration + 1, refs, -1, metrics, list(curve), best, TIME)
    assert run.store.create(run.iteration_key(iteration), sealed(record))


def written(folder: Path, iterations: int, count: int, more: Metrics | None = None) -> Store:
    """A store with the run `big`; one that is there already is completed.

    `more`: metrics of each iteration beside the reward.
    """
    store = open_store(f"file://{folder}/store-{iterations}-{count}")
    config = read_config("tiny", ["run=big", f"store={store.url}", "sft.num_steps=0"], ROOT / "flows" / "presets")
    run, draw = create_or_continue(config), np.random.Generator(np.random.PCG64(0))
    words = np.array(
        ["".join(chr(97 + letter) for letter in draw.integers(0, 26, draw.integers(2, 8))) for _ in range(3000)]
    )
    text = " ".join(words[draw.integers(0, len(words), 120_000)])
    first = Progress(run).num_iterations
    curve: list[list[float]] = (
        [[float(value) for value in point] for point in run.record(first - 1).curve] if first else []
    )
    for iteration in range(first, iterations):
        commit_iteration(run, iteration, sampled(iteration, count, text), more or {}, curve)
    return store


def copied(source: Store, url: str) -> Store:
    """The same store on S3."""
    target = open_store(url)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: target.put(key, source.read(key)), source.list("runs")))
    return target
