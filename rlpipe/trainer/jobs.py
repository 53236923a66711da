"""The jobs of a gang, and what they come to. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.values import JsonDict
from rlpipe.config.training import RlConfig, SftConfig
from rlpipe.records.sending import Offer
from rlpipe.store.adapter_files import Adapter
from rlpipe.store.nearby import NodeDisk

STATUS_OK = 200
STATUS_LOST = 503
STATUS_STORE = 502  # the store could not be reached
VALUE_CHARS_MAX = 200
RECEIVERS_MAX = 1 << 16
ATTEMPT = re.compile("[0-9a-z]{1,32}")
EXACT = ConfigDict(extra="forbid")

Reference = Annotated[ArtifactRef, BeforeValidator(ArtifactRef.from_json)]


@dataclass(frozen=True)
class NewModel:
    """A model to initialise. Example: NewModel({"model_type": "qwen3", ...}, seed=0)."""

    config: JsonDict
    seed: int


@dataclass(frozen=True)
class NewAdapter:
    """An adapter to initialise. Example: NewAdapter(Adapter(8, 16.0), seed=0)"""

    settings: Adapter
    seed: int


@with_config(EXACT)
@dataclass(frozen=True)
class LoadJob:
    """Makes a position resident, from one of: a new model, a policy (weights, fresh optimizer), a
    state (everything).

    `adapter`: what a whole policy gets, to train only that; a stored one that is an adapter has its
    own.
    """

    position: str
    new: NewModel | None
    policy: Reference | None
    state: Reference | None
    adapter: NewAdapter | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("new", "policy", "state") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"load needs exactly one of new, policy and state, got {given}")
        if self.adapter is not None and self.policy is None:
            raise ValueError("a new adapter is beside a policy")


@with_config(EXACT)
@dataclass(frozen=True)
class SaveJob:
    """Publishes what is resident at `position`, and begins to upload it: the policy, the state, the
    gaps of the iteration that led there, each where there is a folder for it.
    """

    position: str
    policy_folder: str | None
    state_folder: str | None
    attempt: str
    tokenizer: Reference | None
    stop_token_ids: list[int]  # what ends a turn of the assistant
    context_tokens_max: int  # the longest text that an engine takes
    base: Reference | None = None  # the policy is stored as its difference to this one; none: whole
    # the next policy will be stored as its difference to this one: its files stay on this node
    is_base: bool = False
    gap_folder: str | None = None


@dataclass(frozen=True)
class TrainJob:
    """Optimizer steps on `data`, from the position `start` to `result`.

    `first_step`: global index of the first of them.
    """

    start: str
    result: str
    data: Reference
    first_step: Annotated[int, Field(ge=0)]


@with_config(EXACT)
@dataclass(frozen=True)
class RlJob(TrainJob):
    """One RL iteration. `reference`: the policy of the KL term."""

    kind: Literal["rl"]
    settings: RlConfig
    reference: Reference | None

    def __post_init__(self) -> None:
        if self.settings.kl != "none" and self.reference is None:
            raise ValueError(f"settings.kl={self.settings.kl} needs a reference policy")


@with_config(EXACT)
@dataclass(frozen=True)
class SftJob(TrainJob):
    """A segment of SFT, of `settings.num_steps` steps.

    `seed`: of the order of the conversations.
    """

    kind: Literal["sft"]
    settings: SftConfig
    seed: int


@with_config(EXACT)
@dataclass(frozen=True)
class OffloadJob:
    """Moves what is resident off the device, until the next job that does something."""

    kind: Literal["offload"] = "offload"


@with_config(EXACT)
@dataclass(frozen=True)
class OfferJob:
    """Says what a `SendJob` of the policy at `position` will send to the group of that name, and
    where the group meets.
    """

    position: str
    group: Annotated[str, Field(pattern=f"^{ATTEMPT.pattern}$")]


@with_config(EXACT)
@dataclass(frozen=True)
class SendJob:
    """Sends the policy at `position`, which was offered to the same group, to its receivers: ranks
    from 1 on.
    """

    position: str
    group: Annotated[str, Field(pattern=f"^{ATTEMPT.pattern}$")]
    receivers: Annotated[int, Field(ge=1, le=RECEIVERS_MAX)]
    backend: Literal["gloo", "nccl"]


GangJob = LoadJob | RlJob | SftJob | SaveJob | OfferJob | SendJob | OffloadJob
AtPosition = SaveJob | OfferJob | SendJob  # what asks for a position, and leaves it there
ANY_JOB: TypeAdapter[GangJob] = TypeAdapter(GangJob)
JOBS: dict[str, TypeAdapter[Any]] = {
    "load": TypeAdapter(LoadJob),
    "train": TypeAdapter(Annotated[RlJob | SftJob, Field(discriminator="kind")]),
    "save": TypeAdapter(SaveJob),
    "offer": TypeAdapter(OfferJob),
    "send": TypeAdapter(SendJob),
    "offload": TypeAdapter(OffloadJob),
}


class _Attempt(TypedDict):
    attempt: Annotated[str, Field(pattern=f"^{ATTEMPT.pattern}$")]


_ATTEMPT = TypeAdapter(_Attempt)


def job_of(kind: str, body: bytes) -> GangJob:
    """The job of a request; UserError naming the field when the body is not JSON of exactly its
    fields.
    """
    try:
        return JOBS[kind].validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = ".".join(map(str, fault["loc"])) or "the body"
        raise UserError(
            f"{kind}: {name}={fault['input']!r:.{VALUE_CHARS_MAX}}: {fault['msg']:.{VALUE_CHARS_MAX}}"
        ) from error


def attempt_of(body: bytes) -> str:
    """The attempt whose upload is waited for; UserError when the body is not {"attempt": NAME}."""
    try:
        return _ATTEMPT.validate_json(body)["attempt"]
    except ValidationError as error:
        raise UserError(f"upload: {error.errors(include_url=False)[0]['msg']:.{VALUE_CHARS_MAX}}") from error


def check_place(job: GangJob, run: str) -> None:
    """UserError for a save that would write elsewhere than into a folder of the run for what it
    saves.
    """
    assert run, "a gang is of a run"
    if not isinstance(job, SaveJob):
        return
    for kind, folder in (("policy", job.policy_folder), ("state", job.state_folder), ("gap", job.gap_folder)):
        if folder is not None and not re.fullmatch(rf"runs/{re.escape(run)}/(base|(sft|rl)/\d{{5,}})/{kind}", folder):
            raise UserError(
                f"save: {kind}_folder={folder!r:.{VALUE_CHARS_MAX}}: a {kind} of run {run} has another folder"
            )
    if not ATTEMPT.fullmatch(job.attempt):
        raise UserError(f"save: attempt={job.attempt!r:.{VALUE_CHARS_MAX}}: letters and digits name an attempt")


class FileFields(TypedDict):
    """The fields of a FileRecord."""

    name: str
    bytes: int
    sha256: str


class PlaceFields(TypedDict):
    """The fields of a NodeDisk."""

    disk: str
    url: str


class JobAnswer(TypedDict):
    """A JobResult as JSON, but for what is sent to engines."""

    metrics: dict[str, Any]
    differs: str
    policy: list[FileFields]
    state: list[FileFields]
    gap: list[FileFields]
    probe: dict[str, Sequence[float]]
    warnings: list[str]
    places: list[PlaceFields]
    made_on: dict[str, int]


@dataclass(frozen=True)
class JobResult:
    """The result of a job. A training has `metrics`, a load `differs`, an offer `offer`, a send
    `sent`, a save the rest, and for a policy `metrics` too.

    `warnings`: what a user should know of how the job was done; the log of the trainer processes is
    on another machine, or nobody looks there.
    """

    metrics: JsonDict = field(default_factory=dict)  # as the manifest of the policy will have them
    differs: str = ""  # in what this gang is another than the one that saved the state
    policy: list[FileRecord] = field(default_factory=list)
    state: list[FileRecord] = field(default_factory=list)
    gap: list[FileRecord] = field(default_factory=list)
    probe: dict[str, Sequence[float]] = field(default_factory=dict)  # tokens, and the logprobs of the last of them
    warnings: list[str] = field(default_factory=list)
    offer: Offer | None = None
    # the files of weights that hold what was sent, under their plain names
    sent: list[FileRecord] = field(default_factory=list)
    # where the gang's nodes have a save's files, the first node first
    places: list[NodeDisk] = field(default_factory=list)
    # which of them has a file, by its name; the first has those that are not named
    made_on: dict[str, int] = field(default_factory=dict)
