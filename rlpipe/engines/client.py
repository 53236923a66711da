"""The pool's requests to one engine, whatever serves it: each kind of
engine has a client of its own behind this.

Every call has a deadline, except sampling: its answer comes token by token, and the pool gives up
an engine from which none come. Tokens go in and tokens come out; nothing is decoded here.
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
LOAD_TIMEOUT_S = 300.0  # of weights, beside the time to read them: `reading_s`
MEMORY_TIMEOUT_S = 120.0  # for memory to be given back, or taken again
SCORE_TIMEOUT_S = 120.0  # the first request of a new engine may wait for a compiler
CONTROL_TIMEOUT_S = 10.0  # everything else is answered in milliseconds, or the engine hangs
INFO_TIMEOUT_S = 5.0
MESSAGE_CHARS_MAX = 1000


class EngineUnavailable(EngineError):
    """The engine is gone, hung or answers 5xx: the same request may go to another engine."""


class RequestRefused(EngineError):
    """The engine answered 4xx: the same request would be refused anywhere."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one completion. `seed` is honoured where the engine can
    (docs/engines.md)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class SampleRequest:
    """One completion wanted.

    `tokens`: the prompt and, of a rollout that goes on, what was sampled before.

    `request_id`: no id in flight may be a prefix of another (an abort takes all that begin with
    it): use equal lengths.
    """

    request_id: str
    tokens: list[int]
    params: Sampling


@dataclass(frozen=True)
class Completion:
    """The tokens sampled for one rollout. `spans`: (weight version, number of tokens) in order; the
    numbers add up to the number of tokens.

    Tokens and logprobs are packed, as `tokens_of` and `logprobs_of` make them: as lists they would
    take eight times the memory.
    """

    tokens: array[int]  # int32
    rollout_logprobs: array[float]  # float32, of the temperature-scaled distribution
    # "stop", "length" or "abort" (cut short: `tokens` is what there was); more in an environment
    finish_reason: str
    spans: list[tuple[int, int]]
    engine: str  # the name of the engine that sampled last; empty when nothing was sampled yet

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    def then(self, rest: Completion) -> Completion:
        """This one, and how it went on."""
        runs = groupby(self.spans + rest.spans, key=lambda span: span[0])
        spans = [(version, sum(count for _, count in run)) for version, run in runs]
        engine = rest.engine if rest.tokens else self.engine or rest.engine
        logprobs = self.rollout_logprobs + rest.rollout_logprobs
        return Completion(self.tokens + rest.tokens, logprobs, rest.finish_reason, spans, engine)


def number_of(logprob: float | None) -> float:
    """A NaN comes as null."""
    return math.nan if logprob is None else logprob


def tokens_of(tokens: Sequence[int] | np.ndarray) -> array[int]:
    """The tokens, packed."""
    return array("i", np.asarray(tokens, np.int32).tobytes())


def logprobs_of(logprobs: Sequence[float | None] | np.ndarray) -> array[float]:
    """The logprobs, packed. A NaN comes as null, and is NaN here too."""
    return array("f", np.asarray(logprobs, np.float32).tobytes())


NOTHING_YET = Completion(tokens_of([]), logprobs_of([]), "abort", [], "")


@dataclass(eq=False)
class Heard:
    """The tokens that an engine has sent so far for one request, packed as in `Completion`: they
    stay when the engine is lost. `on_tokens` is called when there are more."""

    on_tokens: Callable[[], None] = lambda: None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    def add(self, tokens: list[int], logprobs: list[float | None]) -> None:
        assert len(tokens) == len(logprobs), "every token comes with its logprob"
        self.tokens.fromlist(tokens)
        self.logprobs += logprobs_of(logprobs)
        self.on_tokens()

    def completion(self, finish_reason: str, spans: list[tuple[int, int]], engine: str) -> Completion:
        """The tokens until now, copied: tokens that come after the request was given up are not in
        it."""
        return Completion(self.tokens[:], self.logprobs[:], finish_reason, spans, engine)


