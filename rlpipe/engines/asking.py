"""Sends one request to one engine, until its completion is whole, the engine fails, or `enough` is
set.
"""

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
ABORT_ANSWER_S = 5.0  # for the answer to a request that is given up
# the request may reach the engine after its abort, so the abort is repeated until the request has
# answered
ABORT_AGAIN_S = 0.2


@dataclass
class EngineLoad:
    """The state of one engine that the pool keeps."""

    in_flight: int = 0
    faults: int = 0  # consecutive ones
    rest_until: float = 0.0
    # the time of the last token of any request; if none was in flight, of the first request
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
    """Returns the completion that one engine sampled, whole or until `enough` was set, and the
    fault that ended it early, if any.

    A fault is also that none of our requests to the engine got a token for `progress_timeout_s`.
    `computed` is set with the request's first token: its prompt is computed then. A cancellation
    aborts the request on the engine.
    """

    def on_tokens() -> None:
        load.heard_at = time.monotonic()
        computed.set()
        request.hear(heard)

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
                # these tokens are of other weights than the engine was proved to serve
                heard = Heard()
                fault = EngineUnavailable(
                    f"{client.name} sampled with weight versions {sorted(labels)}, expected {version}"
                )
            elif completion.finished or enough.is_set():
                return completion, None
            fault = fault or EngineUnavailable(f"{client.name} aborted a request that nobody asked it to abort")
    except EngineUnavailable as error:
        fault = error
    except asyncio.CancelledError:  # nobody waits for the completion: the engine must not compute it
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
    # the engine was proved to serve this version before the request
    spans = [(version, len(heard.tokens))]
    return heard.completion("abort", spans, client.name), fault


async def cut_short(client: EngineClient, request_id: str, enough: asyncio.Event) -> None:
    """Aborts a request once `enough` is set, again and again until this is cancelled."""
    await enough.wait()
    while True:
        try:
            await client.abort([request_id])
        except RequestRefused as error:
            log.warning(
                "%s refused to abort a request (%s): the request runs to its end, and its result is not used",
                client.url,
                error,
            )
            return
        except EngineError:  # the request itself then fails, too, or runs to its end
            pass
        await asyncio.sleep(ABORT_AGAIN_S)
