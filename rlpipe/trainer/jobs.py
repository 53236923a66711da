"""The jobs of the trainer, and their results. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.values import JsonDict
from rlpipe.config.training import RlConfig, SftConfig
from rlpipe.records.sending import Offer
from rlpipe.store.adapter_files import Adapter
from rlpipe.store.artifacts import Blocks
from rlpipe.store.nearby import NodeDisk

STATUS_OK = 200
STATUS_LOST = 503
STATUS_STORE = 502  # the store could not be reached
VALUE_CHARS_MAX = 200
RECEIVERS_MAX = 1 << 16
ATTEMPT = re.compile("[0-9a-z]{1,32}")

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


@dataclass(frozen=True)
class LoadJob:
    """Loads a position, from one of: a new model, a policy (its weights, with a fresh optimizer), a
    state (weights and optimizer).

    `adapter`: the adapter to add to a policy without one, and to train alone; a stored adapter
    needs none.
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


@dataclass(frozen=True)
class SaveJob:
    """Publishes the resident `position` and begins the upload: the policy, the state, the gaps of
    the iteration that led to it, each only if the job names a folder for it.
    """

    position: str
    policy_folder: str | None
    state_folder: str | None
    attempt: str
    tokenizer: Reference | None
    stop_token_ids: list[int]  # the tokens that end a turn of the assistant
    context_tokens_max: int  # the length of the longest text that an engine takes
    base: Reference | None = None  # the policy is stored as its delta to this one; None: whole
    # the next policy will be stored as its delta to this one: its files are kept on this node
    is_base: bool = False
    gap_folder: str | None = None


@dataclass(frozen=True)
class TrainJob:
    """Takes optimizer steps on `data`, from the position `start` to `result`.

    `first_step`: the global index of the first of them.
    """

    start: str
    result: str
    data: Reference
    first_step: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class RlJob(TrainJob):
    """The steps of one RL iteration. `reference`: the policy of the KL term; `teacher_logprobs`:
    those of the batch, where a teacher is distilled.
    """

    kind: Literal["rl"]
    settings: RlConfig
    reference: Reference | None
    teacher_logprobs: Reference | None = None

    def __post_init__(self) -> None:
        if self.settings.kl != "none" and self.reference is None:
            raise ValueError(f"settings.kl={self.settings.kl} needs a reference policy")


@dataclass(frozen=True)
class SftJob(TrainJob):
    """The steps of one segment of SFT, `settings.num_steps` of them.

    `seed`: determines the order of the conversations.
    """

    kind: Literal["sft"]
    settings: SftConfig
    seed: int


@dataclass(frozen=True)
class TeacherJob:
    """Computes the logprobs that a frozen teacher gives to the trained tokens of a batch, and
    writes them as files of an attempt; with `top_k` also its most probable tokens at each. Needs no
    position, and changes none.

    `of_set`: the index of the teacher of each data set; of one teacher it is not read.
    """

    data: Reference
    teachers: Annotated[list[Reference], Field(min_length=1)]
    temperature: float
    folder: str
    attempt: str
    top_k: int = 0
    of_set: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OffloadJob:
    """Moves what is resident off the device, until the next job of another kind."""

    kind: Literal["offload"] = "offload"


@dataclass(frozen=True)
class OfferJob:
    """Asks for the tensors that a `SendJob` of the policy at `position` will send to this group,
    and for the address at which the group meets.
    """

    position: str
    group: Annotated[str, Field(pattern=f"^{ATTEMPT.pattern}$")]


@dataclass(frozen=True)
class SendJob:
    """Sends the policy at `position`, which was offered to this group, to its receivers (ranks 1,
    2, ... of the group).
    """

    position: str
    group: Annotated[str, Field(pattern=f"^{ATTEMPT.pattern}$")]
    receivers: Annotated[int, Field(ge=1, le=RECEIVERS_MAX)]
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True)
class UploadWait:
    """Asks for the end of the upload of a save. No job: it is answered beside the job that runs."""

    attempt: Annotated[str, Field(pattern=f"^{ATTEMPT.pattern}$")]


