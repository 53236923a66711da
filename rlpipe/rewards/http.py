"""Rewards behind HTTP: a few calls at a time, each rollout with a deadline, tried again while the service is only briefly away.

The reward `remote` is a service of your own that answers a rollout with {"reward": number}; `judge` is another.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import Field

from rlpipe.rewards.score import FAILURES_MAX, InvalidReward, Score, score_of
from rlpipe.types import JsonDict

TRIES_MAX = 6
PAUSE_S = 0.25  # before the second try; doubled before each further one
ANSWER_BYTES_MAX = 1 << 20
SAID_CHARS = 300
SECRET_CHARS_MIN = 4  # shorter ones are in every text

Concurrency = Annotated[int, Field(ge=1, le=1024)]


@dataclass(frozen=True)
class Endpoint:
    """Where a service is, how it is asked, and how its answer is read."""

    name: str  # in rl.rewards
    url: str
    told_url: str  # as the config writes it: where it is $NAME, what that holds is told to nobody
    key: str  # bearer token; empty: none
    concurrency: int  # calls at a time
    question: Callable[[JsonDict], JsonDict]  # item -> JSON body
    reading: Callable[[Any], Any]  # JSON answer -> reward; InvalidReward when it says none


def checked_url(url: str) -> str:
    """The URL, or that in the environment variable NAME where it is written `$NAME`; ValueError when it is none."""
    found = os.environ.get(url[1:], "") if url.startswith("$") else url
    if url.startswith("$") and not found:
        raise ValueError(f"url={url!r}: the environment variable {url[1:]} is not set")
    parts = urlsplit(found)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url!r} is no URL; write it as http://host:port/path, or $NAME for an environment variable")
    if parts.username or parts.password:
        raise ValueError("url holds a user or password, which would end up in the store; use key_env")
    return found


def key_of(key_env: str) -> str:
    """The key in the environment variable; ValueError when it is not set."""
    if key_env and not os.environ.get(key_env):
        raise ValueError(f"key_env={key_env!r}: the environment variable {key_env} is not set")
    key = os.environ.get(key_env, "").strip() if key_env else ""
    if not key.isprintable():
        raise ValueError(
            f"key_env={key_env!r}: what the environment variable {key_env} holds is no key: it has control characters"
        )
    return key


class ServiceDown(Exception):
    """No answer worth the name: a connection error, 429 or 5xx."""


class ServiceRefused(Exception):
    """The service answered 4xx: asking again would not help."""


class HttpScorer:
    """One service. A rollout has `timeout_s` for all its tries and the pauses between them."""

    def __init__(self, endpoint: Endpoint, weight: float, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._weight = weight
        self._timeout_s = timeout_s
        self._num_failed_in_row = 0
        self._closed = False

    def start(self) -> None:
        """Nothing: the service runs elsewhere."""

    def close(self) -> None:
        """What has not been asked yet is not asked any more."""
        self._closed = True

    def score(self, items: list[JsonDict]) -> list[Score]:
        """One Score per item, in order. After FAILURES_MAX failures in a row the rest is not asked: reward_unavailable."""
        self._num_failed_in_row = 0
        return asyncio.run(self._score_all(items))

    async def _score_all(self, items: list[JsonDict]) -> list[Score]:
        headers = {"Authorization": f"Bearer {self._endpoint.key}"} if self._endpoint.key else {}
        gate = asyncio.Semaphore(self._endpoint.concurrency)
        connector = aiohttp.TCPConnector(limit=self._endpoint.concurrency)
        no_limit = aiohttp.ClientTimeout(total=None)  # the deadline is the rollout's, not the call's
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=no_limit) as http:

            async def one(item: JsonDict) -> Score:
                async with gate:
                    return await self._score_one(http, item)

            return await asyncio.gather(*[one(item) for item in items])

    async def _score_one(self, http: aiohttp.ClientSession, item: JsonDict) -> Score:
        name = self._endpoint.name
        if self._closed or self._num_failed_in_row >= FAILURES_MAX:
            return self._fault(
                "reward_unavailable", "not asked: " + ("closed" if self._closed else "it failed too often in a row")
            )
        try:
            answer = await self._ask(http, self._endpoint.question(item))
            score = score_of(name, self._endpoint.reading(answer), self._weight)
        except InvalidReward as error:
            score = self._fault("reward_invalid", str(error))
        except ServiceRefused as error:
            score = self._fault("reward_error", str(error))
        except ServiceDown as error:
            score = self._fault("reward_unavailable", str(error))
        except TimeoutError:
            score = self._fault("reward_timeout", f"took more than rl.reward_timeout_s={self._timeout_s:g}")
        is_away = score.reason in ("reward_unavailable", "reward_timeout")
        self._num_failed_in_row = self._num_failed_in_row + 1 if is_away else 0
        return score

    async def _ask(self, http: aiohttp.ClientSession, question: JsonDict) -> Any:
        """The JSON answer. ServiceDown after TRIES_MAX tries or when there is no time for another, TimeoutError within one."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._timeout_s
        num_tries = 0
        while True:
            try:
                async with asyncio.timeout_at(ends_s):
                    return await self._try(http, question)
            except ServiceDown:
                pause_s = PAUSE_S * 2**num_tries
                num_tries += 1
                if num_tries == TRIES_MAX or loop.time() + pause_s >= ends_s:
                    raise
            await asyncio.sleep(pause_s)

    async def _try(self, http: aiohttp.ClientSession, question: JsonDict) -> Any:
        try:
            async with http.post(self._endpoint.url, json=question, allow_redirects=False) as answer:
                status, body = answer.status, await _body(answer.content)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServiceDown(self._without_secrets(_told(error))) from error
        said = self._without_secrets(body[: 2 * SAID_CHARS].decode(errors="replace"))[:SAID_CHARS]
        if status == 429 or status >= 500:
            raise ServiceDown(f"it answered {status}: {said}")
        if not 200 <= status < 300:
            raise ServiceRefused(f"it answered {status}: {said}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:  # RecursionError: a great many brackets
            raise InvalidReward(f"it answered no JSON ({type(error).__name__}): {said}") from error

    def _fault(self, reason: str, message: str) -> Score:
        return Score(None, {}, reason, f"reward {self._endpoint.name!r} at {_place(self._endpoint.told_url)}: {message}")

    def _without_secrets(self, said: str) -> str:
        """What a service or a library said, which may be what it was asked: without the key, and without a URL that the config hides."""
        end = self._endpoint
        parts = urlsplit(end.url)
        hidden = [end.key, *((end.url, parts.path, parts.netloc, parts.hostname) if end.told_url.startswith("$") else ())]
        for secret in filter(lambda each: each and len(each) >= SECRET_CHARS_MIN, hidden):
            said = said.replace(str(secret), "***")
        return said


def _told(error: Exception) -> str:
    """What went wrong, without the URL that some of aiohttp's errors tell."""
    if isinstance(error, aiohttp.InvalidURL):
        return type(error).__name__
    said = f"{error.status} {error.message}" if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return f"{type(error).__name__}: {said}"


def _place(url: str) -> str:
    """A URL without its user, password and query, where a key may be: scheme://host:port/path, or $NAME."""
    if url.startswith("$"):
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


async def _body(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for chunk in content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise InvalidReward(f"it answered more than {ANSWER_BYTES_MAX} bytes")
    return bytes(body)


def remote(
    name: str, weight: float, timeout_s: float, /, *, url: str, key_env: str = "", concurrency: Concurrency = 16
) -> HttpScorer:
    """POSTs {"prompt", "completion", "rollout"} to `url`; the answer is {"reward": number, or several by name}.

    `url` may be `$NAME`, and `key_env` names, the environment variable that holds it. ValueError when one is not set.
    """

    def reading(answer: Any) -> Any:
        if not isinstance(answer, dict) or "reward" not in answer:
            raise InvalidReward(f"it answered {str(answer)[:200]!r}, not {{'reward': number}}")
        return answer["reward"]

    endpoint = Endpoint(name, checked_url(url), url, key_of(key_env), concurrency, lambda item: item, reading)
    return HttpScorer(endpoint, weight, timeout_s)
