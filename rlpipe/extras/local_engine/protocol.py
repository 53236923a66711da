"""The messages of /generate: requests in, answers out. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

STRICT = ConfigDict(extra="forbid", strict=True)
STOP_TOKEN_IDS_MAX = 32
SEED_MASK = (1 << 64) - 1
SEED_STEP = 0xD1342543DE82EF95  # odd, so that the n seeds of one request differ
VALUE_CHARS_MAX = 100
Form = TypeVar("Form", bound=BaseModel)
FinishReason = dict[str, str | int | None]  # of SGLang: "type" says which other keys there are
ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
# its answer lacks prompt_tokens and cached_tokens
ABORTED_WAITING: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


class BadRequest(ValueError):
    """Raised for a request that is answered with 400.

    SGLang answers in three forms: for a value out of bounds; for a field of the wrong type or with
    an unknown name; for a body that is no JSON or not of the route's form.
    """

    def __init__(self, message: str, fault: Literal["value", "type", "body"] = "value") -> None:
        super().__init__(message)
        self.fault = fault

    def as_json(self) -> dict[str, object]:
        if self.fault == "body":
            return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": 400}
        return {"error": str(self) if self.fault == "type" else {"message": str(self)}}


class SamplingBody(BaseModel):
    """The sampling parameters of one completion; the field names are the protocol's."""

    model_config = STRICT

    max_new_tokens: NonNegativeInt = 128
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, le=2**31 - 1)
    stop_token_ids: list[NonNegativeInt] = Field(default=[], fail_fast=True)
    sampling_seed: int | None = None
    n: int = Field(default=1, ge=1, le=4096)
    ignore_eos: bool = False
    min_new_tokens: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> SamplingBody:
        if self.top_k == 0:
            raise ValueError("top_k=0: give -1 for all tokens")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        return self


