"""HTTP calls with a bearer key, to engines, services and the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import aiohttp
import orjson

from rlpipe.base.values import JsonDict, json_object

KEEPALIVE_S = 2.0
EVENT, LAST_EVENT = b"data: ", b"data: [DONE]"


def new_session() -> aiohttp.ClientSession:
    """A client session. Its connections are limited by the requests in flight only, and are closed
    before a server closes them (uvicorn after 5 s idle).
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S))


async def http_call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    key: str,
    body: object,
    timeout_s: float,
    connect_s: float | None = None,
) -> tuple[int, bytes]:
    """Makes a call; returns status and body of the answer.

    `body`: a JSON value, None for no body; `connect_s`: the timeout of connecting.

    ConnectionError naming the URL when there is no answer in time.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with session.request(
            method, url, json=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is a subclass of OSError
        raise ConnectionError(f"{url}: {type(error).__name__} {error}") from error


@contextlib.asynccontextmanager
async def http_stream(
    session: aiohttp.ClientSession, url: str, key: str, body: object, connect_s: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yields the answer to a POST while it is still being sent, without a timeout.

    ConnectionError as `http_call`.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        async with session.post(
            url, data=orjson.dumps(body), headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            yield response
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionError(f"{url}: {type(error).__name__} {error}") from error


async def json_events(response: aiohttp.ClientResponse) -> AsyncGenerator[Iterator[Any]]:
    """Yields the server-sent events of an answer as JSON, in batches of those that arrived
    together; a batch must be read before the next one is requested.

    Each event is parsed when it is read: many objects at once would keep the garbage collector
    busy.
    """
    unread = b""
    async for part in response.content.iter_any():
        *lines, unread = (unread + part).split(b"\n")
        yield (orjson.loads(line[len(EVENT) :]) for line in lines if line.startswith(EVENT) and line != LAST_EVENT)


def json_of(url: str, status: int, content: bytes) -> JsonDict:
    """The JSON object of an answer. ConnectionError for any other content, which may be from a
    proxy.
    """
    if (answer := json_object(content)) is None:
        raise ConnectionError(f"{url}: answered {status} without JSON ({content[:80]!r})")
    return answer
