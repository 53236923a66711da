"""One HTTP call with a bearer key: to engines, to services and to the gang."""

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
    """Connections: bounded by the requests in flight, and dropped before a server drops them
    (uvicorn after 5 s idle).
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
    """Status and body of the answer.

    `body`: a JSON value, None for no body; `connect_s`: within it there must be a connection.

    ConnectionError, which names the URL, when there is no answer in time.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with session.request(
            method, url, json=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
        raise ConnectionError(f"{url}: {type(error).__name__} {error}") from error


@contextlib.asynccontextmanager
async def http_stream(
    session: aiohttp.ClientSession, url: str, key: str, body: object, connect_s: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a POST while it is still being written, for as long as that takes.

    ConnectionError, as for `http_call`.
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
    """The server-sent events of an answer as JSON: what came together at a time, to be read before
    the next is asked for.

    Each is parsed when it is read: many that are there at once would keep the garbage collector
    busy.
    """
    unread = b""
    async for part in response.content.iter_any():
        *lines, unread = (unread + part).split(b"\n")
        yield (orjson.loads(line[len(EVENT) :]) for line in lines if line.startswith(EVENT) and line != LAST_EVENT)


def json_of(url: str, status: int, content: bytes) -> JsonDict:
    """The JSON object of an answer; ConnectionError for any other: it comes from somebody else, a
    proxy perhaps.
    """
    if (answer := json_object(content)) is None:
        raise ConnectionError(f"{url}: answered {status} without JSON ({content[:80]!r})")
    return answer
