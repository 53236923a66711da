"""Retries while Prefect's API is away: any fault that may pass is treated like a refused
connection.

Prefect's client tries a call five times, in about a minute, and does not retry one that was
answered with 500 or 504. Here a call is tried again for WORK_S once the server has answered this
process, for seconds before that, and for seconds where its result is only shown (`hurrying`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import httpx
from httpx import USE_CLIENT_DEFAULT
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.exceptions import PrefectException

from rlpipe.store import patience
from rlpipe.store.patience import Wait

if TYPE_CHECKING:
    from httpx._client import UseClientDefault
    from httpx._types import AuthTypes

WORK_S = 300.0
RETRY_AFTER_MAX_S = 30.0
# sends logs in the background: Prefect's own retries are enough
BESIDE = "APILogWorkerThread"
send_async, send_sync = PrefectHttpxAsyncClient._send_with_retry, PrefectHttpxSyncClient._send_with_retry
_answered = threading.Event()
Outcome = httpx.Response | httpx.TransportError
Answer = TypeVar("Answer", covariant=True)


class Send(Protocol[Answer]):
    """httpx's own `send`, of an async or a sync client."""

    def __call__(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: AuthTypes | UseClientDefault | None = USE_CLIENT_DEFAULT,
        follow_redirects: bool | UseClientDefault = USE_CLIENT_DEFAULT,
    ) -> Answer: ...


class PrefectAway(PrefectException, RuntimeError):
    """Raised when the tries of a call to Prefect's API are used up. The text names the first
    fault.
    """


def _bound_s() -> float:
    return WORK_S if _answered.is_set() and not patience.is_hurried() else patience.FIRST_S


def _fault(request: httpx.Request, outcome: Outcome) -> str:
    """Describes a fault that may pass; empty when the outcome is an answer."""
    if isinstance(outcome, httpx.TransportError):
        return f"{type(outcome).__name__} {outcome}".strip() + f" ({request.method} {request.url.path})"
    if outcome.status_code in patience.PASSING_STATUSES:
        return f"{outcome.status_code} {outcome.reason_phrase} ({request.method} {request.url.path})"
    _answered.set()
    return ""


async def _persistently(
    request: httpx.Request, ask: Callable[[], Awaitable[httpx.Response]], pause: Callable[[float], Awaitable[None]]
) -> httpx.Response:
    """Returns the API's answer, with retries while it is away; PrefectAway when the time is up."""
    api = f"Prefect's API at {request.url.scheme}://{request.url.netloc.decode()}"
    outcome = await _outcome(ask)
    if fault := _fault(request, outcome):
        with Wait("prefect", api, fault, _bound_s) as wait:
            while not wait.is_over() and _fault(request, outcome):
                after = outcome.headers.get("Retry-After", "") if isinstance(outcome, httpx.Response) else ""
                await pause(
                    max(wait.next_pause_s(), min(float(after), RETRY_AFTER_MAX_S) if after.isdecimal() else 0.0)
                )
                outcome = await _outcome(ask)
            if _fault(request, outcome):
                raise PrefectAway(f"{api} is away: {wait.given_up()}")
    assert isinstance(outcome, httpx.Response)
    return outcome


async def _outcome(ask: Callable[[], Awaitable[httpx.Response]]) -> Outcome:
    try:
        return await ask()
    except httpx.UnsupportedProtocol:  # an invalid address stays invalid
        raise
    except httpx.TransportError as error:
        return error


async def send_patiently(
    self: PrefectHttpxAsyncClient,
    request: httpx.Request,
    send: Send[Awaitable[httpx.Response]],
    send_args: tuple[()],
    send_kwargs: dict[str, Any],
    retry_codes: set[int],
    retry_exceptions: tuple[type[Exception], ...],
) -> httpx.Response:
    """Replaces Prefect's own retries; of those, only the handling of CSRF tokens is left."""
    if threading.current_thread().name == BESIDE:
        return await send_async(self, request, send, send_args, send_kwargs, retry_codes, retry_exceptions)

    async def persist(
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: AuthTypes | UseClientDefault | None = USE_CLIENT_DEFAULT,
        follow_redirects: bool | UseClientDefault = USE_CLIENT_DEFAULT,
    ) -> httpx.Response:
        def ask() -> Awaitable[httpx.Response]:
            return send(request, stream=stream, auth=auth, follow_redirects=follow_redirects)

        return await _persistently(request, ask, asyncio.sleep)

    return await send_async(self, request, persist, send_args, send_kwargs)


def send_patiently_here(
    self: PrefectHttpxSyncClient,
    request: httpx.Request,
    send: Send[httpx.Response],
    send_args: tuple[()],
    send_kwargs: dict[str, Any],
    retry_codes: set[int],
    retry_exceptions: tuple[type[Exception], ...],
) -> httpx.Response:
    """As `send_patiently`, for the sync client."""

    async def pause(seconds: float) -> None:
        time.sleep(seconds)

    def persist(
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: AuthTypes | UseClientDefault | None = USE_CLIENT_DEFAULT,
        follow_redirects: bool | UseClientDefault = USE_CLIENT_DEFAULT,
    ) -> httpx.Response:
        async def ask() -> httpx.Response:
            return send(request, stream=stream, auth=auth, follow_redirects=follow_redirects)

        return _done(_persistently(request, ask, pause))

    return send_sync(self, request, persist, send_args, send_kwargs)


def _done(steps: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The result of a coroutine that never waits; needs no event loop."""
    try:
        steps.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waited for an event loop")


PrefectHttpxAsyncClient._send_with_retry = send_patiently  # pyright: ignore[reportAttributeAccessIssue]
PrefectHttpxSyncClient._send_with_retry = send_patiently_here  # pyright: ignore[reportAttributeAccessIssue]
