"""The records that cross borders between parts, the errors a user may see, hashes and seeds. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rlpipe.printable import printable

JsonDict = dict[str, Any]
Metrics = dict[str, float]
SHA256 = re.compile("[0-9a-f]{64}")
ROUND_DIGITS_MAX = 4


class _Said:
    """An error whose message people read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class UserError(_Said, ValueError):
    """Bad input: the message names the field, file or row, its value and the fix. Exit code 2."""


class StoreError(_Said, RuntimeError):
    """The store refuses or contradicts itself (wrong hash, missing file, no access); the message names the file."""


class EngineError(_Said, RuntimeError):
    """No engine could answer within its bounds."""


class TrainerError(_Said, RuntimeError):
    """The trainer gang could not do its job within its bounds."""


class RunWaits(_Said, Exception):
    """The run was given back and goes on later: no failure."""


class StepRefused(TrainerError):
    """A step that would spoil the policy: not finite, or trained on what another policy sampled. Nothing was committed."""


def moment_of(text: str, document: str) -> datetime:
    """A time that a document has; StoreError when it is none."""
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise StoreError(f"{document} has the time {text!r:.80}, which is none") from error


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value, which may hold records: what hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dataclasses.asdict).encode()


def plain_json(value: Any) -> Any:
    """`value` as strict JSON: keys are strings, tuples and sets are lists, NaN and infinities null, anything else its text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain_json(entry) for entry in value), key=repr)
    return str(value)


def json_object(text: bytes | bytearray) -> JsonDict | None:
    """The object that is written there, by whomever; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: a great many brackets
        return None
    return value if isinstance(value, dict) else None


def expanded(path: str) -> Path:
    """A path, `~` and `~USER` in it as the shell has them. UserError where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{path!r:.200}: there is no home folder of {path.split('/', 1)[0][:80]!r}; write the whole path"
        ) from error


def sha256_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


# Numbers made of names: the same on any machine and after any crash. They are in the bits of every run: a change of one of
# them makes other runs of the same config.


def first_bits(text: str, num_bits: int) -> int:
    """The first bits of the sha256 of a text, as a whole number."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") >> (256 - num_bits)


def fraction(text: str) -> float:
    """A number in [0, 1)."""
    return first_bits(text, 48) / 2**48


def uniform(*names: str | int) -> float:
    """A number in [0, 1), as if drawn."""
    return fraction(canonical_json(names).decode())


def data_seed(seed: int, name: str) -> int:
    """The seed of one data set. Generators use seed + index, so neighbouring seeds would share nearly all items."""
    return first_bits(canonical_json([seed, name]).decode(), 28)


def rollout_seed(*names: str | int) -> int:
    """A seed of 31 bits: of the run's seed, iteration, round, prompt id and rollout index."""
    return first_bits(json.dumps(names), 32) & 0x7FFFFFFF


def size_text(num_bytes: float) -> str:
    """Bytes as a person reads them. Example: 1.61 GB."""
    return f"{num_bytes / 10**9:,.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 10**6:,.1f} MB"


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

    def as_json(self) -> dict[str, str]:
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
    schema_version: Literal[1] = 1  # of another, the document is refused
    lease: int | None = None  # the number of the lease under which it was made; older documents have none

    def file(self, plain_name: str) -> FileRecord:
        """The record called `plain_name`; StoreError when the artifact has no such file."""
        for record in self.files:
            if record.plain_name == plain_name:
                return record
        raise StoreError(f"{self.run}/{self.phase}/{self.iteration:05d}/{self.stage} has no file {plain_name}")


@dataclass(frozen=True)
class BestReward:
    """The best mean reward of a run so far, and the iteration that had it."""

    iteration: int
    reward: float


@dataclass(frozen=True)
class IterationRecord:
    """What `iteration.json` says: the commit of a whole RL iteration."""

    run: str
    iteration: int
    weight_version: int  # of the policy that it made
    artifacts: dict[str, ArtifactRef]  # prompts (of the last round), batch, policy; state and evaluation when there is one
    state_iteration: int  # that of the newest training state; -1: none
    metrics: dict[str, float | int]
    curve: list[list[float | int]]  # [iteration, mean reward] so far, thinned
    best: BestReward
    ended_at: str
    schema_version: Literal[1] = 1  # of another, the document is refused
    lease: int | None = None  # as that of a manifest

    def artifact(self, name: str) -> ArtifactRef:
        """What it names so; StoreError when it names none."""
        if name not in self.artifacts:
            raise StoreError(f"the record of iteration {self.iteration} of run {self.run} names no {name}")
        return self.artifacts[name]

    @property
    def last_round(self) -> int:
        """The number of the last sampling round; StoreError when its folder has none."""
        number = self.artifact("prompts").folder.rpartition("round-")[2]
        if not number.isdecimal() or len(number) > ROUND_DIGITS_MAX:
            raise StoreError(f"the record of iteration {self.iteration} of run {self.run} names no round of prompts")
        return int(number)

    @property
    def evaluation(self) -> Metrics:
        """The metrics of the evaluation of the policy that it made, by their names there; empty where none was due."""
        prefix = "evaluation/"
        return {name.removeprefix(prefix): value for name, value in self.metrics.items() if name.startswith(prefix)}
