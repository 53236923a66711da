"""The interface of the pool to one engine; each kind of engine has a client of its own that
implements it.

Every call has a deadline, except sampling: its answer is streamed, and the pool gives up an engine
that sends no tokens. Input and output are tokens; nothing is decoded here.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

import aiohttp
import numpy as np

from rlpipe.base.errors import EngineError
from rlpipe.records.sending import Group, TensorBucket
from rlpipe.services.calls import http_call, http_stream, json_events

log = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 300.0  # to load weights, without the time to read them (`reading_s`)
MEMORY_TIMEOUT_S = 120.0  # to release or resume memory
SCORE_TIMEOUT_S = 120.0  # the first request to a new engine may wait for a compiler
CONTROL_TIMEOUT_S = 10.0  # all other calls take milliseconds, unless the engine hangs
INFO_TIMEOUT_S = 5.0
MESSAGE_CHARS_MAX = 1000


class EngineUnavailable(EngineError):
    """The engine is lost, hangs or answers 5xx; the request may be sent to another engine."""


class RequestRefused(EngineError):
    """The engine answered 4xx; any engine would refuse this request."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one completion. Not all engines honour `seed`
    (docs/engines.md).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class SampleRequest:
    """The request for one completion.

    `tokens`: the prompt, and for a partial rollout the tokens that were sampled before.

    `request_id`: no id in flight may be a prefix of another (an abort ends all requests whose ids
    begin with it), so use ids of equal length.
    """

    request_id: str
    tokens: list[int]
    params: Sampling
    # called with the tokens so far as they arrive
    hear: Callable[[Heard], None] = field(default=lambda _: None, compare=False)


@dataclass(frozen=True)
class Completion:
    """The tokens sampled for one rollout. `spans`: (weight version, number of tokens) in order; the
    numbers add up to the number of tokens.

    Tokens and logprobs are packed arrays (`tokens_of`, `logprobs_of`): lists would take eight times
    the memory.
    """

    tokens: array[int]  # int32
    rollout_logprobs: array[float]  # float32, of the temperature-scaled distribution
    # "stop", "length" or "abort" (cut short: `tokens` has what was sampled until then);
    # environments add others
    finish_reason: str
    spans: list[tuple[int, int]]
    engine: str  # the name of the engine that sampled last; empty before the first token

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    def then(self, rest: Completion) -> Completion:
        """This completion continued by `rest`."""
        runs = groupby(self.spans + rest.spans, key=lambda span: span[0])
        spans = [(version, sum(count for _, count in run)) for version, run in runs]
        engine = rest.engine if rest.tokens else self.engine or rest.engine
        logprobs = self.rollout_logprobs + rest.rollout_logprobs
        return Completion(self.tokens + rest.tokens, logprobs, rest.finish_reason, spans, engine)

    def told(self, tokens: Sequence[int]) -> Completion:
        """This completion and tokens after it that no policy sampled: unfinished, with logprob 0,
        counted to the version that sampled last.
        """
        version, _ = self.spans[-1]
        logprobs = logprobs_of([0.0] * len(tokens))
        return self.then(Completion(tokens_of(tokens), logprobs, "abort", [(version, len(tokens))], self.engine))


def number_of(logprob: float | None) -> float:
    """The logprob as a number; engines send NaN as null."""
    return math.nan if logprob is None else logprob


def tokens_of(tokens: Sequence[int] | np.ndarray) -> array[int]:
    """Packs tokens as int32."""
    return array("i", np.asarray(tokens, np.int32).tobytes())


def logprobs_of(logprobs: Sequence[float | None] | np.ndarray) -> array[float]:
    """Packs logprobs as float32; null becomes NaN."""
    return array("f", np.asarray(logprobs, np.float32).tobytes())


NOTHING_YET = Completion(tokens_of([]), logprobs_of([]), "abort", [], "")


@dataclass(eq=False)
class Heard:
    """The tokens that an engine has sent so far for one request, packed as in `Completion`; they
    are kept when the engine is lost. `on_tokens` is called for each further batch.
    """

    on_tokens: Callable[[], None] = lambda: None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    def add(self, tokens: list[int], logprobs: list[float | None]) -> None:
        assert len(tokens) == len(logprobs), "every token comes with its logprob"
        self.tokens.fromlist(tokens)
        self.logprobs += logprobs_of(logprobs)
        self.on_tokens()

    def completion(self, finish_reason: str, spans: list[tuple[int, int]], engine: str) -> Completion:
        """A copy of the tokens so far: tokens that arrive later, after the request was given up,
        are not in it.
        """
        return Completion(self.tokens[:], self.logprobs[:], finish_reason, spans, engine)


@dataclass(frozen=True)
class ScoredTokens:
    """The logprobs (temperature 1) of given tokens. `top`: the tokens that the engine finds most
    probable at each place, with their logprobs, the most probable first, of equals any; empty where
    none were asked for.
    """

    logprobs: list[float]
    top: list[list[tuple[int, float]]]


