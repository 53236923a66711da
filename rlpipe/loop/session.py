"""The session of a process: the run that it holds, the pools, the scorers, and data loaded once.

All stages of the process share it. Nothing in it is needed after a crash: all of it is rebuilt from
the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from rlpipe.base.errors import EngineError, StoreError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.finding import HostFinder
from rlpipe.engines.pool import EnginePool
from rlpipe.engines.weights import Probe
from rlpipe.loop.clock import Clock
from rlpipe.loop.colocation import MemoryTurns, TrainerSeat
from rlpipe.loop.holding import cancelled_when_taken_over, told
from rlpipe.loop.player import Player, PlayerParts, player_of
from rlpipe.loop.run_data import RunData
from rlpipe.loop.sampling_round import SamplingRound
from rlpipe.loop.scratch import remove_copies, work_dir_of
from rlpipe.processes.launch import raise_file_limit
from rlpipe.report.curves import fetch_points
from rlpipe.report.tracking import Tracker, status_of
from rlpipe.rewards.pool import RewardPool
from rlpipe.services.finder import StartService, nobody_starts
from rlpipe.store import cache, lease
from rlpipe.store.commits import Commits, load_published
from rlpipe.store.nearby import Nearby
from rlpipe.store.opening import create_or_continue
from rlpipe.store.patience import working
from rlpipe.store.progress import Progress
from rlpipe.store.retention import Retention
from rlpipe.store.run import Run
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.process import trainer_place

log = logging.getLogger(__name__)


def probe_of(run: Run, policy: ArtifactRef) -> Probe:
    """The probe that is stored with a policy of a run."""
    metrics = run.manifest(policy).metrics
    if "probe" not in metrics:  # a base model that was copied
        metrics = run.committed("base", 0, "probe")[1].metrics
    return Probe(**metrics["probe"])


class Session:
    """A held run and its resident parts. Each part starts when it is first used."""

    def __init__(self, run: Run, work_dir: Path, start_service: StartService = nobody_starts) -> None:
        self.run = run
        engines = run.config.engines
        self._hosts = HostFinder(run, work_dir, start_service)
        self.pool = EnginePool(self._hosts.find, engines.in_flight_max, engines.progress_timeout_s)
        client = TrainerClient(trainer_place(run, work_dir, start_service))
        memory = MemoryTurns(self.pool, self._hosts.joined, client) if engines.colocate else None
        self.trainer = TrainerSeat(client, memory, self._may_steer)
        self.tracker = Tracker(run, partial(fetch_points, run))
        self.commits = Commits(run.store, run.uncommitted, run.lease)
        self.retention = Retention(run)  # prunes what the run does not keep, after commits
        self.progress = Progress(run)
        # SFT segments and RL iterations
        self.at_start = {phase: self.progress.num_done(phase) for phase in ("sft", "rl")}
        self.data = RunData(run, work_dir)
        self.clock = Clock()
        self.sampling_round: SamplingRound | None = None  # the one in progress
        self._rewards: dict[str, RewardPool] = {}
        self._rewards_lock = threading.Lock()  # shards are scored while others are sampled
        self._closed = False
        self._closing = contextlib.AsyncExitStack()  # of the parts that have been started
        self._pool_lock = asyncio.Lock()

    @property
    def config(self) -> PipelineConfig:
        return self.run.config

    async def _may_steer(self) -> None:
        """Raises TakenOver or EngineError when engines and trainer are no longer this session's to
        use.
        """
        self.check_open()
        if self.run.lease is not None:
            # a store that does not answer is no reason to stop using the engines
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.run.lease.check_unless_fresh)

    async def serve(self, policy: ArtifactRef, version: int) -> bool:
        """Puts a policy on every engine, starting the pool if need be; False when it is served
        already.
        """
        async with self._pool_lock:
            await self._may_steer()
            if self.pool.version == version:
                return False
            if self.trainer.memory:
                async with self.trainer.turn:
                    await self.trainer.memory.to_engines()
            nearby = self.commits.nearby(policy)
            if nearby and not nearby.servers and not self.config.engines_here:  # no host could fetch it there
                await self.commits.committed([policy.sha256])
            probe = await asyncio.to_thread(probe_of, self.run, policy)

            async def load(near: Nearby | None) -> None:
                async with self.trainer.turn if near and near.sender else contextlib.nullcontext():
                    await self.pool.serve(policy, version, probe, near)

            await load_published(load, nearby, partial(self._until_committed, policy, version))
            assert self.pool.version == version, "the pool serves another version than it was given"
            return True

    async def _until_committed(self, policy: ArtifactRef, version: int, fault: StoreError) -> bool:
        """Waits until the store has a policy whose files were lost with the trainer; raises the
        fault if the store had it already.
        """
        if not self.commits.is_uncommitted(policy):
            raise fault
        log.warning(
            "no engine got weight version %d from the trainer's disk (%s): waiting for the store", version, fault
        )
        await self.commits.committed([policy.sha256])
        return True

    def rewards(self, use: str = "rl") -> RewardPool:
        """The rewards that score rollouts; for the use "evaluation" those of evaluations, where the
        config gives them some of their own.
        """
        self.check_open()
        own = use if use == "evaluation" and self.config.evaluation.rewards else "rl"
        with self._rewards_lock:
            if own not in self._rewards:
                self._rewards[own] = self._reward_pool(own)
            return self._rewards[own]

    def _reward_pool(self, use: str) -> RewardPool:
        pool = RewardPool.of(self.config.rl, self.config.rewards(use), self.config.reward_args(use))
        self._closing.callback(pool.close)
        return pool

    @cached_property
    def player(self) -> Player:
        """The player of this run's rollouts."""
        self.check_open()
        player = player_of(PlayerParts(self.config, self.pool, self.data.tokenizer, self.run.store))
        self._closing.push_async_callback(player.close)
        return player

    def check_open(self) -> None:
        """EngineError once the session is closed.

        A shard may outlive another shard that failed, and the flow that failed with it; this keeps
        it from starting anything.
        """
        if self._closed:
            raise EngineError(f"run {self.run.name} was closed")

    async def close(self, failed: bool = False) -> None:
        """Waits for the commits in progress, then ends all parts.

        `failed`: True when an error has ended the session; then commits get CLOSE_S.
        """
        try:
            if not failed:
                await self.commits.all_committed()
        finally:
            self._closed = True
            # first: a shard that outlived a failed one must not score or step any more
            await self._closing.aclose()
            await self.commits.close()
            await asyncio.gather(
                self.pool.close(),
                self._hosts.close(),
                self.trainer.client.close(),
                asyncio.to_thread(self.tracker.close),
                asyncio.to_thread(self.retention.close),
            )
            if self.run.lease is None or not self.run.lease.is_over:  # else they may be those of the new holder
                await asyncio.to_thread(remove_copies, self.data.folder)


