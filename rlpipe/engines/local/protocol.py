"""The words of /generate: requests in, answers out. No torch."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from rlpipe.types import JsonDict

STOP_TOKEN_IDS_MAX = 32
SEED_MASK = (1 << 64) - 1
SEED_STEP = 0xD1342543DE82EF95  # odd, so that the n seeds of one request differ
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}  # its answer lacks prompt_tokens and cached_tokens
BODY_FIELDS = frozenset({"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "rid"})


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


@dataclass(frozen=True)
class Sampling:
    """How one completion is sampled; the field names are the protocol's."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    min_new_tokens: int = 0


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


def parse_generate(body: Any, limits: Limits, new_id: str, new_seed: int) -> Call:
    """A checked request; RequestRefused with field and value otherwise. `new_id` and `new_seed` stand in for missing ones."""
    if not isinstance(body, dict):
        raise MalformedBody("the body must be a JSON object")
    unknown = sorted(key for key, value in body.items() if key not in BODY_FIELDS and value not in (None, False))
    if unknown:
        raise RequestRefused(f"unsupported fields {unknown}: this engine knows {sorted(BODY_FIELDS)}")
    prompts, many = _prompts(body.get("input_ids"), limits)
    samplings = _per_prompt("sampling_params", body.get("sampling_params") or {}, len(prompts))
    checked = {id(value): _sampling(value, limits) for value in samplings}  # a shared dict is checked once
    score_from = _score_from(body)
    call = Call(bool(body.get("return_logprob")), many)
    rids = _rids(body.get("rid"), new_id, len(prompts), many)
    for index, (prompt, value, rid) in enumerate(zip(prompts, samplings, rids, strict=True)):
        sampling, stops = checked[id(value)]
        if len(prompt) + sampling.max_new_tokens > limits.context_tokens_max:
            raise RequestRefused(
                f"input_ids[{index}] has {len(prompt)} tokens, with max_new_tokens={sampling.max_new_tokens}"
                f" more than the context of {limits.context_tokens_max}"
            )
        seed = sampling.sampling_seed if sampling.sampling_seed is not None else new_seed + index
        if score_from is not None and score_from > len(prompt):
            raise RequestRefused(f"logprob_start_len={score_from}: input_ids[{index}] has {len(prompt)} tokens")
        for copy in range(sampling.n):
            # as in SGLang, the completions of n > 1 have names that the caller does not know
            name = rid if sampling.n == 1 else f"{new_id}_{index}_{copy}"
            job_seed = (seed + copy * SEED_STEP) & SEED_MASK
            call.jobs.append(Job(name, call, prompt, sampling, stops, job_seed, score_from))
    call.many = many or len(call.jobs) > 1
    assert len({job.rid for job in call.jobs}) == len(call.jobs) > 0, "each completion has a name of its own"
    return call


def _prompts(input_ids: Any, limits: Limits) -> tuple[list[tuple[int, ...]], bool]:
    if not isinstance(input_ids, list) or not input_ids:
        raise RequestRefused("input_ids must be a non-empty list of token ids, or a list of such lists")
    many = isinstance(input_ids[0], list)
    lists = input_ids if many else [input_ids]
    for index, tokens in enumerate(lists):
        if not isinstance(tokens, list) or not tokens:
            raise WrongType(f"input_ids[{index}] must be a non-empty list of token ids")
        # type() and not isinstance: true is an int in Python
        if any(type(token) is not int for token in tokens):
            raise WrongType(f"input_ids[{index}] holds something that is no integer")
        if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
            raise RequestRefused(
                f"input_ids[{index}] holds token {max(tokens, key=abs)}, outside the vocabulary of {limits.vocab_size}"
            )
    return [tuple(tokens) for tokens in lists], many


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestRefused(f"{name} has {len(value)} entries for {count} input_ids")
    return value


def _sampling(value: Any, limits: Limits) -> tuple[Sampling, tuple[int, ...]]:
    if not isinstance(value, dict):
        raise WrongType("sampling_params must be an object, or a list of them")
    given = {key: entry for key, entry in value.items() if entry is not None}
    unknown = sorted(given.keys() - Sampling.__dataclass_fields__.keys())
    if unknown:
        raise WrongType(f"unknown sampling_params {unknown}: this engine knows {sorted(Sampling.__dataclass_fields__)}")
    stops = given.pop("stop_token_ids", [])
    if not isinstance(stops, list) or any(type(token) is not int or token < 0 for token in stops):
        raise WrongType(f"stop_token_ids={stops}: must be a list of token ids")
    sampling = Sampling(**given, stop_token_ids=tuple(stops))
    _check_types(sampling)
    _check_bounds(sampling)
    # as in SGLang, ignore_eos ignores stop_token_ids too
    merged = dict.fromkeys(() if sampling.ignore_eos else (*stops, *limits.eos_token_ids))
    if len(merged) > STOP_TOKEN_IDS_MAX:
        raise RequestRefused(f"{len(merged)} stop tokens: at most {STOP_TOKEN_IDS_MAX} are supported")
    return sampling, tuple(token for token in merged if token < limits.vocab_size)


def _check_types(sampling: Sampling) -> None:
    for name in ("max_new_tokens", "top_k", "n", "min_new_tokens", "sampling_seed"):
        value = getattr(sampling, name)
        if value is not None and type(value) is not int:
            raise WrongType(f"{name}={value!r}: must be an integer")
    for name in ("temperature", "top_p"):
        value = getattr(sampling, name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise WrongType(f"{name}={value!r}: must be a finite number")
    if type(sampling.ignore_eos) is not bool:
        raise WrongType(f"ignore_eos={sampling.ignore_eos!r}: must be true or false")


def _check_bounds(sampling: Sampling) -> None:
    faults = {
        "max_new_tokens": sampling.max_new_tokens < 0,
        "temperature": sampling.temperature < 0,
        "top_p": not 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k < 1 and sampling.top_k != -1,
        "n": not 1 <= sampling.n <= 4096,
        "min_new_tokens": not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens,
    }
    for name, fault in faults.items():
        if fault:
            raise RequestRefused(f"{name}={getattr(sampling, name)} is out of bounds")


def _score_from(body: JsonDict) -> int | None:
    start = body.get("logprob_start_len")
    if start is None or start == -1 or not body.get("return_logprob"):
        return None
    if type(start) is not int or start < 0:
        raise RequestRefused(f"logprob_start_len={start!r}: must be an integer of at least -1")
    return start


def _rids(rid: Any, new_id: str, count: int, many: bool) -> list[str]:
    if rid is not None and not isinstance(rid, (str, list)):
        raise MalformedBody(f"rid={rid!r}: must be a string or a list of strings")
    if isinstance(rid, list):
        if any(not isinstance(name, str) for name in rid) or len(set(rid)) != len(rid) or len(rid) != count:
            raise RequestRefused(f"rid must be {count} different strings, one per input_ids")
        return rid
    name = new_id if rid is None else rid
    return [f"{name}_{index}" for index in range(count)] if many else [name]


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
