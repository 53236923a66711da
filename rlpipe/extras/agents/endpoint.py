"""The OpenAI-compatible endpoint in front of the pool: each rollout has its own URL and key while
its agent runs.

Routes, below the rollout's URL: POST /chat/completions, POST /messages (Anthropic's), GET /models.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from rlpipe.base.errors import UserError
from rlpipe.chat_api.chat import MODEL, ChatRefused, ChatRequest, GivenReplies, json_text
from rlpipe.chat_api.openai_wire import OpenAiWire
from rlpipe.config.secrecy import key_fits
from rlpipe.data.chat import ChatTokenizer
from rlpipe.extras.agents.anthropic_wire import AnthropicWire
from rlpipe.extras.agents.calls import SentCalls, sending_of
from rlpipe.extras.agents.rollout import AgentRollout
from rlpipe.records.messages import strict_json

BODY_BYTES_MAX = 64 << 20
BACKLOG = 1024
KEEP_ALIVE_S = 10.0  # between comments on a stream that waits for its reply
SHUTDOWN_S = 2.0
CHAT, MESSAGES = "/{rollout}/v1/chat/completions", "/{rollout}/v1/messages"
Wire = OpenAiWire | AnthropicWire
_json = functools.partial(web.json_response, dumps=json_text)


@dataclass(frozen=True)
class Door:
    """The address and the key with which one agent reaches its rollout."""

    base_url: str
    api_key: str


@dataclass(frozen=True)
class _Guest:
    rollout: AgentRollout
    api_key: str
    calls: SentCalls


class AgentEndpoint:
    """The server. Lives on the event loop that started it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._openai = OpenAiWire(tokenizer)
        self._wires: dict[str, Wire] = {CHAT: self._openai, MESSAGES: AnthropicWire()}
        self._guests: dict[str, _Guest] = {}
        self._numbers = itertools.count()
        self._url = ""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.add_routes(
            [*(web.post(path, self._complete) for path in self._wires), web.get("/{rollout}/v1/models", self._models)]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)

    async def start(self, address: str) -> None:
        """Listens on a free port of `address`; UserError when it is not an address of this
        machine.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address, 0, backlog=BACKLOG).start()
        except OSError as error:
            raise UserError(
                f"rl.agent_address={address!r}: cannot listen there ({error}); use an address of this machine"
            ) from error
        host, port, *_ = self._runner.addresses[0]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()

    @contextlib.contextmanager
    def open(self, rollout: AgentRollout) -> Iterator[Door]:
        """Yields the address and key of a rollout; after the `with` its key is refused."""
        number, key = str(next(self._numbers)), secrets.token_urlsafe(24)
        self._guests[number] = _Guest(rollout, key, SentCalls())
        try:
            yield Door(f"{self._url}/{number}/v1", key)
        finally:
            del self._guests[number]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers 401 without the key of a running rollout, and refusals as an error in the route's
        form.
        """
        guest = self._guests.get(request.match_info.get("rollout", ""))
        try:
            given = request.headers.get("Authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
            if guest is None or not key_fits(given, guest.api_key):
                raise ChatRefused(401, "the API key belongs to no running rollout", "invalid_api_key")
            return await handler(request)
        except ChatRefused as error:
            refused = error
        except web.HTTPException as error:
            refused = ChatRefused(error.status, f"{request.method} {request.path}: {error.reason}", "not_found")
        return _json(self._wire(request).error(refused), status=refused.status, headers={"x-should-retry": "false"})

    def _wire(self, request: web.Request) -> Wire:
        resource = request.match_info.route.resource
        return self._wires.get(resource.canonical if resource else "", self._openai)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlpipe"}
        return _json({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        wire = self._wire(request)
        try:
            body = await request.read()
            said = strict_json(body)
        except (ValueError, RecursionError, web.RequestPayloadError) as error:
            raise ChatRefused(400, f"the body is no JSON: {error}", "invalid_json") from error
        wanted, guest = wire.read(said), self._guests.get(request.match_info["rollout"])
        if guest is None:
            raise ChatRefused(401, "the rollout ended while the call was read", "invalid_api_key")
        sending = sending_of(request, body)
        call = guest.calls.call(sending, lambda: guest.rollout.answer(wanted))
        if wanted.stream:
            await asyncio.wait({call.answering}, timeout=KEEP_ALIVE_S)
            if call.answering.done():
                call.answering.result()  # a refusal must be known before the status is sent
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        else:
            # a client that hangs up does not end it
            response = _json(wire.whole(wanted, await asyncio.shield(call.answering)))
        with contextlib.suppress(ConnectionError):  # it has hung up, and may ask again
            await response.prepare(request)
            if wanted.stream:
                async for event in _events(wire, wanted, call.answering):
                    await response.write(event.encode())
            await response.write_eof()
            call.given_to(sending)
        return response


async def _events(wire: Wire, call: ChatRequest, answering: asyncio.Future[GivenReplies]) -> AsyncIterator[str]:
    """The server-sent events of a reply, which begin once the reply is stored; comments until
    then.
    """
    while not answering.done():
        yield ": the reply is being sampled\n\n"
        await asyncio.wait({answering}, timeout=KEEP_ALIVE_S)
    try:
        answer = answering.result()
    except ChatRefused as error:  # too late for a status
        yield f"event: error\ndata: {json_text(wire.error(error))}\n\n"
        return
    for event in wire.events(call, answer):
        yield event