@dataclass(eq=False)
class EngineClient(ABC):
    """Calls to one engine. Faults: EngineUnavailable (try elsewhere), RequestRefused (do not).

    `exact`: a request sampled again, on any engine and beside any others, has the same bits. What
    was lost is then sampled again, as it would not go on with the bits that it would have had.
    """

    name: str
    url: str
    session: aiohttp.ClientSession
    api_key: str
    admin_api_key: str
    exact: bool = False
    adapted: bool = False  # what is asked for is asked of the adapter that was loaded last
    # answers 200 only when the scheduler works; may sample a token, so weights have to be loaded
    health_path: ClassVar[str]
    # answers 200 once a new engine may be asked for tokens; samples none, and takes no key
    ready_path: ClassVar[str]

    @property
    def repeats_prompts(self) -> bool:
        """True when the engine computes the same prompt anew for each of several requests that
        arrive together. Once the prompt is computed, later requests reuse it."""
        return False

    @abstractmethod
    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        """The completion of a request; its tokens are in `heard` as they come.

        How long to wait for the next is the caller's to say.
        """

    @abstractmethod
    async def score(self, tokens: list[int], num_scored: int) -> list[float]:
        """Logprobs (temperature 1) of the last `num_scored` of
        `tokens`, each given all before it."""

    @abstractmethod
    async def load(self, model_path: str, version: int) -> None:
        """Puts new weights in place of the old, labels them `version` and lets the engine go on.

        An answer of 200 proves nothing: the caller reads the version back and scores a probe. After
        a fault: restart the engine.
        """

    async def receive(self, group: Group, rank: int, buckets: list[TensorBucket], version: int) -> None:
        """As `load`, of tensors that rank 0 of a group sends; `rank`: the engine's first one.

        It is paused, and stays so until `leave`.
        """
        raise NotImplementedError(f"{self.name} receives no weights")

    async def leave(self, group: Group, *, go_on: bool) -> None:
        """Out of the group that it received from.

        `go_on`: it samples again; else it stays paused, and has to `load` or to be restarted.
        """
        raise NotImplementedError(f"{self.name} receives no weights")

    async def load_adapter(self, path: str, version: int) -> None:
        """As `load`: puts an adapter in place of the one before, beside the weights that the engine
        was started on; an empty path: none.
        """
        raise NotImplementedError(f"{self.name} loads no adapters: {path} is merged")

    @abstractmethod
    async def release(self) -> None:
        """Gives back the memory of weights and caches; what is still in flight is aborted.

        Only `resume` may follow. After a fault: end it.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Has its memory again.

        What weights are in it is not known: `load` comes next. After a fault: restart the engine.
        """

    async def adopt(self, version: int) -> None:  # noqa: B027 (most engines are told on their command line)
        """Tells a newly started engine which version it was started on, where its command cannot
        say it.
        """

    @abstractmethod
    async def weight_version(self) -> int:
        """The version that the engine says it serves."""

    async def checksum(self) -> str:
        """The checksum of the weights in the engine's memory: other weights have another one. Empty
        where the engine has none."""
        return ""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """Ends the named requests; they answer with what they have.

        To be repeated until all have answered.
        """

    async def healthy(self) -> bool:
        """True when the engine answers and its scheduler works; says nothing about a paused
        engine."""
        try:
            await self.read(self.health_path)
        except EngineError:
            return False
        return True

    async def read(self, path: str, timeout_s: float = INFO_TIMEOUT_S) -> bytes:
        """A call that changes nothing."""
        return await self.call("GET", path, self.api_key, None, timeout_s)

    async def control(self, path: str, body: object = None, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        """A call that changes the engine's state."""
        return await self.call("POST", path, self.admin_api_key, body, timeout_s)

    async def call(self, method: str, path: str, key: str, body: object, timeout_s: float) -> bytes:
        """The body of the answer to one HTTP call."""
        try:
            status, answer = await http_call(self.session, method, self.url + path, key, body, timeout_s)
        except ConnectionError as error:
            raise EngineUnavailable(str(error)) from error
        if status >= 300:  # what sends on is no engine
            raise self._fault(path, status, answer.decode(errors="replace"))
        return answer

    async def events(self, path: str, body: object) -> AsyncGenerator[Iterator[Any]]:
        """Yields the server-sent JSON of one POST's answer, in the batches of `json_events`. There
        is no deadline after the connection is made."""
        try:
            async with http_stream(self.session, self.url + path, self.api_key, body, CONTROL_TIMEOUT_S) as response:
                if response.status >= 300:
                    raise self._fault(path, response.status, await response.text(errors="replace"))
                async for events in json_events(response):
                    yield (self._checked(path, event) for event in events)
        except ConnectionError as error:
            raise EngineUnavailable(str(error)) from error

    def _checked(self, path: str, event: Any) -> Any:
        if "error" in event:  # too late for a status
            raise self._fault(path, int(event["error"].get("code") or 500), str(event["error"]))
        return event

    def _fault(self, path: str, status: int, answer: str) -> EngineError:
        message = f"{self.url}{path} answered {status}: {answer[:MESSAGE_CHARS_MAX]}"
        return EngineUnavailable(message) if status >= 500 else RequestRefused(message)
