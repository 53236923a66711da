"""Residency is a cache: what the trainer must hold for a job, and how to bring it there from the store.

A position names a training state by where it is committed: after SFT segment or RL iteration k of the run that owns it.
The rollouts are the write-ahead log, the training state is the snapshot: load the newest state, replay the batches since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.session import Session
from rlpipe.stages.settings import OPTIMIZER, TRAINING
from rlpipe.store.run import Run
from rlpipe.trainer.client import GangLost, NotResident
from rlpipe.types import ArtifactRef, FileRecord, JsonDict, TrainerError
from rlpipe.weights import probe_tokens

log = logging.getLogger(__name__)
REBUILDS_MAX = 4

OnProgress = Callable[[JsonDict], None] | None


def position(run: Run, phase: str, iteration: int) -> str:
    """The name of the training state after an iteration; -1 is the start of the phase (weights, fresh optimizer)."""
    if iteration >= 0:
        return f"{run.owner(phase, iteration).root}/{phase}/{iteration:05d}"
    ref, _ = run.start_policy() if phase == "rl" else run.committed("base", 0, "policy")
    return f"{ref.folder}/fresh"


def rl_job(run: Run, iteration: int, batch: ArtifactRef) -> JsonDict:
    """The training of one RL iteration, with the settings of the run that owns it."""
    config = run.owner("rl", iteration).config
    settings = config.rl.model_dump(mode="json", include=set(TRAINING)) | {"first_step": iteration * config.rl.num_steps}
    reference = run.start_policy()[0].as_json() if config.rl.kl != "none" else None
    return _job(run, "rl", iteration) | {"data": batch.as_json(), "reference": reference, "settings": settings}


def sft_job(run: Run, segment: int, data: ArtifactRef) -> JsonDict:
    """One segment of SFT steps."""
    sft = run.config.sft
    first = segment * sft.segment_steps
    num_steps = min(sft.segment_steps, sft.num_steps - first)
    settings = sft.model_dump(mode="json", include={*OPTIMIZER, "batch_size"}) | {
        "first_step": first,
        "num_steps": num_steps,
        "seed": run.config.seed,
    }
    return _job(run, "sft", segment) | {"data": data.as_json(), "reference": None, "settings": settings}


def _job(run: Run, phase: str, iteration: int) -> JsonDict:
    return {"kind": phase, "start": position(run, phase, iteration - 1), "result": position(run, phase, iteration)}


async def train_job(session: Session, phase: str, iteration: int, job: JsonDict, on_progress: OnProgress = None) -> JsonDict:
    """Does a training job on whatever the trainer holds, rebuilding it from the store when it must; its metrics."""
    gang = await session.gang()
    for _ in range(REBUILDS_MAX):
        try:
            return (await gang.run("train", job, on_progress))["metrics"]
        except NotResident:
            await _rebuild_until_held(session, phase, iteration)
        except GangLost as error:
            log.warning("%s: rebuilding from the store", error)
    raise TrainerError(
        f"the trainer was lost {REBUILDS_MAX} times during {phase} {iteration}; its log: {session.work_dir}/trainer.log"
    )


@dataclass(frozen=True)
class Saved:
    """What the trainer wrote. `probe`, for the policy's manifest: what an engine with these weights must answer."""

    policy: list[FileRecord]
    state: list[FileRecord]
    probe: JsonDict


async def save(session: Session, position: str, attempt: Attempt, *, policy: bool = True, state_folder: str = "") -> Saved:
    """Saves what the trainer holds: its policy as files of the attempt, its state where there is a folder for it."""
    tokens = probe_tokens(await asyncio.to_thread(lambda: session.tokenizer.vocab_size))
    tokenizer, _ = await asyncio.to_thread(session.run.committed, "base", 0, "tokenizer")
    told = await (await session.gang()).run("save", {
        "position": position, "policy_folder": attempt.folder if policy else None, "state_folder": state_folder or None,
        "attempt": attempt.name, "tokenizer": tokenizer.as_json(), "probe_tokens": tokens,
    })  # fmt: skip
    files, state = ([FileRecord(**record) for record in told[name]] for name in ("policy", "state"))
    return Saved(files, state, {"probe": {"tokens": tokens, "logprobs": told["probe"]}})


async def save_job(
    session: Session, phase: str, iteration: int, job: JsonDict, attempt: Attempt, state_inputs: dict[str, ArtifactRef] | None
) -> Saved:
    """Saves what `job` results in, and commits its state where `state_inputs` are given; trains it again when it is not held."""
    state_folder = session.run.folder(phase, iteration, "state") if state_inputs else ""
    for _ in range(REBUILDS_MAX):
        try:
            saved = await save(session, job["result"], attempt, state_folder=state_folder)
            break
        except (NotResident, GangLost) as error:
            log.warning("%s: training it again", error)
            await train_job(session, phase, iteration, job)
    else:
        raise TrainerError(f"the trainer was lost {REBUILDS_MAX} times while saving {phase} {iteration}")
    if state_inputs:
        assert saved.state, f"the trainer saved no state for {phase} {iteration}"
        await run_stage(session, StageKey(phase, iteration, "state"), state_inputs, lambda _: Produced(saved.state))
    return saved


async def _rebuild_until_held(session: Session, phase: str, iteration: int) -> None:
    for _ in range(REBUILDS_MAX):
        try:
            return await _rebuild(session, phase, iteration)
        except (GangLost, NotResident) as error:
            log.warning("%s while rebuilding: once more", error)
    raise TrainerError(f"the trainer was lost {REBUILDS_MAX} times while it was rebuilt for {phase} {iteration}")


async def _rebuild(session: Session, phase: str, iteration: int) -> None:
    """Loads the newest state before `iteration` and replays the stored batches since."""
    run, gang = session.run, await session.gang()
    newest = _newest_state(run, phase, iteration - 1)
    source: JsonDict = {"new": None, "policy": None, "state": None}
    if newest >= 0:
        source["state"] = run.committed(phase, newest, "state")[0].as_json()
    else:
        ref, _ = run.start_policy() if phase == "rl" else run.committed("base", 0, "policy")
        source["policy"] = ref.as_json()
    load = {"position": position(run, phase, newest), **source}
    log.info("trainer: loading %s, then replaying %d", load["position"], iteration - 1 - newest)
    await gang.run("load", load)
    for replayed in range(newest + 1, iteration):
        record = run.iteration_record(replayed)
        assert record is not None, f"iteration {replayed} is not committed, but {iteration} is asked for"
        await gang.run("train", rl_job(run, replayed, ArtifactRef.from_json(record["artifacts"]["batch"])))


def _newest_state(run: Run, phase: str, iteration: int) -> int:
    """The newest iteration at or before this one with a committed state; -1 when there is none."""
    if iteration < 0:
        return -1
    if phase == "sft":  # every segment commits its state
        return iteration
    record = run.iteration_record(iteration)
    assert record is not None, f"iteration {iteration} is not committed"
    return int(record["state_iteration"])
