"""The jobs of the trainer, and its rebuild from the store: residency is a cache.

A position names a training state by the place where it is committed: after SFT segment or RL
iteration k of the run that owns it. The batches are the write-ahead log, the training state is the
snapshot: load the newest state, replay the batches since.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.seeds import data_seed
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.settings import artifact_settings, effects
from rlpipe.config.training import OptimizerConfig, RlConfig, SftConfig
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, StageKey, run_stage
from rlpipe.loop.trainer_requests import OnProgress, Rebuild, Upload, do_job, send
from rlpipe.store.adapter_files import Adapter
from rlpipe.store.artifacts import is_pruned
from rlpipe.store.commits import Published
from rlpipe.store.run import Run
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.jobs import RESULT, SAVED, JobResult, LoadJob, NewAdapter, RlJob, SaveJob, SftJob

log = logging.getLogger(__name__)


def position(run: Run, phase: str, iteration: int) -> str:
    """The name of the training state after an iteration; -1 is the start of the phase (weights,
    fresh optimizer).
    """
    assert iteration >= -1, f"{phase} {iteration} is before the start"
    if iteration >= 0:
        return f"{run.owner(phase, iteration).root}/{phase}/{iteration:05d}"
    return f"{_first_policy(run, phase).folder}/fresh"


def _first_policy(run: Run, phase: str) -> ArtifactRef:
    """The policy that a phase starts from."""
    return (run.policy(0) if phase == "rl" else run.committed("base", 0, "policy"))[0]


def new_adapter(config: PipelineConfig) -> NewAdapter | None:
    """The adapter that training adds to a whole model; None when all of the model is trained."""
    model = config.model
    if model.adapter == "none":
        return None
    return NewAdapter(
        Adapter(model.adapter_rank, model.adapter_alpha, tuple(model.adapter_targets)),
        data_seed(config.seed, "adapter"),
    )


def rl_job(run: Run, iteration: int, batch: ArtifactRef) -> RlJob:
    """The training of one RL iteration, with the settings of the run that owns it."""
    config = run.owner("rl", iteration).config
    rl = config.rl
    return RlJob(
        kind="rl",
        start=position(run, "rl", iteration - 1),
        result=position(run, "rl", iteration),
        data=batch,
        # a fork may take more or fewer steps than its parent did: the schedule goes on where it was
        first_step=sum(run.owner("rl", before).config.rl.num_steps for before in range(iteration)),
        settings=RlConfig(**rl.model_dump(include={effect.name for effect in effects("rl", "policy")})),
        reference=None if rl.kl == "none" else other_reference(run, iteration) or run.policy(0)[0],
        teacher_logprobs=run.committed("rl", iteration, "teacher_logprobs")[0] if config.teachers else None,
    )


def other_reference(run: Run, iteration: int) -> ArtifactRef | None:
    """The reference of an iteration where `rl.reference` names one: that of the run that trained
    the iteration.
    """
    owner = run.owner("rl", iteration)
    return owner.committed("base", 0, "reference")[0] if owner.config.rl.reference else None


def sft_job(run: Run, segment: int, data: ArtifactRef) -> SftJob:
    """One segment of SFT steps."""
    sft = run.config.sft
    first, fields = segment * sft.segment_steps, {*OptimizerConfig.model_fields, "batch_size"}
    num_steps = min(sft.segment_steps, sft.num_steps - first)
    assert num_steps > 0, f"segment {segment} of {run.config.sft.num_segments}"
    return SftJob(
        kind="sft",
        start=position(run, "sft", segment - 1),
        result=position(run, "sft", segment),
        data=data,
        first_step=first,
        settings=SftConfig(**sft.model_dump(include=fields), num_steps=num_steps),
        seed=run.config.seed,
    )


@dataclass(frozen=True)
class StoredAs:
    """The form in which a policy is stored: as its difference to `base`, or whole (None).

    `is_base`: True when it is the base of the next one.
    """

    base: ArtifactRef | None
    is_base: bool


WHOLE = StoredAs(None, is_base=False)


@dataclass(frozen=True)
class Saved:
    """The files that the trainer published. `published`: their places, and their upload to the
    store.
    """

    result: JobResult
    published: Published

    def produced(self, metrics: JsonDict, weight_version: int | None, published: Published | None = None) -> Produced:
        """The policy, to be committed with these metrics."""
        return Produced(self.result.policy, metrics | {"probe": self.result.probe}, weight_version, published)


async def train_job(session: Session, iteration: int, job: RlJob | SftJob, on_progress: OnProgress = None) -> JsonDict:
    """Does a training job, and rebuilds the trainer from the store first where it must; returns the
    job's metrics.
    """
    rebuild = functools.partial(replay, session.run, job.kind, iteration)
    # an upload in progress may need the trainer too, and the state to rebuild from may be in it
    return (await do_job(session, job, rebuild, on_progress, before_rebuild=session.commits.all_committed))["metrics"]


async def save_job(
    session: Session, iteration: int, job: RlJob | SftJob, attempt: Attempt, with_state: bool, stored: StoredAs = WHOLE
) -> Saved:
    """Publishes the result of `job`: its policy, its state if that is wanted, and for RL its gaps;
    trains again when the trainer does not hold the result.
    """
    phase = job.kind

    async def rebuild(trainer: TrainerClient) -> None:
        await replay(session.run, phase, iteration, trainer)
        await send(trainer, job)

    beside = [stage for stage, wanted in (("state", with_state), ("gap", phase == "rl")) if wanted]
    folders = {stage: session.run.folder(phase, iteration, stage) for stage in beside}
    return await save(session, job.result, attempt, rebuild, folders=folders, stored=stored)


async def commit_saved(
    session: Session,
    key: StageKey,
    inputs: dict[str, ArtifactRef],
    files: list[FileRecord],
    published: Published | None = None,
) -> None:
    """Commits what was saved beside a policy: its state, or the gaps of its iteration."""
    settings = artifact_settings(session.config, key.phase, "policy")
    await run_stage(session, key, inputs, settings, lambda _: Produced(files, published=published))


async def save_loaded(session: Session, load: LoadJob, attempt: Attempt, *, policy: bool = True) -> Saved:
    """Does a job that loads, and saves the result in the trainer: the policy, or only its probe.

    Returns when the store has it.
    """
    rebuild = functools.partial(send, job=load)
    await rebuild(await session.trainer.ready())
    saved = await save(session, load.position, attempt, rebuild, policy=policy)
    await saved.published.upload()
    return saved


async def save(
    session: Session,
    position: str,
    attempt: Attempt,
    rebuild: Rebuild,
    *,
    policy: bool = True,
    folders: Mapping[str, str] = MappingProxyType({}),
    stored: StoredAs = WHOLE,
) -> Saved:
    """Publishes what the trainer holds: its policy as files of the attempt; its state and its gaps
    where `folders` has one for them.
    """
    chat = await asyncio.to_thread(lambda: session.data.tokenizer)
    assert chat.stop_token_ids, "a policy that could never end"
    tokenizer, _ = await asyncio.to_thread(session.run.committed, "base", 0, "tokenizer")
    folder, context_tokens_max = attempt.folder if policy else None, session.config.model.context_tokens_max
    place = position, folder, folders.get("state"), attempt.name
    job = SaveJob(
        *place, tokenizer, chat.stop_token_ids, context_tokens_max, stored.base, stored.is_base, folders.get("gap")
    )
    answer = await do_job(session, job, rebuild)
    result, client = RESULT.validate_python(answer), session.trainer.client
    saved, wanted = {name for name in SAVED if getattr(result, name)}, {*folders, *(["policy"] if policy else [])}
    assert saved == wanted, f"saved {saved}, wanted {wanted}"
    places = result.places if client.serves_files else [replace(place, url="") for place in result.places]
    sender = client.sender(position) if session.config.engines.transport == "tensor" else None
    upload = Upload(session, job, rebuild, answer)
    return Saved(result, Published(places, result.made_on, result.parts, upload.finish, sender))


async def replay(run: Run, phase: str, iteration: int, trainer: TrainerClient) -> None:
    """Restores the start of `iteration` in the trainer: loads the newest state before it and trains
    on the stored batches since.
    """
    newest = _newest_state(run, phase, iteration - 1)
    state = run.committed(phase, newest, "state")[0] if newest >= 0 else None
    assert state is None or state.folder not in run.uncommitted.artifacts, f"{state} is not in the store yet"
    policy = _first_policy(run, phase) if state is None else None
    adapter = new_adapter(run.config) if policy else None
    load = LoadJob(position(run, phase, newest), new=None, policy=policy, state=state, adapter=adapter)
    log.info("trainer: loading %s, then replaying %d iterations", load.position, iteration - 1 - newest)
    warn_of_differences(load.position, (await send(trainer, load))["differs"])
    for replayed in range(newest + 1, iteration):
        await send(trainer, rl_job(run, replayed, run.record(replayed).artifact("batch")))


@functools.cache
def warn_of_differences(position: str, differs: str) -> None:
    """Warns, once for each position, that training from here on may have other bits than the
    trainer that saved the state would have given.
    """
    if differs:
        log.warning(
            "%s was saved by another kind of trainer (%s): the run goes on and nothing is lost, but its results will"
            " not have the same bits as without this change",
            position,
            differs,
        )


def _newest_state(run: Run, phase: str, iteration: int) -> int:
    """The newest iteration at or before this one whose state is committed and was not pruned; -1
    when there is none.
    """
    if iteration < 0 or phase == "sft":  # every segment commits its state
        return iteration
    newest = run.record(iteration).state_iteration
    while newest >= 0 and is_pruned(run.store, run.folder("rl", newest, "state")):
        newest = run.record(newest - 1).state_iteration if newest else -1
    return newest
