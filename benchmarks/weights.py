"""The way of weights from the trainer to all engines, beside a raw copy of the same bytes, with the
store on an S3 of 20 MB/s and on a fast one.

    .venv/bin/python benchmarks/weights.py FOLDER [--reloads 4] [--mb-per-s 20]
        [--gbit-per-s 0 1 10]

As root: network namespaces are the nodes, and a host does not see the trainer's disk. Runs
iterations of a new model of 205 MB by the bare library, with two engines on the trainer's node, and
with two hosts of one engine each on nodes of their own, whose cable to the trainer carries what
`--gbit-per-s` says (0: what the machine can). From one iteration to the next the S3 is throttled,
and is not. Printed are seconds from the end of the save until all hosts have the files, verified,
and until all engines are proved; what of it was what; the raw copy; and when the next iteration
sampled and the policy was committed. And the final sha256 of each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.weights_world import TIMES, Span, copier, copy_here, enter, services, time_hosts
from rlpipe.base.manifests import moment_of
from rlpipe.base.references import ArtifactRef
from rlpipe.config.source import read_config
from rlpipe.loop.session import Session, open_session
from rlpipe.services.registration import KEY_VARIABLE
from rlpipe.stages.base import base_policy, base_tokenizer
from rlpipe.stages.filtering import filter_groups
from rlpipe.stages.generation import generate
from rlpipe.stages.iteration import commit_iteration
from rlpipe.stages.policy import checkpoint, reload_engines, train
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.scoring import score
from rlpipe.store.policy_files import stored_policy
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.jobs import JobAnswer
from tests.network_world import Node, network, unavailable
from tests.s3_world import serving

PRESETS = Path(__file__).parent.parent / "flows/presets"
MODEL = [
    "model.hidden_size=1024", "model.intermediate_size=2816", "model.num_layers=4", "model.num_heads=8",
    "model.num_kv_heads=8", "model.init_std=0.02",
]  # fmt: skip
SETTINGS = [
    *MODEL, "run=a", "tracking.uri=", "sft.num_steps=0", "rl.num_prompts=2", "rl.group_size=4", "rl.shard_prompts=2",
    "rl.num_steps=1",
    "rl.completion_tokens_max=8", "rl.filters={}", "rl.learning_rate=1e-5", "evaluation.every=0",
    "checkpoint.state_every=1000", "trainer.threads=1",
    "engines.threads=1",
]  # fmt: skip
HERE = ["engines.count=2"]
HOSTS = ["engines.count=1", "engines.place=elsewhere", "trainer.place=elsewhere"]
WEIGHTS = "model.safetensors"
SERVE_DEADLINE_S = 180.0


@dataclass
class Reload:
    """One weight version on its way.

    Moments are in seconds of the clock; `raw_s`: of the plain copy.
    """

    mb_per_s: float
    spans: list[Span] = field(default_factory=list)
    written: float = 0.0
    hashed: float = 0.0
    committed: float = 0.0
    sampled: float = 0.0
    raw_s: float = 0.0

    def span(self, part: str) -> Span:
        """From the first to the last of a part, of all hosts or engines."""
        spans = [span for span in self.spans if span.part == part]
        return Span(part, min(span.start for span in spans), max(span.end for span in spans))

    def longest(self, part: str) -> float:
        return max(span.end - span.start for span in self.spans if span.part == part)

    def figures(self) -> dict[str, float]:
        """Seconds: of the save's parts, from its end to the end of each part that follows, and how
        that compares with the raw copy."""
        save, fetched, proved = self.span("save"), self.span("fetch").end, self.span("prove").end
        return {
            "save": save.end - save.start,
            "of it written": self.written - save.start,
            "of it hashed": self.hashed - self.written,
            "of it probed": save.end - self.hashed,
            "asked": self.span("fetch").start - save.end,
            "files there": fetched - save.end,
            "loaded": self.span("load").end - save.end,
            "of it one load": self.longest("load"),
            "proved": proved - save.end,
            "of it one proof": self.longest("prove"),
            "since the save began": proved - save.start,
            "raw copy": self.raw_s,
            "files there / raw": (fetched - save.end) / self.raw_s,
            "proved / raw": (proved - save.end) / self.raw_s,
            "sampled": self.sampled - save.end,
            "committed": self.committed - save.end,
        }


def timed_saves(trainer: TrainerClient) -> list[Span]:
    """The saves that this trainer does from here on."""
    saves, run_job = list[Span](), trainer.run

    async def run(
        job: str, body: Mapping[str, object], on_progress: Callable[[dict[str, int]], None] | None = None
    ) -> JobAnswer:
        start = time.time()
        answer = await run_job(job, body, on_progress)
        if job == "save":
            saves.append(Span("save", start, time.time()))
        return answer

    trainer.run = run
    return saves


@dataclass
class World:
    """A run on its nodes. `copy`: seconds of a plain copy of a file to where the engines are."""

    folder: Path
    nodes: dict[str, Node]
    copy: Callable[[Path], float]

    def spans(self) -> list[Span]:
        lines = self.folder.joinpath("times").read_text().splitlines()
        return [Span(*json.loads(line)) for line in lines]

    async def run(self, sets: list[str], speeds: list[float]) -> tuple[list[Reload], str]:
        """An iteration for each speed of the S3 in MB/s, and one more that samples with the last
        policy; what was seen, and the sha256 of that."""
        store = f"s3://rlpipe/{self.folder.name}"
        config = read_config(
            "tiny", [*SETTINGS, *sets, f"store={store}", f"rl.num_iterations={len(speeds) + 1}"], PRESETS
        )
        reloads = list[Reload]()
        try:
            async with open_session(config) as session:
                saves = timed_saves(session.trainer.client)
                tokenizer = await base_tokenizer(session)
                policy = (await base_policy(session, tokenizer=tokenizer.ref)).ref
                await reload_engines(session, policy=policy, version=0)
                await self._until_serving(session, 2)
                saves.clear()
                for iteration, mb_per_s in enumerate(speeds):
                    reload = Reload(mb_per_s)
                    policy = await self._iteration(session, iteration, policy, reload)
                    reload.spans = [saves[-1], *(span for span in self.spans() if span.start >= saves[-1].end)]
                    began = await self._sample(session, iteration + 1, policy)
                    await session.commits.all_committed()
                    reload.sampled = began
                    reload.raw_s = statistics.median(self.copy(_published(session)) for _ in range(3))
                    reloads.append(reload)
                sha256 = stored_policy(session.run.store, policy).files[WEIGHTS].sha256
        finally:
            self.nodes["store"].throttle(0)
        return reloads, sha256

    async def _until_serving(self, session: Session, engines: int) -> None:
        """A host that takes long, or has only just joined, is not waited for by the pool."""
        fleet, deadline = session.pool.fleet, time.monotonic() + SERVE_DEADLINE_S
        await fleet.look_up()
        while len(fleet.clients) < engines:
            assert time.monotonic() < deadline, (
                f"{len(fleet.clients)} of {engines} engines serve version {fleet.version}"
            )
            await asyncio.sleep(0.1)
            if len(fleet.hosts) < engines:
                await fleet._take_in()
            await fleet.look_up()

    async def _sample(self, session: Session, iteration: int, policy: ArtifactRef) -> float:
        """The rollouts of an iteration; when its sampling began."""
        before = await self._prompts(session, iteration)
        rollouts = await generate(session, iteration=iteration, round_index=0, shard=0, prompts=before, policy=policy)
        _, manifest = session.run.committed("rl", iteration, "rollouts/round-0/shard-000")
        assert rollouts.ref
        return moment_of(manifest.started_at, "rollouts").timestamp()

    async def _prompts(self, session: Session, iteration: int) -> ArtifactRef:
        before = session.run.committed("rl", iteration - 1, "prompts/round-0")[0] if iteration else None
        return (await sample_prompts(session, iteration=iteration, round_index=0, before=before)).ref

    async def _iteration(self, session: Session, iteration: int, previous: ArtifactRef, reload: Reload) -> ArtifactRef:
        """Samples, trains, saves and serves; the policy."""
        prompts = await self._prompts(session, iteration)
        rollouts = await generate(
            session, iteration=iteration, round_index=0, shard=0, prompts=prompts, policy=previous
        )
        scores = await score(session, iteration=iteration, round_index=0, prompts=prompts, rollouts=[rollouts.ref])
        batch = await filter_groups(session, iteration=iteration, round_index=0, prompts=[prompts], scores=[scores.ref])
        trained = await train(session, iteration=iteration, batch=batch.ref)
        self.nodes["store"].throttle(1e6 * reload.mb_per_s)
        policy = await checkpoint(
            session, iteration=iteration, batch=batch.ref, previous=previous, metrics=trained.metrics
        )

        async def committed() -> None:
            await session.commits.committed([policy.ref.sha256])
            reload.committed = time.time()

        waiting = asyncio.create_task(committed())
        await reload_engines(session, policy=policy.ref, version=iteration + 1)
        await self._until_serving(session, 2)
        path = _published(session)
        reload.written, reload.hashed = (file.stat().st_mtime for file in (path, path.parent / "config.json"))
        artifacts = {"prompts": prompts, "batch": batch.ref, "policy": policy.ref}
        await commit_iteration(session, iteration, artifacts, {**scores.metrics, **batch.metrics, **trained.metrics})
        session.commits.then(lambda: waiting)
        return policy.ref


def _published(session: Session) -> Path:
    """The newest file of weights on the trainer's disk."""
    nearby = next(iter(session.commits._nearby.values()))
    return next(Path(nearby.places[0].disk).rglob(WEIGHTS))


