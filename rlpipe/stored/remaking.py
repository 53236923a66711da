"""Policies whose files were pruned, made again: training goes on from the newest state before the
policy, on the stored batches, and the files must have the hashes of its manifest. Also policies as
folders (`rlpipe export`), made again where that is needed.

The reasons why a run may prune meanwhile, or two processes do it at once, without harm:
rlpipe/store/retention.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import Manifest, StageResult
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.loop.session import Session, open_session
from rlpipe.loop.stage import Attempt
from rlpipe.models.whole import whole_policy
from rlpipe.stages.model_source import write_trained_template
from rlpipe.stages.training import StoredAs, position, replay, save
from rlpipe.store.artifacts import PRUNED, is_pruned, new_attempt
from rlpipe.store.backend import Store, open_store
from rlpipe.store.lease import RunHeld
from rlpipe.store.local_copy import fetch, local_folder
from rlpipe.store.opening import open_existing
from rlpipe.store.policy_files import stored_policy
from rlpipe.store.progress import Progress
from rlpipe.store.pruned import delete, wait_until_pruned
from rlpipe.store.run import BEFORE_SFT, Run

log = logging.getLogger(__name__)


def pruned_versions(run: Run, iteration: int) -> list[int]:
    """The weight versions that the engines need to begin an iteration and whose files are not all
    in the store.
    """
    return [
        version
        for version in sorted({run.sampled_by(iteration), iteration})
        if is_pruned(run.store, run.folder(*run.policy_place(version), "policy"))
    ]


def is_missing_to_evaluate(run: Run, version: int) -> bool:
    """True when a policy that this run still has to evaluate was pruned."""
    place = run.policy_place(version)
    evaluated = run.owner(*place, "evaluation") is not run or run.artifact(*place, "evaluation") is not None
    return not evaluated and is_pruned(run.store, run.folder(*place, "policy"))


async def restore_policy(session: Session, *, version: int) -> StageResult:
    """Makes the files of a pruned policy again, in their places; `cached` when they are there
    already.

    StoreError naming both hashes where this run's trainer makes other files: then nothing is
    written.
    """
    ref, manifest = await asyncio.to_thread(session.run.policy, version)
    store = session.run.store
    if not await asyncio.to_thread(wait_until_pruned, store, ref.folder):
        return StageResult(ref, manifest.metrics, cached=True)
    policy = stored_policy(store, ref, manifest)
    base = await asyncio.to_thread(lambda: policy.base) if policy.is_rebuilt else None
    if base is not None:  # first what it is a difference to
        await restore_policy(session, version=version - 1)
    scratch = session.data.folder / "remaking"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        await remake_policy(session, version, Path(folder), manifest.files, base)
        await asyncio.to_thread(put_back, store, ref.folder, manifest, Path(folder))
    return StageResult(ref, manifest.metrics, cached=False)


async def remake_policy(
    session: Session, version: int, target: Path, wanted: list[FileRecord], base: ArtifactRef | None = None
) -> None:
    """Makes the files of an RL policy again, under their plain names in a local folder; StoreError
    when one is not as `wanted`.

    `base`: the policy that they are a difference to; None: the policy is stored whole.
    """
    run = session.run
    phase, iteration = run.policy_place(version)
    assert phase == "rl", f"weight version {version} is of phase {phase}, which is never pruned"
    _, manifest = await asyncio.to_thread(run.policy, version)
    # a trainer writes into its own run only; no manifest names these files, and they are
    # deleted at the end, or by `rlpipe gc`
    attempt = Attempt(run.store, f"{run.root}/{phase}/{iteration:05d}/policy", new_attempt(run.lease))
    rebuild = functools.partial(replay, run, phase, iteration + 1)
    log.info("weight version %d of run %s was pruned: making it again", version, manifest.run)
    files: list[FileRecord] = []
    try:
        stored = StoredAs(base, is_base=False)
        saved = await save(session, position(run, phase, iteration), attempt, rebuild, stored=stored)
        files = saved.result.policy
        await saved.published.upload()
        check_same_files(manifest, wanted, files)
        await asyncio.to_thread(fetch, run.store, attempt.folder, files, target)
    finally:
        for file in files:
            await asyncio.to_thread(delete, run.store, f"{attempt.folder}/{file.name}")


def check_same_files(manifest: Manifest, wanted: list[FileRecord], files: list[FileRecord]) -> None:
    """StoreError naming the first file that has another hash than the wanted one, or that only one
    side has.
    """
    before, made = ({file.plain_name: file.sha256 for file in records} for records in (wanted, files))
    for name in sorted({*before, *made}):
        if before.get(name) != made.get(name):
            raise StoreError(
                f"weight version {manifest.weight_version} of run {manifest.run} was pruned, and made again its {name}"
                f" has sha256 {made.get(name, 'none')}, where its manifest has {before.get(name, 'none')}. Nothing was"
                " written. Training again gives the same bits on one kind of machine, with the same versions,"
                " trainer.ranks and trainer.threads only (docs/store.md): do it where the run was trained, or take a"
                " version that was kept (`rlpipe show` says which)"
            )


def put_back(store: Store, folder: str, manifest: Manifest, source: Path) -> None:
    """Puts the files of a pruned artifact back under the names of its manifest; the mark that it
    was pruned is removed last.
    """
    for file in manifest.files:
        store.put_file(f"{folder}/{file.name}", source / file.plain_name)
    for file in manifest.files:
        assert (size := store.size(f"{folder}/{file.name}")) == file.bytes, (
            f"{folder}/{file.name} has {size} bytes, not {file.bytes}"
        )
    delete(store, f"{folder}/{PRUNED}")


def committed_version(run: Run, version: int | None) -> int:
    """The weight version that is asked for, or the newest one;
    UserError when it is not committed."""
    progress = Progress(run)
    if not progress.has_base:
        raise UserError(f"run {run.name} has no policy yet: `rlpipe run ... --run {run.name}` makes one")
    oldest = BEFORE_SFT if run.config.sft.num_segments else 0
    newest = progress.num_iterations if progress.sft_complete else oldest
    if version is not None and not oldest <= version <= newest:
        raise UserError(f"version {version} of run {run.name} is not committed: there are {oldest} to {newest}")
    return newest if version is None else version


async def export_policy(
    config: PipelineConfig, version: int | None, target: Path, finish: Callable[[Run, int, Path], None] | None = None
) -> int:
    """Writes a policy of a run as a folder in HF format, which appears whole; returns the weight
    version.

    A pruned policy is made again by a trainer of this config, and stays pruned in the store.
    `finish` (run, version, folder) may add files before the folder appears. UserError when the
    folder is not empty, or the version is not committed.
    """
    run = open_existing(open_store(config.store), config.run)
    number = committed_version(run, version)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"--to {target}: something is there already; name a folder that is not there, or an empty one")
    target.parent.mkdir(parents=True, exist_ok=True)
    ref, manifest = run.policy(number)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        if is_pruned(run.store, ref.folder):
            again = local_folder(ref, Path(scratch))  # where `whole_policy` looks for its files first
            again.mkdir()
            await _remake(config, number, again, manifest, [*stored_policy(run.store, ref).files.values()])
        made = whole_policy(run.store, ref, Path(scratch))
        # older code stored the one that the base had
        write_trained_template(run.config.model, made)
        if finish is not None:
            finish(run, number, made)
        os.rename(made, target)
    return number


async def _remake(
    config: PipelineConfig, version: int, target: Path, manifest: Manifest, wanted: list[FileRecord]
) -> None:
    if config.trainer.place == "deployment":
        raise UserError(
            f"version {version} of run {manifest.run} was pruned, and trainer.place='deployment' is started by a flow"
            f" only; use --set trainer.place=process, or make it again in the store: rlpipe fork {manifest.run} --at"
            f" {manifest.iteration} --run NEW"
        )
    try:
        async with open_session(config) as session:
            await remake_policy(session, version, target, wanted)
    except RunHeld as error:
        raise UserError(
            f"version {version} was pruned, and {error}; meanwhile a fork can make it again, in the store: "
            f"rlpipe fork {manifest.run} --at {manifest.iteration} --run NEW"
        ) from error