AnyJob = LoadJob | RlJob | SftJob | SaveJob | TeacherJob | OfferJob | SendJob | OffloadJob
Unplaced = TeacherJob | OffloadJob  # jobs that need no position, and change none
AtPosition = SaveJob | OfferJob | SendJob  # jobs that need a position, and do not change it
ANY_JOB: TypeAdapter[AnyJob] = TypeAdapter(AnyJob)
JOBS: dict[str, TypeAdapter[Any]] = {
    "load": TypeAdapter(LoadJob),
    "train": TypeAdapter(Annotated[RlJob | SftJob, Field(discriminator="kind")]),
    "save": TypeAdapter(SaveJob),
    "teacher": TypeAdapter(TeacherJob),
    "offer": TypeAdapter(OfferJob),
    "send": TypeAdapter(SendJob),
    "offload": TypeAdapter(OffloadJob),
    "upload": TypeAdapter(UploadWait),
}


def job_of(kind: str, body: bytes) -> Any:
    """Parses the job of a request. UserError naming the field when the body is not JSON with
    exactly the job's fields.
    """
    try:
        return JOBS[kind].validate_json(body, extra="forbid")
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = ".".join(map(str, fault["loc"])) or "the body"
        raise UserError(
            f"{kind}: {name}={fault['input']!r:.{VALUE_CHARS_MAX}}: {fault['msg']:.{VALUE_CHARS_MAX}}"
        ) from error


def check_place(job: AnyJob, run: str) -> None:
    """Raises UserError for a job that writes into a folder which is not one of the run for this
    kind of artifact.
    """
    assert run, "a trainer belongs to a run"
    if isinstance(job, SaveJob):
        written = [("policy", job.policy_folder), ("state", job.state_folder), ("gap", job.gap_folder)]
    elif isinstance(job, TeacherJob):
        written = [("teacher_logprobs", job.folder)]
    else:
        return
    verb = "save" if isinstance(job, SaveJob) else "teacher"
    for kind, folder in written:
        if folder is not None and not re.fullmatch(rf"runs/{re.escape(run)}/(base|(sft|rl)/\d{{5,}})/{kind}", folder):
            raise UserError(
                f"{verb}: {kind}_folder={folder!r:.{VALUE_CHARS_MAX}}: a {kind} of run {run} has another folder"
            )
    if not ATTEMPT.fullmatch(job.attempt):
        raise UserError(f"{verb}: attempt={job.attempt!r:.{VALUE_CHARS_MAX}}: letters and digits name an attempt")


SAVED = ("policy", "state", "gap")  # what a save may publish, as JobResult names it


@dataclass(frozen=True)
class JobResult:
    """The result of a job. A TrainJob sets `metrics`, a load `differs`, an offer `offer`, a send
    `sent`, a TeacherJob `metrics` and `teacher`, a save the other fields, and for a policy also
    `metrics`.

    `warnings`: texts for the user about the job, which the flow logs, too: the trainer's own log
    may be on another machine.
    """

    metrics: JsonDict = field(default_factory=dict)  # for the policy's manifest
    # the differences between these trainer processes and those that saved the state
    differs: str = ""
    policy: list[FileRecord] = field(default_factory=list)
    state: list[FileRecord] = field(default_factory=list)
    gap: list[FileRecord] = field(default_factory=list)
    teacher: list[FileRecord] = field(default_factory=list)
    # the tokens, and the logprobs of the last ones
    probe: dict[str, Sequence[int | float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    offer: Offer | None = None
    # the files of weights that the sent policy would be saved in, by their plain names
    sent: list[FileRecord] = field(default_factory=list)
    # the folder and URL of each node with the files of a save, the first node first
    places: list[NodeDisk] = field(default_factory=list)
    # the index of the node that has a file, by file name; the first node has all other files
    made_on: dict[str, int] = field(default_factory=dict)
    # the sha256 of each part of the policy's large files, by file name
    parts: dict[str, Blocks] = field(default_factory=dict)


RESULT: TypeAdapter[JobResult] = TypeAdapter(JobResult)
JobAnswer = dict[str, Any]  # the JSON of a JobResult, as the trainer answers