_open: dict[tuple[str, str], Session] = {}


def is_open(config: PipelineConfig) -> bool:
    """True when this process has the run's session open."""
    return (config.store, config.run) in _open


@contextlib.asynccontextmanager
async def open_session(
    config: PipelineConfig, start_service: StartService = nobody_starts, flow_run: str = ""
) -> AsyncIterator[Session]:
    """Yields the session of a run: opened by the outermost flow (`flow_run`), shared by those
    inside it.

    `start_service` starts what runs elsewhere. UserError when the run is held by another process,
    or was created with other settings. TakenOver, whatever the body does, soon after another
    process has taken the run over.
    """
    if (key := (config.store, config.run)) in _open:
        yield _open[key]
        return
    async with contextlib.AsyncExitStack() as stack:
        work = stack.enter_context(working())
        with contextlib.ExitStack() as hurried:
            # first: calls that wait for the store, or begin then, must not delay the end
            hurried.callback(work.end)
            run = await asyncio.to_thread(create_or_continue, config, work_dir_of(config) / cache.FOLDER)
            held = await asyncio.to_thread(lease.acquire, run.store, run.root, flow_run)
            stack.push_async_exit(partial(_give_back, held))
            await stack.enter_async_context(told(held))  # for errors while the session ends
            session = _open[key] = await asyncio.to_thread(_begin, replace(run, lease=held), start_service)
            stack.push_async_exit(partial(_end, session))
            stack.callback(_open.pop, key)
            await stack.enter_async_context(cancelled_when_taken_over(held))
            yield session
            hurried.pop_all()


async def _end(session: Session, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
    """Closes the session at the end of its `with`; the tracker gets the status of `error`."""
    if error is not None:
        session.tracker.status = status_of(error)
    await session.close(failed=error is not None)


async def _give_back(held: lease.Lease, kind: type[BaseException] | None, *_: object) -> None:
    # the error that ended the session is raised, not that of a store that does not answer
    with contextlib.suppress(*([OSError] if kind else [])):
        await asyncio.to_thread(held.release)


def _begin(run: Run, start_service: StartService) -> Session:
    raise_file_limit()
    work_dir = work_dir_of(run.config)
    remove_copies(work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    session = Session(run, work_dir, start_service)
    session.retention.begin()
    return session