def show(title: str, reloads: list[Reload]) -> None:
    """Medians of the reloads by the speed of the S3, least and most in brackets."""
    print(f"\n{title}: seconds, medians of {len(reloads) // 2} reloads (least to most)", flush=True)
    for mb_per_s in sorted({reload.mb_per_s for reload in reloads}):
        figures = [reload.figures() for reload in reloads if reload.mb_per_s == mb_per_s]
        print(f"  S3 of {mb_per_s:g} MB/s" if mb_per_s else "  S3 that is not throttled")
        for name in figures[0]:
            values = sorted(figure[name] for figure in figures)
            print(f"    {name:22s} {statistics.median(values):7.2f} ({values[0]:.2f} to {values[-1]:.2f})", flush=True)


def measure(title: str, folder: Path, nodes: dict[str, Node], sets: list[str], speeds: list[float]) -> str:
    """Runs one world in a folder of its own, and shows it; the sha256 of its last policy."""
    folder.mkdir()
    (folder / "times").touch()
    os.environ[TIMES] = str(folder / "times")
    (folder / "flow").mkdir()
    os.chdir(folder / "flow")
    with contextlib.ExitStack() as stack:
        copy = copy_here(folder)
        if sets is HOSTS:
            copy = stack.enter_context(copier(folder, nodes))
            stack.enter_context(services(folder, nodes, f"s3://rlpipe/{folder.name}"))
        reloads, sha256 = asyncio.run(World(folder, nodes, copy).run(sets, speeds))
    show(title, reloads)
    return sha256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reloads", type=int, default=4, help="at each speed of the S3")
    parser.add_argument("--mb-per-s", type=float, default=20.0)
    parser.add_argument("--gbit-per-s", type=float, nargs="*", default=[0.0, 10.0, 1.0])
    options = parser.parse_args()
    if reason := unavailable():
        parser.error(reason)
    logging.basicConfig(level=logging.WARNING)
    folder = options.folder.resolve()
    (folder / "weed").mkdir(parents=True)
    speeds = [options.mb_per_s, 0.0] * options.reloads
    os.environ[KEY_VARIABLE] = "the key of the nodes"
    time_hosts()
    with network("store", "flow", "trainer", "host-a", "host-b") as nodes:
        enter(nodes["flow"])
        with serving(folder / "weed", nodes["store"]):
            hashes = {
                "two engines on the trainer's node": measure(
                    "Two engines on the trainer's node", folder / "here", nodes, HERE, speeds
                )
            }
            for gbit_per_s in options.gbit_per_s:
                nodes["trainer"].throttle(gbit_per_s * 1e9 / 8)
                cable = f"{gbit_per_s:g} Gbit/s" if gbit_per_s else "no limit"
                title = f"Two hosts, the trainer's cable has {cable}"
                hashes[title] = measure(title, folder / f"hosts-{gbit_per_s:g}", nodes, HOSTS, speeds)
                nodes["trainer"].throttle(0)
    print("\nsha256 of the last policy", *(f"  {sha256[:16]} {title}" for title, sha256 in hashes.items()), sep="\n")


if __name__ == "__main__":
    main()
