"""Stages, whose results are committed: each answers from its manifest, or computes, then commits.

A stage is one function, declared once. Its key, inputs, settings hash and commit, and its Prefect
task (tasks/stages.py), follow from the declaration:

    @stage("rl", "scores/round-{round_index}")
    def score(session, attempt, *, iteration, round_index, prompts, rollouts) -> Produced: ...

    result = await score(session, iteration=12, round_index=0, prompts=..., rollouts=[...])

Arguments that are references (or lists of them) are its inputs. An ordinary function runs in a
thread; one that talks to engines or to the trainer is `async`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.manifests import Manifest, StageResult
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.settings import artifact_settings
from rlpipe.loop.session import Session
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.store.artifacts import check_same, commit, new_attempt, write_bytes
from rlpipe.store.backend import Store
from rlpipe.store.code_version import code_version
from rlpipe.store.commits import Published


class StageKey(NamedTuple):
    """The key of a stage of an iteration.

    Example: StageKey("rl", 12, "rollouts/round-0/shard-003").
    """

    phase: str  # "base", "data", "sft" or "rl"
    iteration: int
    stage: str


@dataclass(frozen=True)
class Attempt:
    """One try at a stage, and the place where it writes: no other attempt has its files."""

    store: Store
    folder: str
    name: str

    def write(
        self, file: str, records: Sequence[Any], record: type[Any], columns: Sequence[str] | None = None
    ) -> FileRecord:
        """Writes records as one Parquet file, with all columns of `record` or these."""
        return write_bytes(self.store, self.folder, self.name, file, to_parquet(to_table(records, record, columns)))


@dataclass(frozen=True)
class Produced:
    """The files that a stage wrote, and its metrics, before they are committed.

    `published`: the places of the files while they are uploaded to the store; None when the store
    has them.
    """

    files: list[FileRecord]
    metrics: JsonDict = field(default_factory=dict)
    weight_version: int | None = None
    published: Published | None = None


Result = TypeVar("Result")
# the named arguments of a stage: pyright refuses a flow that passes others
P = ParamSpec("P")
Produce = Callable[[Attempt], Produced | Awaitable[Produced]]
Function = Callable[Concatenate[Session, Attempt, P], Produced | Awaitable[Produced]]


@dataclass(frozen=True, eq=False)
class Stage(Generic[P]):
    """A declared stage: called with the session and the function's other arguments, it returns the
    committed result.
    """

    function: Function[P]
    phase: str
    name: str
    verb: str  # in the UI and in time metrics
    numbered: str

    async def __call__(self, session: Session, *none: P.args, **arguments: P.kwargs) -> StageResult:
        def produce(attempt: Attempt) -> Produced | Awaitable[Produced]:
            return self.function(session, attempt, *none, **arguments)

        key, settings = self.key(session, **arguments), self.settings(session.config)
        return await run_stage(session, key, self._inputs(arguments), settings, produce)

    def key(self, session: Session, **arguments: Any) -> StageKey:
        """Returns the key of the artifact of these arguments.

        A stage that is made from a policy (an empty phase) lies beside that policy, which `version`
        names.
        """
        if not self.phase:
            return StageKey(*session.run.policy_place(arguments["version"]), self.name)
        iteration = arguments.get("iteration", arguments.get("segment", 0))
        return StageKey(self.phase, iteration, self.name.format(**arguments))

    def settings(self, config: PipelineConfig) -> JsonDict:
        """Returns the settings that the result depends on, flat.

        Example: {"seed": 0, "rl.num_prompts": 64, ...}.
        """
        return artifact_settings(config, self.phase, self.name.split("/", 1)[0])

    def _inputs(self, arguments: Mapping[str, object]) -> dict[str, ArtifactRef]:
        inputs: dict[str, ArtifactRef] = {}
        for name, value in arguments.items():
            if isinstance(value, ArtifactRef):
                inputs[name] = value
            elif isinstance(value, list):
                inputs |= {self.numbered.format(name=name, index=index): ref for index, ref in enumerate(value)}
        return inputs


def stage(
    phase: str, name: str, *, verb: str = "", numbered: str = "{name}-{index}"
) -> Callable[[Function[P]], Stage[P]]:
    """Declares a stage of a phase; an empty phase puts it beside its policy.

    `name`: its key, filled with the arguments; before the first slash it is the kind of artifact
    that config fields affect. `verb`: its name for people, where it is not the function's;
    `numbered`: the names of inputs that come as a list.
    """

    def declared(function: Function[P]) -> Stage[P]:
        return Stage(function, phase, name, verb or function.__name__, numbered)

    return declared


async def run_stage(
    session: Session, key: StageKey, inputs: dict[str, ArtifactRef], settings: JsonDict, produce: Produce
) -> StageResult:
    """Returns the result from the stage's manifest if it has one, else produces and commits it.

    `produce` is called in a thread. The commit waits until all inputs are committed. A result that
    is only published itself is committed in the background. UserError when the manifest records
    other inputs or settings than these.
    """
    run = session.run
    session.commits.check()
    hashes = {name: ref.sha256 for name, ref in inputs.items()}
    standing = await asyncio.to_thread(run.artifact, *key)
    if standing is not None:
        ref, manifest = standing
        check_same(ref.folder, manifest, hashes, settings)
        return StageResult(ref, manifest.metrics, cached=True)
    owner = run.owner(*key)
    if owner is not run:
        raise UserError(
            f"{key.phase}/{key.iteration:05d}/{key.stage} belongs to run {owner.name}, from which this run was forked;"
            f" run this stage in {owner.name}"
        )
    started_at, attempt = now(), Attempt(run.store, run.folder(*key), new_attempt(run.lease))
    produced = await asyncio.to_thread(produce, attempt)
    if inspect.isawaitable(produced):
        produced = await produced
    assert all(file.name.count("/") == 1 for file in produced.files), (
        f"{key}: a file outside of its attempt: {produced.files}"
    )
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
        ended_at=now(),
        lease=run.lease.number if run.lease else None,
    )
    if produced.published is not None:
        return StageResult(
            session.commits.publish(attempt.folder, manifest, produced.published), manifest.metrics, cached=False
        )
    await session.commits.committed(hashes.values())
    ref, manifest = await asyncio.to_thread(commit, run.store, attempt.folder, manifest, run.lease)
    return StageResult(ref, manifest.metrics, cached=False)


async def all_ended(calls: list[Awaitable[Result]]) -> list[Result]:
    """Waits until every call has ended; returns all results in order, or raises the first error in
    that order.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def now() -> str:
    """Returns the current time as manifests and records write it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
