"""The words of /generate: requests in, answers out. No torch."""

from __future__ import annotations

import time
from asyncio import Event
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from rlpipe.types import JsonDict

STRICT = ConfigDict(extra="forbid", strict=True)
STOP_TOKEN_IDS_MAX = 32
SEED_MASK = (1 << 64) - 1
SEED_STEP = 0xD1342543DE82EF95  # odd, so that the n seeds of one request differ
VALUE_CHARS_MAX = 100
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}  # its answer lacks prompt_tokens and cached_tokens


class RequestRefused(ValueError):
    """A request that no engine could serve: answered with 400, in the shape that SGLang gives to a value out of bounds."""

    def body(self) -> JsonDict:
        return {"error": {"message": str(self)}}


class WrongType(RequestRefused):
    """A field of the wrong type, or one that nobody knows: SGLang has another shape for these."""

    def body(self) -> JsonDict:
        return {"error": str(self)}


class MalformedBody(RequestRefused):
    """A body that is no JSON, or not of the route's form: SGLang's third shape."""

    def body(self) -> JsonDict:
        return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": 400}


class Sampling(BaseModel):
    """How one completion is sampled; the field names are the protocol's."""

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
    def _check(self) -> Sampling:
        if self.top_k == 0:
            raise ValueError("top_k=0: give -1 for all tokens")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        return self


