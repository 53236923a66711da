"""The records that cross borders between parts, and the errors a user may see. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

JsonDict = dict[str, Any]
SHA256 = re.compile("[0-9a-f]{64}")


class UserError(ValueError):
    """Bad input: the message names the field, file or row, its value and the fix. Exit code 2."""


class StoreError(RuntimeError):
    """The store refuses or contradicts itself (wrong hash, missing file, no access); the message names the file."""


class EngineError(RuntimeError):
    """No engine could answer within its bounds."""


class TrainerError(RuntimeError):
    """The trainer gang could not do its job within its bounds."""


class StepRefused(TrainerError):
    """A step that would spoil the policy: not finite, or trained on what another policy sampled. Nothing was committed."""


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: what hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def is_key(value: str) -> bool:
    """Whether it can be the name of something in a store: a path that stays below where it starts."""
    return "\0" not in value and not {"", ".", ".."} & set(value.split("/"))


@dataclass(frozen=True)
class FileRecord:
    """One file of an artifact. Example: FileRecord("1f0c9a/model.safetensors", 3315400, "9e1d...")."""

    name: str  # relative to the artifact's folder; the first part is the attempt that wrote it
    bytes: int
    sha256: str

    @property
    def plain_name(self) -> str:
        """The name without the attempt: what the file is called when it is materialised."""
        return self.name.split("/", 1)[1]


@dataclass(frozen=True)
class ArtifactRef:
    """A committed artifact: its folder in the store and the sha256 of its manifest.

    Example: ArtifactRef("runs/a/rl/00012/policy", "5f2b...").
    """

    folder: str
    sha256: str

    def as_json(self) -> JsonDict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ArtifactRef:
        """UserError when it is none: it came from another process."""
        folder, sha256 = (value.get(name) if isinstance(value, dict) else None for name in ("folder", "sha256"))
        if not isinstance(folder, str) or not is_key(folder) or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise UserError(f"{value!r:.200} is no reference: a folder of the store and the sha256 of its manifest")
        return cls(folder, sha256)


@dataclass(frozen=True)
class StageResult:
    """A committed stage. `cached`: it was committed before it was asked for."""

    ref: ArtifactRef
    metrics: JsonDict
    cached: bool


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. `inputs` maps a name to the sha256 of that input's manifest."""

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
    schema_version: int = 1

    def as_json(self) -> JsonDict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: JsonDict) -> Manifest:
        files = [FileRecord(**record) for record in value["files"]]
        for record in files:
            if not is_key(record.name) or record.name.count("/") != 1:
                raise ValueError(f"the file name {record.name!r} leads elsewhere")
        return cls(**{**value, "files": files})

    def file(self, plain_name: str) -> FileRecord:
        """The record called `plain_name`; StoreError when the artifact has no such file."""
        for record in self.files:
            if record.plain_name == plain_name:
                return record
        raise StoreError(f"{self.run}/{self.phase}/{self.iteration:05d}/{self.stage} has no file {plain_name}")
