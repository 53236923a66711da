"""The session of a process: the run that it holds, the pools, the scorers, and data loaded once.

All stages of the process share it. Nothing in it is needed after a crash: all of it is rebuilt from
the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType

from rlpipe.agents.pool import Agents
from rlpipe.base.errors import EngineError, StoreError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.conversations import prompt_lengths
from rlpipe.data.cursor import PromptCursor
from rlpipe.data.sources import PromptSets, fitting, load_sets, once, room_for
from rlpipe.engines.finding import HostFinder
from rlpipe.engines.pool import EnginePool
from rlpipe.engines.weights import Probe
from rlpipe.environments.pool import EnvironmentPool
from rlpipe.loop.behind import Behind
from rlpipe.loop.clock import Clock
from rlpipe.loop.colocation import MemoryTurns
from rlpipe.loop.holding import cancelled_when_taken_over, told
from rlpipe.loop.sampling_round import SamplingRound
from rlpipe.loop.scratch import remove_copies, work_dir_of
from rlpipe.processes.launch import raise_file_limit
from rlpipe.processes.pool import code_environment
from rlpipe.records.prompt import Prompt
from rlpipe.report.curves import DataSet, fetch_points
from rlpipe.report.tracking import Tracker, status_of
from rlpipe.rewards.pool import RewardPool
from rlpipe.services.finder import StartService, nobody_starts
from rlpipe.store import lease
from rlpipe.store.local_copy import materialise
from rlpipe.store.patience import working
from rlpipe.store.retention import Retention
from rlpipe.store.run import Run, create_or_continue
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.process import gang_place

log = logging.getLogger(__name__)


class Session:
    """A held run and its resident parts. Each part starts when it is first used."""

    def __init__(self, run: Run, work_dir: Path, start_service: StartService = nobody_starts) -> None:
        self.run = run
        self.work_dir = work_dir
        engines = run.config.engines
        self._hosts = HostFinder(run, work_dir, start_service)
        self.pool = EnginePool(self._hosts.find, engines.in_flight_max, engines.progress_timeout_s)
        self.trainer = TrainerClient(gang_place(run, work_dir, start_service))
        self.memory = MemoryTurns(self.pool, self._hosts.joined, self.trainer) if engines.colocate else None
        self.tracker = Tracker(run, partial(fetch_points, run))
        self.retention = Retention(run)
        self.behind = Behind(run)
        self.prompts: PromptSets = once(partial(load_sets, run.config))
        self.fitting: PromptSets = once(self._fitting)
        self.committed_before = {phase: self.num_committed(phase) for phase in ("sft", "rl")}
        self.clock = Clock()
        self.sampling_round: SamplingRound | None = None  # the one in progress
        self._closed = False
        self._closing = contextlib.AsyncExitStack()  # of the parts that have been started
        # held while a position is restored in the trainer, and for the job that starts from it
        self.trainer_turn = asyncio.Lock()
        self._trainer_lock, self._pool_lock = asyncio.Lock(), asyncio.Lock()

    def _fitting(self, use: str) -> list[list[Prompt]]:
        """Returns the prompt sets of a use without the rows that `on_too_long` drops: prompts are
        drawn from these, the same on every start.
        """
        return [
            fitting(data, rows, prompt_lengths(self.tokenizer, rows), room_for(self.config, use))
            for data, rows in zip(self.config.sets(use), self.prompts(use), strict=True)
        ]

    @property
    def config(self) -> PipelineConfig:
        return self.run.config

    def num_committed(self, phase: str) -> int:
        """The number of SFT segments, or RL iterations, of the run that are committed now."""
        return self.run.num_committed(phase, self.run.num_segments if phase == "sft" else self.config.rl.num_iterations)

    async def _may_steer(self) -> None:
        """Raises TakenOver or EngineError when engines and trainer are no longer this session's to
        use.
        """
        self.check_open()
        if self.run.lease is not None:
            # a store that does not answer is no reason to stop using the engines
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.run.lease.check_unless_fresh)

    async def gang(self) -> TrainerClient:
        """Returns the trainer, started if need be, ready for a job: memory that it shares with
        engines is freed for it.
        """
        async with self._trainer_lock:
            await self._may_steer()
            if self.memory:
                await self.memory.to_trainer()
            if not self.trainer.started:
                await self.trainer.start()
        return self.trainer

    async def serve(self, policy: ArtifactRef, version: int) -> bool:
        """Puts a policy on every engine, starting the pool if need be; False when it is served
        already.
        """
        async with self._pool_lock:
            await self._may_steer()
            if self.pool.version == version:
                return False
            if self.memory:
                async with self.trainer_turn:
                    await self.memory.to_engines()
            nearby = self.behind.nearby(policy)
            if nearby and not nearby.servers and not self.config.engines_here:  # no host could fetch it there
                await self.behind.committed([policy.sha256])
            probe = await asyncio.to_thread(self._probe, policy)
            try:
                async with self.trainer_turn if nearby and nearby.sender else contextlib.nullcontext():
                    await self.pool.serve(policy, version, probe, nearby)
            except StoreError as error:  # the trainer that had the files was lost
                if not self.behind.is_under_way(policy):
                    raise
                log.warning(
                    "no engine got weight version %d from the trainer's disk (%s): waiting for the store",
                    version,
                    error,
                )
                await self.behind.committed([policy.sha256])
                await self.pool.serve(policy, version, probe)
            assert self.pool.version == version, "the pool serves another version than it was given"
            return True

    def _probe(self, policy: ArtifactRef) -> Probe:
        metrics = self.run.manifest(policy).metrics
        if "probe" not in metrics:  # a base model that was copied
            metrics = self.run.committed("base", 0, "probe")[1].metrics
        return Probe(**metrics["probe"])

    @cached_property
    def rewards(self) -> RewardPool:
        self.check_open()
        return self._reward_pool("rl")

    @cached_property
    def evaluation_rewards(self) -> RewardPool:
        """The rewards that score evaluations: their own, or those of RL."""
        self.check_open()
        return self._reward_pool("evaluation") if self.config.evaluation.rewards else self.rewards

    def _reward_pool(self, use: str) -> RewardPool:
        config, rl = self.config, self.config.rl
        rewards, args = config.rewards(use), config.reward_args(use)
        pool = RewardPool(rewards, args, workers=rl.reward_workers, timeout_s=rl.reward_timeout_s, secrets=rl.secrets)
        self._closing.callback(pool.close)
        return pool

    @cached_property
    def environments(self) -> EnvironmentPool:
        self.check_open()
        rl = self.config.rl
        limits = rl.environment_timeout_s, rl.environment_total_s
        pool = EnvironmentPool(
            rl.environment, rl.environment_args, rl.reward_workers, *limits, code_environment(rl.secrets)
        )
        self._closing.push_async_callback(pool.close)
        return pool

    @cached_property
    def agents(self) -> Agents:
        self.check_open()
        self._closing.push_async_callback((agents := Agents(self.config.rl, self.tokenizer)).close)
        return agents

    def track_data(self, use: str) -> None:
        """Passes the data sets of a use to the tracker."""
        if self.config.sets(use):
            self.tracker.reads(use, partial(self._data_sets, use))

    def _data_sets(self, use: str) -> list[DataSet]:
        sets = self.config.sets(use)
        if use == "sft":  # artifacts of older code have none
            known = self.run.committed("data", 0, "data")[1].metrics.get("sets", {})
            return [
                DataSet.of(data, known[data.name]["sha256"], known[data.name]["rows"])
                for data in sets
                if data.name in known
            ]
        loaded = zip(sets, self.prompts(use), strict=True)
        return [DataSet.of(data, sha256_of([row.as_json() for row in rows]), len(rows)) for data, rows in loaded]

    @cached_property
    def data_sha256(self) -> str:
        """The hash of all prompts of use rl that are drawn: the position of a cursor holds for
        these data only.
        """
        return sha256_of([[prompt.as_json() for prompt in rows] for rows in self.fitting("rl")])

    @cached_property
    def prompt_cursor(self) -> PromptCursor:
        """The cursor that draws from the prompt sets of use rl, by their weights."""
        sizes, weights = [len(rows) for rows in self.fitting("rl")], [data.weight for data in self.config.sets("rl")]
        return PromptCursor(sizes, weights, self.config.seed)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the run, from its base artifact."""
        source, _ = self.run.committed("base", 0, "tokenizer")
        model = self.config.model
        folder = materialise(self.run.store, source, self.work_dir / "tokenizer")
        return ChatTokenizer.from_folder(folder, model.chat_template, model.chat_template_args, model.control_tokens)

    def check_open(self) -> None:
        """EngineError once the session is closed.

        A shard may outlive another shard that failed, and the flow that failed with it; this keeps
        it from starting anything.
        """
        if self._closed:
            raise EngineError(f"run {self.run.name} was closed")

    async def end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the session at the end of its `with`; the tracker gets the status of `error`."""
        if error is not None:
            self.tracker.status = status_of(error)
        await self.close(failed=error is not None)

    async def close(self, failed: bool = False) -> None:
        """Waits for the commits in progress, then ends all parts.

        `failed`: True when an error has ended the session; then commits get CLOSE_S.
        """
        try:
            if not failed:
                await self.behind.landed()
        finally:
            self._closed = True
            # first: a shard that outlived a failed one must not score or step any more
            await self._closing.aclose()
            await self.behind.close()
            await asyncio.gather(
                self.pool.close(),
                self._hosts.close(),
                self.trainer.close(),
                asyncio.to_thread(self.tracker.close),
                asyncio.to_thread(self.retention.close),
            )
            if self.run.lease is None or not self.run.lease.is_over:  # else they may be those of the new holder
                await asyncio.to_thread(remove_copies, self.work_dir)


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
            run = await asyncio.to_thread(create_or_continue, config)
            held = await asyncio.to_thread(lease.acquire, run.store, run.root, flow_run)
            stack.push_async_exit(partial(_give_back, held))
            await stack.enter_async_context(told(held))  # for errors while the session ends
            session = _open[key] = await asyncio.to_thread(_begin, replace(run, lease=held), start_service)
            stack.push_async_exit(session.end)
            stack.callback(_open.pop, key)
            await stack.enter_async_context(cancelled_when_taken_over(held))
            yield session
            hurried.pop_all()


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