@dataclass(eq=False)
class EngineClient(ABC):
    """The calls to one engine. Faults: EngineUnavailable (try another engine), RequestRefused (do
    not).

    `exact`: a repeated request has the same bits, on any engine and with any other requests beside
    it. The tokens of a lost request are then dropped and sampled again, as a continuation would
    have other bits.
    """

    name: str
    url: str
    session: aiohttp.ClientSession
    api_key: str
    admin_api_key: str
    exact: bool = False
    adapted: bool = False  # requests are for the adapter that was loaded last
    # answers 200 only when the scheduler works; may sample a token, so weights must be loaded
    health_path: ClassVar[str]
    # answers 200 once a new engine can sample; samples no token, and needs no key
    ready_path: ClassVar[str]

    @property
    def repeats_prompts(self) -> bool:
        """True when the engine computes a prompt several times if several requests for it arrive
        together. Once it is computed, later requests reuse it.
        """
        return False

    @abstractmethod
    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        """Samples the completion of a request; adds its tokens to `heard` as they arrive.

        Without a timeout: the caller decides how long to wait for the next token.
        """

    async def score(self, tokens: list[int], num_scored: int) -> list[float]:
        """Logprobs (temperature 1) of the last `num_scored` of `tokens`, each conditioned on all
        tokens before it.
        """
        return (await self.score_top(tokens, num_scored, 0)).logprobs

    @abstractmethod
    async def score_top(self, tokens: list[int], num_scored: int, top_k: int) -> ScoredTokens:
        """As `score`, with the `top_k` most probable tokens at each of these places.

        Trap: more than its vocabulary has may end an engine.
        """

    @abstractmethod
    async def load(self, model_path: str, version: int) -> None:
        """Loads new weights in place of the old ones, labels them `version` and continues
        generation.

        After a fault the engine must be restarted. Trap: an answer of 200 proves nothing; the
        caller must read the version back and score a probe.
        """

    async def receive(self, group: Group, rank: int, buckets: list[TensorBucket], version: int) -> None:
        """As `load`, with tensors that rank 0 of a process group broadcasts. `rank`: the first of
        the engine's ranks.

        The engine is paused until `leave`.
        """
        raise NotImplementedError(f"{self.name} receives no weights")

    async def leave(self, group: Group, *, go_on: bool) -> None:
        """Leaves the process group of `receive`.

        `go_on`: continues generation; otherwise the engine stays paused, and needs a `load` or a
        restart.
        """
        raise NotImplementedError(f"{self.name} receives no weights")

    async def load_adapter(self, path: str, version: int) -> None:
        """As `load`: replaces the adapter on the weights that the engine was started with; an empty
        path: no adapter.
        """
        raise NotImplementedError(f"{self.name} loads no adapters: {path} is merged")

    @abstractmethod
    async def release(self) -> None:
        """Frees the memory of weights and caches; aborts requests in flight.

        Only `resume` may follow. After a fault the engine must be ended.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Allocates the memory again.

        Its content is undefined: `load` must follow. After a fault the engine must be restarted.
        """

    async def adopt(self, version: int) -> None:  # noqa: B027 (most engines are told on their command line)
        """Sets the version label of a newly started engine, where its command has no option for
        it.
        """

    @abstractmethod
    async def weight_version(self) -> int:
        """The version that the engine reports."""

    async def checksum(self) -> str:
        """The checksum of the weights in the engine's memory; empty for an engine without
        checksums.
        """
        return ""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """Aborts the named requests, which then answer with their tokens so far.

        To be repeated until all of them have answered.
        """

    async def healthy(self) -> bool:
        """True when the engine answers and its scheduler works; meaningless for a paused engine."""
        try:
            await self.read(self.health_path)
        except EngineError:
            return False
        return True

    async def read(self, path: str, timeout_s: float = INFO_TIMEOUT_S) -> bytes:
        """Makes a call that changes nothing."""
        return await self.call("GET", path, self.api_key, None, timeout_s)

    async def control(self, path: str, body: object = None, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        """Makes a call that changes the engine's state."""
        return await self.call("POST", path, self.admin_api_key, body, timeout_s)

    async def call(self, method: str, path: str, key: str, body: object, timeout_s: float) -> bytes:
        """Makes one HTTP call; returns the body of the answer."""
        try:
            status, answer = await http_call(self.session, method, self.url + path, key, body, timeout_s)
        except ConnectionError as error:
            raise EngineUnavailable(str(error)) from error
        if status >= 300:  # a redirect does not come from an engine
            raise self._fault(path, status, answer.decode(errors="replace"))
        return answer

    async def events(self, path: str, body: object) -> AsyncGenerator[Iterator[Any]]:
        """Yields the server-sent JSON events of the answer to a POST, in the batches of
        `json_events`. There is no deadline once it is connected.
        """
        try:
            async with http_stream(self.session, self.url + path, self.api_key, body, CONTROL_TIMEOUT_S) as response:
                if response.status >= 300:
                    raise self._fault(path, response.status, await response.text(errors="replace"))
                async for events in json_events(response):
                    yield (self._checked(path, event) for event in events)
        except ConnectionError as error:
            raise EngineUnavailable(str(error)) from error

    def _checked(self, path: str, event: Any) -> Any:
        if "error" in event:  # an error after the status was sent
            raise self._fault(path, int(event["error"].get("code") or 500), str(event["error"]))
        return event

    def _fault(self, path: str, status: int, answer: str) -> EngineError:
        message = f"{self.url}{path} answered {status}: {answer[:MESSAGE_CHARS_MAX]}"
        return EngineUnavailable(message) if status >= 500 else RequestRefused(message)
