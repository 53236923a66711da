"""One request to one engine: until it is whole, the engine has no
more tokens, or there is enough."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from rlpipe.base.errors import EngineError
from rlpipe.engines.client import (
    NOTHING_YET,
    Completion,
    EngineClient,
    EngineUnavailable,
    Heard,
    RequestRefused,
    SampleRequest,
)

log = logging.getLogger(__name__)
ABORT_ANSWER_S = 5.0  # for what a request that is given up has
# a request may reach the engine after the abort: it is repeated until it has answered
ABORT_AGAIN_S = 0.2


@dataclass
class EngineLoad:
    """The state of one engine that the pool remembers."""

    in_flight: int = 0
    faults: int = 0  # in a row
    rest_until: float = 0.0
    # when a token came last, of any request; where none was in flight, when the first was sent
    heard_at: float = 0.0


async def ask(
    client: EngineClient,
    request: SampleRequest,
    version: int,
    load: EngineLoad,
    progress_timeout_s: float,
    enough: asyncio.Event,
    computed: asyncio.Event,
) -> tuple[Completion, EngineUnavailable | None]:
    """Returns the completion that one engine sampled, and the fault that ended it early, if any.
    The completion is whole, or holds the tokens that there were when `enough` was set or the fault
    came.

    A fault is also that none of our requests to the engine got a token for `progress_timeout_s`; a
    request that waits while others get tokens is no fault. `computed` is set as soon as the request
    has a token: its prompt is computed then. Cancelled, it ends the request on the engine.
    """

    def on_tokens() -> None:
        load.heard_at = time.monotonic()
        computed.set()

    heard, fault = Heard(on_tokens), None
    asking = asyncio.create_task(client.sample(request, heard))
    cutting = asyncio.create_task(cut_short(client, request.request_id, enough))
    try:
        while not asking.done() and (left := load.heard_at + progress_timeout_s - time.monotonic()) > 0:
            await asyncio.wait({asking}, timeout=left)
        if not asking.done():
            fault = EngineUnavailable(f"{client.name} had no token for {progress_timeout_s:g} s")
            with contextlib.suppress(EngineError):
                await client.abort([request.request_id])
            await asyncio.wait({asking}, timeout=ABORT_ANSWER_S)
        if asking.done():
            completion = await asking
            if labels := {label for label, _ in completion.spans} - {version}:
                heard = Heard()  # tokens of other weights than it was proved to serve
                fault = EngineUnavailable(
                    f"{client.name} sampled with weight versions {sorted(labels)}, expected {version}"
                )
            elif completion.finished or enough.is_set():
                return completion, None
            fault = fault or EngineUnavailable(f"{client.name} aborted a request that nobody asked it to abort")
    except EngineUnavailable as error:
        fault = error
    except asyncio.CancelledError:  # nobody waits for it any more: the engine has no work of it
        if not client.session.closed:
            with contextlib.suppress(EngineError, TimeoutError):
                await asyncio.wait_for(client.abort([request.request_id]), ABORT_ANSWER_S)
        raise
    finally:
        cutting.cancel()
        asking.cancel()
    assert fault is not None
    if client.exact or not heard.tokens:
        return NOTHING_YET, fault
    # it was proved to serve this version before it was asked
    spans = [(version, len(heard.tokens))]
    return heard.completion("abort", spans, client.name), fault


async def cut_short(client: EngineClient, request_id: str, enough: asyncio.Event) -> None:
    """Ends a request once there is enough, until this is cancelled."""
    await enough.wait()
    while True:
        try:
            await client.abort([request_id])
        except RequestRefused as error:
            log.warning("%s: %s; what it runs for nothing goes on to its end", client.url, error)
            return
        except EngineError:  # then the request fails as well, or runs to its end
            pass
        await asyncio.sleep(ABORT_AGAIN_S)
