"""What an RL iteration of the preset `tiny` costs: per stage, in none
(orchestration), and without Prefect.

    .venv/bin/python benchmarks/iteration.py [--pairs 8]

Iterations of one run are done alternately as flow runs, with all that a run shows of them, and by
the bare library, so both see the same machine and the same model. The time of one is that from the
commit of the one before to its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from flows.server import running_server, set_defaults

set_defaults()

from prefect import flow  # noqa: E402

from flows.rl_iteration import rl_iteration  # noqa: E402
from flows.session import prepare  # noqa: E402
from flows.sft import sft  # noqa: E402
from flows.ui import watch  # noqa: E402
from rlpipe.base.manifests import IterationRecord  # noqa: E402
from rlpipe.base.values import JsonDict  # noqa: E402
from rlpipe.config.pipeline import PipelineConfig  # noqa: E402
from rlpipe.config.source import read_config  # noqa: E402
from rlpipe.loop.session import Session, open_session  # noqa: E402
from rlpipe.stages.filtering import filter_groups  # noqa: E402
from rlpipe.stages.generation import generate, num_shards  # noqa: E402
from rlpipe.stages.iteration import commit_iteration, committed_before  # noqa: E402
from rlpipe.stages.policy import checkpoint, reload_engines, train  # noqa: E402
from rlpipe.stages.sampling import sample_prompts  # noqa: E402
from rlpipe.stages.scoring import score  # noqa: E402

PRESETS = Path(__file__).parent.parent / "flows" / "presets"
VERBS = ("sample_prompts", "generate", "score", "filter", "train", "checkpoint", "reload_engines")


async def bare_iteration(session: Session, iteration: int) -> IterationRecord:
    """The iteration of flows/rl_iteration.py by the stage functions alone."""
    session.clock.begin(iteration)
    policy, _ = session.run.policy(iteration)
    before, carried = committed_before(session, iteration)
    with session.clock.during("sample_prompts"):
        prompts = await sample_prompts(session, iteration=iteration, round_index=0, before=before, carried=carried)
    shards = range(num_shards(session, prompts.metrics["num_prompts"]))
    sampling = [
        generate(session, iteration=iteration, round_index=0, shard=shard, prompts=prompts.ref, policy=policy)
        for shard in shards
    ]
    with session.clock.during("generate"):
        rollouts = [shard.ref for shard in await asyncio.gather(*sampling)]
    with session.clock.during("score"):
        scores = await score(session, iteration=iteration, round_index=0, prompts=prompts.ref, rollouts=rollouts)
    with session.clock.during("filter"):
        filtered = await filter_groups(
            session, iteration=iteration, round_index=0, prompts=[prompts.ref], scores=[scores.ref]
        )
    batch = filtered.ref
    with session.clock.during("train"):
        trained = await train(session, iteration=iteration, batch=batch)
    with session.clock.during("checkpoint"):
        after = await checkpoint(session, iteration=iteration, batch=batch, previous=policy, metrics=trained.metrics)
    with session.clock.during("reload_engines"):
        await reload_engines(session, policy=after.ref, version=iteration + 1)
    artifacts = {"prompts": prompts.ref, "batch": batch, "policy": after.ref}
    return await commit_iteration(session, iteration, artifacts, {**scores.metrics, **trained.metrics})


@flow(name="rl", validate_parameters=False, persist_result=False)
async def measure(
    config: PipelineConfig, pairs: int
) -> tuple[list[tuple[float, JsonDict]], list[tuple[float, JsonDict]]]:
    """[(wall seconds, metrics)] of the iterations done as flow runs, and of those done bare."""
    flow_runs: list[tuple[float, JsonDict]] = []
    bare: list[tuple[float, JsonDict]] = []
    async with open_session(config) as session:
        await sft(config=config)
        await prepare(session)
        await reload_engines(session, policy=session.run.policy(0)[0], version=0)
        with watch(session, 0) as committed:
            started = time.monotonic()
            for iteration in range(2 * pairs + 2):
                done = flow_runs if iteration % 2 == 0 else bare
                record = await (
                    rl_iteration(config, iteration) if done is flow_runs else bare_iteration(session, iteration)
                )
                if done is flow_runs:
                    await committed(record)
                done.append((time.monotonic() - started, record.metrics))
                started = time.monotonic()
    return flow_runs[1:], bare[1:]  # the first of each warms up


def median(rows: list[tuple[float, JsonDict]], name: str) -> float:
    return statistics.median(metrics.get(name, 0.0) for _, metrics in rows)


def report(flow_runs: list[tuple[float, JsonDict]], bare: list[tuple[float, JsonDict]]) -> None:
    print(f"medians of {len(flow_runs)} iterations each, seconds      flow run      bare")
    for verb in VERBS:
        print(f"  {verb:40s} {median(flow_runs, f'time/{verb}_s'):12.3f} {median(bare, f'time/{verb}_s'):9.3f}")
    spent = [
        [wall - sum(metrics.get(f"time/{verb}_s", 0.0) for verb in VERBS) for wall, metrics in rows]
        for rows in (flow_runs, bare)
    ]
    walls = [statistics.median(wall for wall, _ in rows) for rows in (flow_runs, bare)]
    print(
        f"  {'in no stage (orchestration)':40s} {statistics.median(spent[0]):12.3f} {statistics.median(spent[1]):9.3f}"
    )
    print(f"  {'whole iteration':40s} {walls[0]:12.3f} {walls[1]:9.3f}   ratio {walls[0] / walls[1]:.2f}")
    for name in ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"):
        print(f"  {name:40s} {median(flow_runs, name):12.0f} {median(bare, name):9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        overrides = ["run=bench", f"store=file://{scratch}/store", "sft.num_steps=60",
                     "sft.decay_steps=60", "sft.segment_steps=60",
                     f"rl.num_iterations={2 * pairs + 2}", "evaluation.every=0", "tracking.uri="]  # fmt: skip
        config = read_config("tiny", overrides, PRESETS)
        os.environ.setdefault("PREFECT_HOME", f"{scratch}/prefect")
        with running_server(Path(scratch), None):
            flow_runs, bare = asyncio.run(measure(config, pairs))
    report(flow_runs, bare)


if __name__ == "__main__":
    main()
