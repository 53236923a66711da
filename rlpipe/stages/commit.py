"""How a stage becomes a fact: answer from its manifest, or compute, then commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import pyarrow as pa

from rlpipe.rollouts import to_parquet
from rlpipe.stages.session import Session
from rlpipe.stages.settings import stage_settings
from rlpipe.store.artifacts import check_same, commit, new_attempt, write_bytes
from rlpipe.store.backend import Store
from rlpipe.store.run import code_version
from rlpipe.types import ArtifactRef, FileRecord, JsonDict, Manifest, StageResult, UserError, sha256_of


class StageKey(NamedTuple):
    """Which stage of which iteration. Example: StageKey("rl", 12, "rollouts/round-0/shard-003")."""

    phase: str  # "base", "data", "sft" or "rl"
    iteration: int
    stage: str


@dataclass(frozen=True)
class Attempt:
    """One try at a stage, and where it writes: no other attempt has its files."""

    store: Store
    folder: str
    name: str

    def write_rows(self, file: str, rows: list[JsonDict], schema: pa.Schema) -> FileRecord:
        """Writes the rows as one Parquet file."""
        return write_bytes(self.store, self.folder, self.name, file, to_parquet(rows, schema))


@dataclass(frozen=True)
class Produced:
    """What a stage wrote, before it is committed."""

    files: list[FileRecord]
    metrics: JsonDict = field(default_factory=dict)
    weight_version: int | None = None


Produce = Callable[[Attempt], Produced | Awaitable[Produced]]


async def run_stage(session: Session, key: StageKey, inputs: dict[str, ArtifactRef], produce: Produce) -> StageResult:
    """Answers from the stage's manifest if it has one, else produces and commits it. `produce` is called in a thread.

    UserError when the manifest records other inputs or settings than these.
    """
    run = session.run
    settings = stage_settings(session.config, key.phase, key.stage)
    hashes = {name: ref.sha256 for name, ref in inputs.items()}
    found = await asyncio.to_thread(run.artifact, *key)
    if found is not None:
        ref, manifest = found
        check_same(ref.folder, manifest, hashes, settings)
        return StageResult(ref, manifest.metrics, cached=True)
    owner = run.owner(*key)
    if owner is not run:
        raise UserError(
            f"{key.phase}/{key.iteration:05d}/{key.stage} belongs to run {owner.name}, which this was forked from: do it there"
        )
    folder = run.folder(*key)
    started_at = _now()
    produced = await asyncio.to_thread(produce, Attempt(run.store, folder, new_attempt()))
    if not isinstance(produced, Produced):
        produced = await produced
    manifest = Manifest(
        run=run.name,
        phase=key.phase,
        iteration=key.iteration,
        stage=key.stage,
        inputs=hashes,
        settings_sha256=sha256_of(settings),
        settings=settings,
        files=produced.files,
        metrics=produced.metrics,
        weight_version=produced.weight_version,
        code_version=code_version(),
        started_at=started_at,
        ended_at=_now(),
    )
    ref, standing = await asyncio.to_thread(commit, run.store, folder, manifest)
    return StageResult(ref, standing.metrics, cached=False)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