class GenerateBody(BaseModel):
    """The body of /generate, as a batch."""

    model_config = STRICT

    # the first wrong entry is enough: to describe a million of them takes seconds, and gigabytes
    input_ids: list[Annotated[list[int], Field(min_length=1, fail_fast=True)]] = Field(fail_fast=True)
    sampling_params: list[SamplingBody] = Field(fail_fast=True)
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    top_logprobs_num: NonNegativeInt = 0  # of input tokens; at most the vocabulary
    stream: bool = False
    rid: str | Annotated[list[str], Field(fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_batch(cls, body: Any) -> Any:
        """Turns a single prompt into a batch of one; sampling_params that are given once hold for
        all prompts.
        """
        prompts = body.get("input_ids") if isinstance(body, dict) else None
        if not isinstance(prompts, list):
            return body
        prompts = prompts if prompts and isinstance(prompts[0], list) else [prompts]
        params = body.get("sampling_params", {})
        params = params if isinstance(params, list) else [params] * len(prompts)
        return {**body, "input_ids": prompts, "sampling_params": params}

    @model_validator(mode="after")
    def _check(self) -> GenerateBody:
        if len(self.sampling_params) != len(self.input_ids):
            raise ValueError(
                f"sampling_params has {len(self.sampling_params)} entries for {len(self.input_ids)} input_ids"
            )
        if self.top_logprobs_num and any(sampling.max_new_tokens for sampling in self.sampling_params):
            raise ValueError(f"top_logprobs_num={self.top_logprobs_num}: of input tokens only: set max_new_tokens=0")
        if isinstance(self.rid, list) and not len(self.rid) == len(set(self.rid)) == len(self.input_ids):
            raise ValueError("rid must be different strings, one per input_ids")
        return self


class PauseBody(BaseModel):
    """The body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(BaseModel):
    """The body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


class UpdateBody(BaseModel):
    """The body of /update_weights_from_disk. The cache is always flushed, whatever `flush_cache`
    says: it belongs to the old weights.
    """

    model_path: str
    weight_version: str | None = None


class CheckBody(BaseModel):
    """The body of /weights_checker."""

    action: str = "checksum"


@dataclass(frozen=True)
class ModelLimits:
    """The limits of the served model.

    Example: ModelLimits(vocab_size=320, context_tokens_max=512, eos_token_ids=(2,)).
    """

    vocab_size: int
    context_tokens_max: int
    eos_token_ids: tuple[int, ...]


@dataclass(eq=False)
class SamplingJob:
    """One completion in progress.

    `versions`: the weight version under which each token was sampled.
    """

    rid: str
    call: Call
    prompt: tuple[int, ...]
    sampling: SamplingBody
    stop_token_ids: tuple[int, ...]
    seed: int
    score_from: int | None
    top_k: int = 0  # most probable tokens at each scored one
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    weight_version: str = ""
    arrival: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens after which the job's next token is sampled."""
        return (*self.prompt, *self.tokens)

    def reason_to_finish(self) -> FinishReason | None:
        """The finish reason of a job that is complete; None when it goes on."""
        last = self.tokens[-1] if self.tokens else None
        if last not in self.stop_token_ids and len(self.tokens) < self.sampling.max_new_tokens:
            return None
        if not all(map(math.isfinite, self.logprobs)):
            return {"type": "abort", "message": "the model's logits are not finite", "status_code": 500}
        if last in self.stop_token_ids:
            return {"type": "stop", "matched": last}
        return {"type": "length", "length": len(self.tokens)}


@dataclass(eq=False)
class Call:
    """One HTTP request: its jobs, answered together or each in a stream.

    `on_finish`: called with each job that ends.
    """

    return_logprob: bool
    many: bool
    stream: bool = False
    on_finish: Callable[[], object] = lambda: None
    jobs: list[SamplingJob] = field(default_factory=list)
    started_at_s: float = field(default_factory=time.monotonic)
    num_finished: int = 0
    answered: Future[None] = field(default_factory=Future)


def parse_body(form: type[Form], body: Any) -> Form:
    """A body in its route's form; BadRequest with field, value and fault otherwise."""
    try:
        return form.model_validate(body)
    except ValidationError as error:
        fault = error.errors()[0]
        field_name = ".".join(map(str, fault["loc"])) or "the body"
        message = f"{field_name}={fault['input']!r:.{VALUE_CHARS_MAX}}: {fault['msg']}"
        if form is not GenerateBody or fault["type"] == "model_type" or fault["loc"][:1] == ("rid",):
            raise BadRequest(message, "body") from error
        wrong_type = fault["type"].endswith(("_type", "extra_forbidden"))
        raise BadRequest(message, "type" if wrong_type else "value") from error


def parse_generate(body: Any, limits: ModelLimits, new_id: str, new_seed: int) -> Call:
    """A checked request; BadRequest with field and value otherwise.

    `new_id` and `new_seed` are used where the request has none.
    """
    request = parse_body(GenerateBody, body)
    batch = isinstance(body["input_ids"][0], list)
    call = Call(request.return_logprob, batch or request.sampling_params[0].n > 1, request.stream)
    score_from = request.logprob_start_len if request.return_logprob and request.logprob_start_len >= 0 else None
    rids = request.rid or new_id
    if isinstance(rids, str):
        rids = [f"{rids}_{index}" for index in range(len(request.input_ids))] if batch else [rids]
    for index, (prompt, sampling) in enumerate(zip(request.input_ids, request.sampling_params, strict=True)):
        _check_prompt(f"input_ids[{index}]", prompt, sampling, limits)
        if score_from is not None and score_from > len(prompt):
            raise BadRequest(f"logprob_start_len={score_from}: input_ids[{index}] has {len(prompt)} tokens")
        stops = _stop_token_ids(sampling, limits)
        seed = sampling.sampling_seed if sampling.sampling_seed is not None else new_seed + index
        for copy in range(sampling.n):
            # as in SGLang, the completions of n > 1 have names that the caller does not know
            rid = rids[index] if sampling.n == 1 else f"{new_id}_{index}_{copy}"
            job_seed = (seed + copy * SEED_STEP) & SEED_MASK
            top_k = request.top_logprobs_num
            call.jobs.append(SamplingJob(rid, call, tuple(prompt), sampling, stops, job_seed, score_from, top_k))
    assert len({job.rid for job in call.jobs}) == len(call.jobs) > 0, "each completion has a name of its own"
    return call


def _check_prompt(name: str, prompt: list[int], sampling: SamplingBody, limits: ModelLimits) -> None:
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise BadRequest(f"{name} holds token {max(prompt, key=abs)}, outside the vocabulary of {limits.vocab_size}")
    if len(prompt) + sampling.max_new_tokens > limits.context_tokens_max:
        raise BadRequest(
            f"{name} has {len(prompt)} tokens, with max_new_tokens={sampling.max_new_tokens}"
            f" more than the context of {limits.context_tokens_max}"
        )


def _stop_token_ids(sampling: SamplingBody, limits: ModelLimits) -> tuple[int, ...]:
    # as in SGLang, ignore_eos ignores stop_token_ids too
    merged = dict.fromkeys(() if sampling.ignore_eos else (*sampling.stop_token_ids, *limits.eos_token_ids))
    if len(merged) > STOP_TOKEN_IDS_MAX:
        raise BadRequest(f"{len(merged)} stop tokens: at most {STOP_TOKEN_IDS_MAX} are supported")
    return tuple(token for token in merged if token < limits.vocab_size)


def answer(call: Call) -> object:
    """The JSON answer of /generate: one object, or a list for a batch or n > 1."""
    answers = [{"output_ids": job.tokens, "meta_info": _meta_info(job)} for job in call.jobs]
    return answers if call.many else answers[0]


def news(call: Call, num_said: dict[SamplingJob, int]) -> Iterator[dict[str, Any]]:
    """Yields the new tokens of each job, as SGLang does with --incremental-streaming-output.
    `num_said`: the number of tokens sent before, per job, updated here; -1 when all are sent.
    """
    for index, job in enumerate(call.jobs):
        # the scheduler goes on meanwhile: the reason is set last of all, a
        # version after its token and logprob
        reason, start, end = job.finish_reason, num_said.get(job, 0), len(job.versions)
        if start >= 0 and (reason is not None or end > start):
            meta = (
                _meta_info(job)
                if reason
                else {"id": job.rid, "finish_reason": None, "weight_version": job.versions[-1]}
            )
            if call.return_logprob:
                pairs = zip(job.logprobs[start:end], job.tokens[start:end], strict=True)
                meta["output_token_logprobs"] = [[*pair, None] for pair in pairs]
            num_said[job] = end if reason is None else -1
            yield {"output_ids": job.tokens[start:end], "meta_info": meta} | ({"index": index} if call.many else {})


def _meta_info(job: SamplingJob) -> dict[str, object]:
    assert job.finish_reason is not None, f"{job.rid} is not finished"
    assert len(job.tokens) == len(job.logprobs) <= job.sampling.max_new_tokens, f"{job.rid}: tokens and logprobs differ"
    meta: dict[str, object] = {
        "id": job.rid,
        "finish_reason": job.finish_reason,
        "completion_tokens": len(job.tokens),
        "weight_version": job.weight_version,
        "weight_versions": _weight_versions(job),
        "e2e_latency": time.monotonic() - job.call.started_at_s,
    }
    if job.finish_reason != ABORTED_WAITING:
        meta |= {"prompt_tokens": len(job.prompt), "cached_tokens": job.cached_tokens or 0}
    if job.call.return_logprob:
        meta["output_token_logprobs"] = [[*pair, None] for pair in zip(job.logprobs, job.tokens, strict=True)]
        meta["input_token_logprobs"] = _input_logprobs(job)
        if job.top_k:
            meta["input_top_logprobs"] = [None, *([[*pair, None] for pair in top] for top in job.input_top)]
    return meta


def _weight_versions(job: SamplingJob) -> list[dict[str, str | int]]:
    """The spans of tokens sampled under one weight version each, in order; one empty span when
    there are no tokens."""
    spans, end = [], 0
    for version, tokens in groupby(job.versions):
        start, end = end, end + len(list(tokens))
        spans.append({"version": version, "start": start, "end": end})
    assert end == len(job.tokens), f"{job.rid}: spans and tokens differ"
    return spans or [{"version": job.weight_version, "start": 0, "end": 0}]


def _input_logprobs(job: SamplingJob) -> list[list[Any]]:
    """Triples from logprob_start_len on; the first has no logprob, as in SGLang."""
    if job.score_from is None or job.input_logprobs is None:
        return []
    tokens = job.prompt[job.score_from :]
    assert len(job.input_logprobs) == max(0, len(tokens) - 1), f"{job.rid}: scored the wrong number of tokens"
    return [[value, token, None] for value, token in zip([None, *job.input_logprobs], tokens, strict=False)]
