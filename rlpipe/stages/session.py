"""What the stages of one process share: the run they hold, the pools, the scorers, and things loaded once.

Nothing in it is needed after a crash: all of it is rebuilt from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache, cached_property, partial
from pathlib import Path

from rlpipe.config import PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.prompt import Prompt
from rlpipe.data.sources import load_prompts
from rlpipe.engines.finder import HostFinder
from rlpipe.engines.pool import EnginePool
from rlpipe.environments.pool import EnvironmentPool
from rlpipe.report import fetch_points
from rlpipe.rewards.pool import RewardPool
from rlpipe.services import StartService, nobody_starts
from rlpipe.stages.rollout_source import RolloutSource, open_source
from rlpipe.stages.survivors import RoundKey, Survivors
from rlpipe.store import lease
from rlpipe.store.artifacts import materialise, read_manifest
from rlpipe.store.run import Run, create_or_continue
from rlpipe.tracking import Tracker
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.elsewhere import gang_place
from rlpipe.types import ArtifactRef, EngineError, sha256_of
from rlpipe.weights import Probe

log = logging.getLogger(__name__)
PromptSets = Callable[[str], list[list[Prompt]]]  # the prompt sets of a use


class Session:
    """One held run and its resident parts. Parts start when first asked for."""

    def __init__(self, run: Run, work_dir: Path, start_service: StartService = nobody_starts) -> None:
        self.run = run
        self.work_dir = work_dir
        engines = run.config.engines
        self._hosts = HostFinder(run, work_dir, start_service)
        self.pool = EnginePool(self._hosts.find, engines.in_flight_max, engines.request_timeout_s)
        self.trainer = TrainerClient(gang_place(run, work_dir, start_service), run.config.trainer.job_timeout_s)
        self.tracker = Tracker(run.config, run.store.url, partial(fetch_points, run))
        self.prompts: PromptSets = cache(partial(load_sets, run.config))
        self.began = time.monotonic()  # the current iteration
        self.seconds: dict[str, float] = defaultdict(float)  # per stage verb, of the current iteration
        self.survivors: dict[RoundKey, Survivors] = {}  # of the sampling round at work, when it is over-sampled
        self.unanswered: set[tuple[int, str]] = set()  # iteration and stage of shards that wait for others (faulted.py)
        self._active: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._closed = False
        self._closing = contextlib.AsyncExitStack()  # of the parts that have been started
        self._trainer_lock = asyncio.Lock()
        self._pool_lock = asyncio.Lock()

    @property
    def config(self) -> PipelineConfig:
        return self.run.config

    def begin_iteration(self) -> None:
        """From here on counts what an iteration takes."""
        self.began = time.monotonic()
        self.seconds.clear()

    @contextlib.contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        """Adds the seconds of the body to the verb's; of bodies that overlap (shards) the time that any of them ran."""
        self._active[verb] += 1
        if self._active[verb] == 1:
            self._since[verb] = time.monotonic()
        try:
            yield
        finally:
            self._active[verb] -= 1
            if self._active[verb] == 0:
                self.seconds[verb] += time.monotonic() - self._since[verb]

    async def gang(self) -> TrainerClient:
        """The trainer, started if need be."""
        async with self._trainer_lock:
            self.check_open()
            if not self.trainer.started:
                await self.trainer.start()
        return self.trainer

    async def serve(self, policy: ArtifactRef, version: int) -> bool:
        """Puts a committed policy on every engine, starting the pool if need be; False when it was served already."""
        async with self._pool_lock:
            self.check_open()
            if self.pool.version == version:
                return False
            await self.pool.serve(policy, version, await asyncio.to_thread(self._probe, policy))
            assert self.pool.version == version, "the pool serves another version than it was given"
            return True

    def _probe(self, policy: ArtifactRef) -> Probe:
        metrics = read_manifest(self.run.store, policy.folder, policy.sha256).metrics
        if "probe" not in metrics:  # a base model that was copied
            metrics = self.run.committed("base", 0, "probe")[1].metrics
        return Probe(**metrics["probe"])

    @cached_property
    def rewards(self) -> RewardPool:
        self.check_open()
        rl = self.config.rl
        pool = RewardPool(rl.rewards, rl.reward_args, workers=rl.reward_workers, timeout_s=rl.reward_timeout_s)
        self._closing.callback(pool.close)
        return pool

    @cached_property
    def environments(self) -> EnvironmentPool:
        self.check_open()
        rl = self.config.rl
        pool = EnvironmentPool(rl.environment, rl.environment_args, rl.reward_workers, rl.environment_timeout_s)
        self._closing.push_async_callback(pool.close)
        return pool

    @cached_property
    def data_sha256(self) -> str:
        """The hash of all prompts of use rl: a cursor's position means nothing in other data."""
        return sha256_of([[prompt.as_json() for prompt in rows] for rows in self.prompts("rl")])

    @cached_property
    def rollout_source(self) -> RolloutSource:
        """What `rl.rollouts_from` names, opened and checked."""
        return open_source(self.run, [prompt for rows in self.prompts("rl") for prompt in rows])

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the run, from its base artifact."""
        source, _ = self.run.committed("base", 0, "tokenizer")
        model = self.config.model
        folder = materialise(self.run.store, source, self.work_dir / "tokenizer")
        return ChatTokenizer.from_folder(folder, model.chat_template, model.chat_template_args)

    def check_open(self) -> None:
        """A shard may outlive another that failed, and the flow that failed with it: it starts nothing any more."""
        if self._closed:
            raise EngineError(f"run {self.run.name} was closed")

    async def close(self) -> None:
        self._closed = True
        await self._closing.aclose()  # first: a shard that outlived a failed one scores and steps no more
        await asyncio.gather(
            self.pool.close(), self._hosts.close(), self.trainer.close(), asyncio.to_thread(self.tracker.close)
        )


def data_seed(seed: int, name: str) -> int:
    """The seed of one data set. Generators use seed + index, so neighbouring seeds would share nearly all items."""
    return int(sha256_of([seed, name])[:7], 16)


def load_sets(config: PipelineConfig, use: str) -> list[list[Prompt]]:
    """The prompt sets of one use, each with its own seed."""
    return [load_prompts(data, data_seed(config.seed, data.name)) for data in config.sets(use)]


_open: dict[tuple[str, str], Session] = {}


def work_dir_of(config: PipelineConfig) -> Path:
    """Logs and local copies of a run on this machine: `.rlpipe/<run>-<store>` below the working directory."""
    digest = hashlib.sha256(config.store.encode()).hexdigest()[:8]
    return Path.cwd() / ".rlpipe" / f"{config.run}-{digest}"


@contextlib.asynccontextmanager
async def open_session(config: PipelineConfig, start_service: StartService = nobody_starts) -> AsyncIterator[Session]:
    """The session of a run: opened by the outermost flow, shared by the flows inside it. `start_service`: for what runs elsewhere.

    UserError when the run is held by another process, or was created with other settings.
    """
    key = (config.store, config.run)
    if key in _open:
        yield _open[key]
        return
    run = await asyncio.to_thread(create_or_continue, config)
    held = await asyncio.to_thread(lease.acquire, run.store, run.root)
    work_dir = work_dir_of(config)
    for scratch in ("weights", "trainer", "tokenizer"):  # never trusted after a crash
        await asyncio.to_thread(shutil.rmtree, work_dir / scratch, True)
    work_dir.mkdir(parents=True, exist_ok=True)
    session = _open[key] = Session(run, work_dir, start_service)
    try:
        yield session
    finally:
        del _open[key]
        try:
            await session.close()
        finally:
            await asyncio.to_thread(held.release)
