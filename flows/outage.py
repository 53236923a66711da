"""Prefect's API when it is away for a while: whatever it answers or does not, of what passes by
itself, is taken as its refused connections are.

Prefect's client tries a call five times, in about a minute, and one that was answered with 500 or
504 not at all. Here a call is tried again for WORK_S once the server has answered this process, for
seconds before that, and where the answer is only to be looked at (`hurrying`).
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
# sends what was logged, while nobody waits for it: Prefect's own tries will do
BESIDE = "APILogWorkerThread"
send_async, send_sync = PrefectHttpxAsyncClient._send_with_retry, PrefectHttpxSyncClient._send_with_retry
_answered = threading.Event()
Outcome = httpx.Response | httpx.TransportError
Answer = TypeVar("Answer", covariant=True)


class Send(Protocol[Answer]):
    """httpx's own `send`, of a client that is awaited, or of one that is not."""

    def __call__(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: AuthTypes | UseClientDefault | None = USE_CLIENT_DEFAULT,
        follow_redirects: bool | UseClientDefault = USE_CLIENT_DEFAULT,
    ) -> Answer: ...


class PrefectAway(PrefectException, RuntimeError):
    """Prefect's API was asked for as long as it is worth. The text names the first fault."""


def _bound_s() -> float:
    return WORK_S if _answered.is_set() and not patience.is_hurried() else patience.FIRST_S


def _fault(request: httpx.Request, outcome: Outcome) -> str:
    """Describes a fault that passes by itself; empty when the outcome is an answer."""
    if isinstance(outcome, httpx.TransportError):
        return f"{type(outcome).__name__} {outcome}".strip() + f" ({request.method} {request.url.path})"
    if outcome.status_code in patience.PASSING_STATUSES:
        return f"{outcome.status_code} {outcome.reason_phrase} ({request.method} {request.url.path})"
    _answered.set()
    return ""


async def _persistently(
    request: httpx.Request, ask: Callable[[], Awaitable[httpx.Response]], pause: Callable[[float], Awaitable[None]]
) -> httpx.Response:
    """Returns the API's answer, asking again while it is away; PrefectAway when the time is up."""
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
    except httpx.UnsupportedProtocol:  # an address that is none, whenever it is asked
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
    """In place of Prefect's own tries: what is left of those is its way with CSRF tokens."""
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
    """As `send_patiently`, of the client that nobody awaits."""

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
    """The result of a coroutine that waits for nothing; no event loop is needed."""
    try:
        steps.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waited for an event loop")


PrefectHttpxAsyncClient._send_with_retry = send_patiently  # pyright: ignore[reportAttributeAccessIssue]
PrefectHttpxSyncClient._send_with_retry = send_patiently_here  # pyright: ignore[reportAttributeAccessIssue]
