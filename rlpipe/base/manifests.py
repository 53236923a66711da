"""The records of a run's results: the manifest of an artifact, the record of an iteration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.values import JsonDict, Metrics

ROUND_DIGITS_MAX = 4


def moment_of(text: str, document: str) -> datetime:
    """Parses a time in a document. StoreError when it is invalid."""
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise StoreError(
            f"{document}: {text!r:.80} is not a time in ISO format; restore this file from a copy"
        ) from error


@dataclass(frozen=True)
class StageResult:
    """A committed stage. `cached`: it was committed already before this request."""

    ref: ArtifactRef
    metrics: JsonDict
    cached: bool


@dataclass(frozen=True)
class ActionResult:
    """What an action did: it commits nothing, what follows from it is committed by a stage.
    `cached`: there was nothing to do.
    """

    metrics: JsonDict
    cached: bool


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`. `inputs` maps a name to the sha256 of that input's
    manifest."""

    run: str
    phase: str
    iteration: int
    stage: str
    inputs: dict[str, str]
    settings_sha256: str
    settings: JsonDict
    files: list[FileRecord]
    metrics: JsonDict
    weight_version: int | None
    code_version: str
    started_at: str
    ended_at: str
    schema_version: Literal[1] = 1  # a document with another version is refused
    # the number of the lease under which it was made; older documents have none
    lease: int | None = None

    def file(self, plain_name: str) -> FileRecord:
        """The record of the file `plain_name`. StoreError when the artifact has no such file."""
        for record in self.files:
            if record.plain_name == plain_name:
                return record
        raise StoreError(f"{self.run}/{self.phase}/{self.iteration:05d}/{self.stage} has no file {plain_name}")


@dataclass(frozen=True)
class BestReward:
    """The best mean reward of a run so far, and its iteration."""

    iteration: int
    reward: float


@dataclass(frozen=True)
class IterationRecord:
    """The content of `iteration.json`: the commit of a whole RL iteration."""

    run: str
    iteration: int
    weight_version: int  # of the policy that the iteration made
    # prompts (of the last round), batch, policy; state and evaluation when there is one
    artifacts: dict[str, ArtifactRef]
    state_iteration: int  # the iteration of the newest training state; -1: none
    metrics: dict[str, float | int]
    curve: list[list[float | int]]  # [iteration, mean reward] so far, thinned
    best: BestReward
    ended_at: str
    schema_version: Literal[1] = 1  # a document with another version is refused
    lease: int | None = None  # as that of a manifest

    def artifact(self, name: str) -> ArtifactRef:
        """The reference to the artifact `name`. StoreError when the record has none."""
        if name not in self.artifacts:
            raise StoreError(f"the record of iteration {self.iteration} of run {self.run} names no {name}")
        return self.artifacts[name]

    @property
    def last_round(self) -> int:
        """The index of the last sampling round. StoreError when its folder has none."""
        number = self.artifact("prompts").folder.rpartition("round-")[2]
        if not number.isdecimal() or len(number) > ROUND_DIGITS_MAX:
            raise StoreError(f"the record of iteration {self.iteration} of run {self.run} names no round of prompts")
        return int(number)

    @property
    def evaluation(self) -> Metrics:
        """The metrics of the evaluation of the iteration's policy, by their names in it; empty if
        none was due.
        """
        prefix = "evaluation/"
        return {name.removeprefix(prefix): value for name, value in self.metrics.items() if name.startswith(prefix)}