class GenerateBody(BaseModel):
    """What /generate takes, as a batch."""

    model_config = STRICT

    # the first wrong entry is enough: to describe a million of them takes seconds, and gigabytes
    input_ids: list[Annotated[list[int], Field(min_length=1, fail_fast=True)]] = Field(fail_fast=True)
    sampling_params: list[Sampling] = Field(fail_fast=True)
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    rid: str | Annotated[list[str], Field(fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_batch(cls, body: Any) -> Any:
        """A prompt alone becomes a batch of one; sampling_params that are given once are everybody's."""
        prompts = body.get("input_ids") if isinstance(body, dict) else None
        if not isinstance(prompts, list):
            return body
        prompts = prompts if prompts and isinstance(prompts[0], list) else [prompts]
        params = body.get("sampling_params", {})
        return {
            **body,
            "input_ids": prompts,
            "sampling_params": params if isinstance(params, list) else [params] * len(prompts),
        }

    @model_validator(mode="after")
    def _check(self) -> GenerateBody:
        if len(self.sampling_params) != len(self.input_ids):
            raise ValueError(f"sampling_params has {len(self.sampling_params)} entries for {len(self.input_ids)} input_ids")
        if isinstance(self.rid, list) and not len(self.rid) == len(set(self.rid)) == len(self.input_ids):
            raise ValueError("rid must be different strings, one per input_ids")
        return self


@dataclass(frozen=True)
class Limits:
    """What the served model can take. Example: Limits(vocab_size=320, context_tokens_max=512, eos_token_ids=(2,))."""

    vocab_size: int
    context_tokens_max: int
    eos_token_ids: tuple[int, ...]


@dataclass(eq=False)
class Job:
    """One completion in the making. `spans`: [weight version, number of tokens] in order of sampling."""

    rid: str
    call: Call
    prompt: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    seed: int
    score_from: int | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    cached_tokens: int | None = None
    finish_reason: JsonDict | None = None
    weight_version: str = ""
    arrival: int = 0

    @property
    def tokens_max(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(eq=False)
class Call:
    """One HTTP request: its jobs, answered together."""

    return_logprob: bool
    many: bool
    jobs: list[Job] = field(default_factory=list)
    started_at_s: float = field(default_factory=time.monotonic)
    num_finished: int = 0
    answered: Event = field(default_factory=Event)


def settle(jobs: list[Job]) -> None:
    """Counts finished jobs; wakes the calls that have all of theirs. On the event loop."""
    for job in jobs:
        job.call.num_finished += 1
        if job.call.num_finished == len(job.call.jobs):
            job.call.answered.set()


def parse_generate(body: Any, limits: Limits, new_id: str, new_seed: int) -> Call:
    """A checked request; RequestRefused with field and value otherwise. `new_id` and `new_seed` stand in for missing ones."""
    try:
        asked = GenerateBody.model_validate(body)
    except ValidationError as error:
        raise _kind_of(error)(first_fault(error)) from error
    batch = isinstance(body["input_ids"][0], list)
    call = Call(asked.return_logprob, batch or asked.sampling_params[0].n > 1)
    score_from = asked.logprob_start_len if asked.return_logprob and asked.logprob_start_len >= 0 else None
    name = asked.rid or new_id
    rids = name if isinstance(name, list) else [f"{name}_{index}" for index in range(len(asked.input_ids))] if batch else [name]
    for index, (prompt, sampling) in enumerate(zip(asked.input_ids, asked.sampling_params, strict=True)):
        _check_prompt(f"input_ids[{index}]", prompt, sampling, limits)
        if score_from is not None and score_from > len(prompt):
            raise RequestRefused(f"logprob_start_len={score_from}: input_ids[{index}] has {len(prompt)} tokens")
        stops = _stop_token_ids(sampling, limits)
        seed = sampling.sampling_seed if sampling.sampling_seed is not None else new_seed + index
        for copy in range(sampling.n):
            # as in SGLang, the completions of n > 1 have names that the caller does not know
            rid = rids[index] if sampling.n == 1 else f"{new_id}_{index}_{copy}"
            job_seed = (seed + copy * SEED_STEP) & SEED_MASK
            call.jobs.append(Job(rid, call, tuple(prompt), sampling, stops, job_seed, score_from))
    assert len({job.rid for job in call.jobs}) == len(call.jobs) > 0, "each completion has a name of its own"
    return call


def first_fault(error: ValidationError) -> str:
    """Field, value and what is wrong with it."""
    fault = error.errors()[0]
    field_name = ".".join(map(str, fault["loc"])) or "the body"
    return f"{field_name}={fault['input']!r:.{VALUE_CHARS_MAX}}: {fault['msg']}"


def _kind_of(error: ValidationError) -> type[RequestRefused]:
    fault = error.errors()[0]
    if fault["type"] == "model_type" or fault["loc"][:1] == ("rid",):
        return MalformedBody
    return WrongType if fault["type"].endswith(("_type", "extra_forbidden")) else RequestRefused


def _check_prompt(name: str, prompt: list[int], sampling: Sampling, limits: Limits) -> None:
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise RequestRefused(f"{name} holds token {max(prompt, key=abs)}, outside the vocabulary of {limits.vocab_size}")
    if len(prompt) + sampling.max_new_tokens > limits.context_tokens_max:
        raise RequestRefused(
            f"{name} has {len(prompt)} tokens, with max_new_tokens={sampling.max_new_tokens}"
            f" more than the context of {limits.context_tokens_max}"
        )


def _stop_token_ids(sampling: Sampling, limits: Limits) -> tuple[int, ...]:
    # as in SGLang, ignore_eos ignores stop_token_ids too
    merged = dict.fromkeys(() if sampling.ignore_eos else (*sampling.stop_token_ids, *limits.eos_token_ids))
    if len(merged) > STOP_TOKEN_IDS_MAX:
        raise RequestRefused(f"{len(merged)} stop tokens: at most {STOP_TOKEN_IDS_MAX} are supported")
    return tuple(token for token in merged if token < limits.vocab_size)


def answer(call: Call) -> JsonDict | list[JsonDict]:
    """What /generate answers: one object, or a list for a batch or n > 1."""
    answers = [_answer_one(job) for job in call.jobs]
    return answers if call.many else answers[0]


def _answer_one(job: Job) -> JsonDict:
    assert job.finish_reason is not None, f"{job.rid} is not finished"
    assert len(job.tokens) == len(job.logprobs) <= job.sampling.max_new_tokens, f"{job.rid}: tokens and logprobs differ"
    meta: JsonDict = {
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
    return {"output_ids": job.tokens, "meta_info": meta}


def _weight_versions(job: Job) -> list[JsonDict]:
    """Which tokens were sampled under which weight version, in order; an empty span when there are none."""
    versions: list[JsonDict] = []
    end = 0
    for version, count in job.spans or [[job.weight_version, 0]]:
        versions.append({"version": version, "start": end, "end": end + count})
        end += count
    assert end == len(job.tokens), f"{job.rid}: spans and tokens differ"
    return versions


def _input_logprobs(job: Job) -> list[list[Any]]:
    """Triples from logprob_start_len on; the first has no logprob, as in SGLang."""
    if job.score_from is None or job.input_logprobs is None:
        return []
    tokens = job.prompt[job.score_from :]
    assert len(job.input_logprobs) == max(0, len(tokens) - 1), f"{job.rid}: scored the wrong number of tokens"
    return [[value, token, None] for value, token in zip([None, *job.input_logprobs], tokens, strict=False)]
