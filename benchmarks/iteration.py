"""What an RL iteration of the preset `tiny` costs: per stage, in none
(orchestration), and without Prefect.

    .venv/bin/python benchmarks/iteration.py [--pairs 8] [--latency-ms 20]

Iterations of one run are done in turns, some as flow runs, with all that a run shows of them, then
as many by the bare library, so both see the same machine and the same model. The time of one is
that from the commit of the one before to its own; the first of each turn is left out. With
`--latency-ms` Prefect's server answers so much later, as from another place. The CPU seconds are
those of the flow's process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from distant import distant

from flows.server import running_server, set_defaults

set_defaults()

from prefect import flow  # noqa: E402
from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: E402

from flows.iteration_runs import iteration_runs  # noqa: E402
from flows.rl_iteration import rl_iteration  # noqa: E402
from flows.session import open_session, prepare, reason_to_end  # noqa: E402
from flows.sft import sft  # noqa: E402
from flows.ui import watch  # noqa: E402
from rlpipe.base.manifests import IterationRecord  # noqa: E402
from rlpipe.base.values import JsonDict  # noqa: E402
from rlpipe.config.pipeline import PipelineConfig  # noqa: E402
from rlpipe.config.source import read_config  # noqa: E402
from rlpipe.loop.session import Session  # noqa: E402
from rlpipe.stages.filtering import filter_groups  # noqa: E402
from rlpipe.stages.generation import generate, num_shards  # noqa: E402
from rlpipe.stages.iteration import commit_iteration, committed_before  # noqa: E402
from rlpipe.stages.policy import checkpoint, reload_engines, train  # noqa: E402
from rlpipe.stages.sampling import sample_prompts  # noqa: E402
from rlpipe.stages.scoring import score  # noqa: E402

PRESETS = Path(__file__).parent.parent / "flows" / "presets"
VERBS = ("sample_prompts", "generate", "score", "filter", "train", "checkpoint", "reload_engines")
TURN = 4  # iterations, of which the first warms up


class Done(NamedTuple):
    """An iteration: from the commit before it to its own, and its metrics."""

    wall_s: float
    cpu_s: float
    metrics: JsonDict

    @property
    def orchestration_s(self) -> float:
        return self.wall_s - sum(self.metrics.get(f"time/{verb}_s", 0.0) for verb in VERBS)


class Timed:
    """Iterations of one kind, timed from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.begin()

    def begin(self) -> None:
        """The time of the next iteration begins now."""
        self._began = time.monotonic(), time.process_time()

    def ended(self, record: IterationRecord) -> None:
        began_at, cpu_s = self._began
        self.done.append(Done(time.monotonic() - began_at, time.process_time() - cpu_s, record.metrics))
        self.begin()

    @property
    def warm(self) -> list[Done]:
        return [each for number, each in enumerate(self.done) if number % TURN]


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
async def measure(config: PipelineConfig, turns: int) -> tuple[list[Done], list[Done]]:
    """The iterations done as flow runs, and those done bare."""
    flow_runs, bare = Timed(), Timed()
    async with open_session(config) as session:
        await sft(config=config)
        await prepare(session)
        await reload_engines(session, policy=session.run.policy(0)[0], version=0)
        with watch(session, 0) as committed:
            for turn in range(turns):
                first = 2 * turn * TURN
                async with iteration_runs(rl_iteration, config) as runs:
                    flow_runs.begin()
                    for iteration in range(first, first + TURN):  # as in flows/rl.py
                        record = await runs.run(iteration)
                        session.commits.then(partial(committed, record))
                        await reason_to_end(session, "rl", iteration + 1)
                        flow_runs.ended(record)
                    await session.commits.all_committed()
                bare.begin()
                for iteration in range(first + TURN, first + 2 * TURN):
                    bare.ended(await bare_iteration(session, iteration))
                await session.commits.all_committed()
    return flow_runs.warm, bare.warm


def median(rows: list[Done], name: str) -> float:
    return statistics.median(row.metrics.get(name, 0.0) for row in rows)


def report(flow_runs: list[Done], bare: list[Done]) -> None:
    print(f"medians of {len(flow_runs)} iterations each, seconds      flow run      bare")
    for verb in VERBS:
        print(f"  {verb:40s} {median(flow_runs, f'time/{verb}_s'):12.3f} {median(bare, f'time/{verb}_s'):9.3f}")

    def row(name: str, field: str) -> float:
        first, second = (statistics.median(getattr(each, field) for each in rows) for rows in (flow_runs, bare))
        print(f"  {name:40s} {first:12.3f} {second:9.3f}")
        return first / second

    row("in no stage (orchestration)", "orchestration_s")
    row("CPU", "cpu_s")
    print(f"  ratio {row('whole iteration', 'wall_s'):.2f}")
    for name in ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"):
        print(f"  {name:40s} {median(flow_runs, name):12.0f} {median(bare, name):9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    turns = math.ceil(arguments.pairs / (TURN - 1))
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        overrides = ["run=bench", f"store=file://{scratch}/store", "sft.num_steps=60",
                     "sft.decay_steps=60", "sft.segment_steps=60",
                     f"rl.num_iterations={2 * turns * TURN}", "evaluation.every=0", "tracking.uri="]  # fmt: skip
        config = read_config("tiny", overrides, PRESETS)
        os.environ.setdefault("PREFECT_HOME", f"{scratch}/prefect")
        with contextlib.ExitStack() as stack:
            url = stack.enter_context(running_server(Path(scratch), None))
            if arguments.latency_ms:
                far = stack.enter_context(distant(url, arguments.latency_ms))
                stack.enter_context(temporary_settings({PREFECT_API_URL: far}))
            flow_runs, bare = asyncio.run(measure(config, turns))
    report(flow_runs, bare)


if __name__ == "__main__":
    main()
