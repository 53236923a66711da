"""The OpenAI-compatible endpoint in front of the pool: each rollout has its own URL and key while its agent runs.

Routes, below the rollout's URL: POST /chat/completions, GET /models. Errors have OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from rlpipe.agents.chat import ChatRefused, ChatRequest, on_the_wire, read_request
from rlpipe.agents.rollout import AgentRollout, GivenReplies
from rlpipe.config.secrecy import key_fits
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.types import JsonDict

BODY_BYTES_MAX = 64 << 20
BACKLOG = 1024
KEEP_ALIVE_S = 10.0  # a stream whose reply is not there yet says so
SHUTDOWN_S = 2.0
MODEL = "policy"


@dataclass(frozen=True)
class Door:
    """Where one agent reaches its rollout."""

    base_url: str
    api_key: str


@dataclass(frozen=True)
class _Guest:
    rollout: AgentRollout
    api_key: str


class AgentEndpoint:
    """The server. Lives on the event loop that started it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._guests: dict[str, _Guest] = {}
        self._numbers = itertools.count()
        self._url = ""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/{rollout}/v1/chat/completions", self._complete),
                web.get("/{rollout}/v1/models", self._models),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)

    async def start(self, address: str) -> None:
        """Listens on a free port of `address`."""
        await self._runner.setup()
        await web.TCPSite(self._runner, address, 0, backlog=BACKLOG).start()
        host, port, *_ = self._runner.addresses[0]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()

    @contextlib.contextmanager
    def open(self, rollout: AgentRollout) -> Iterator[Door]:
        """A rollout's door, until the end of the `with`: from then on its key is refused."""
        number, key = str(next(self._numbers)), secrets.token_urlsafe(24)
        self._guests[number] = _Guest(rollout, key)
        try:
            yield Door(f"{self._url}/{number}/v1", key)
        finally:
            del self._guests[number]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """401 to whoever has no key of a rollout that runs, an error in OpenAI's shape to what is refused."""
        guest = self._guests.get(request.match_info.get("rollout", ""))
        try:
            if guest is None or not key_fits(request.headers.get("Authorization", ""), guest.api_key):
                raise ChatRefused(401, "the key is of no rollout that runs", "invalid_api_key")
            return await handler(request)
        except ChatRefused as error:
            return web.json_response(error.body, status=error.status, headers={"x-should-retry": "false"})
        except web.HTTPException as error:
            refused = ChatRefused(error.status, f"{request.method} {request.path}: {error.reason}", "not_found")
            return web.json_response(refused.body, status=error.status)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlpipe"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise ChatRefused(400, f"the body is no JSON: {error}", "invalid_json") from error
        call, rollout = read_request(body), self._guests[request.match_info["rollout"]].rollout
        is_repeated = request.headers.get("x-stainless-retry-count", "0") != "0"  # what OpenAI's clients say
        answering = asyncio.ensure_future(rollout.answer(call, is_repeated))
        if not call.stream:
            answer = await answering
            return web.json_response(self._completion(call, answer))
        await asyncio.wait({answering}, timeout=KEEP_ALIVE_S)
        if answering.done():
            answering.result()  # while a status can still say that it was refused
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for line in self._lines(call, answering):
            await response.write(line.encode())
        return response

    async def _lines(self, call: ChatRequest, answering: asyncio.Future[GivenReplies]) -> AsyncIterator[str]:
        """The server-sent events of a reply, which begin when it is kept; comments until then."""
        while not answering.done():
            yield ": the reply is being sampled\n\n"
            await asyncio.wait({answering}, timeout=KEEP_ALIVE_S)
        try:
            answer = answering.result()
        except ChatRefused as error:  # too late for a status
            yield f"data: {json.dumps(error.body)}\n\n"
            return
        for chunk in self._chunks(call, answer):
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    def _completion(self, call: ChatRequest, answer: GivenReplies) -> JsonDict:
        choices = [
            {
                "index": index,
                "message": on_the_wire(node.messages[-1]),
                "finish_reason": _finish_reason(sampled, node.messages[-1]),
                "logprobs": self._logprobs(call, sampled),
            }
            for index, (node, sampled) in enumerate(zip(answer.nodes, answer.sampled, strict=True))
        ]
        return {**_head(call, answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}

    def _chunks(self, call: ChatRequest, answer: GivenReplies) -> Iterator[JsonDict]:
        """Of each choice what it says, then why it ended; at last the usage, where it is wanted."""
        head = _head(call, answer, "chat.completion.chunk")
        for index, (node, sampled) in enumerate(zip(answer.nodes, answer.sampled, strict=True)):
            message = on_the_wire(node.messages[-1])
            calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", []))]
            said = {**message, **({"tool_calls": calls} if calls else {})}
            for delta, reason, logprobs in (
                (said, None, self._logprobs(call, sampled)),
                ({}, _finish_reason(sampled, message), None),
            ):
                yield {**head, "choices": [{"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}]}
        if call.with_usage:
            yield {**head, "choices": [], "usage": _usage(answer)}

    def _logprobs(self, call: ChatRequest, sampled: Completion) -> JsonDict | None:
        """Of every sampled token; nothing else is known of the distribution."""
        if not call.with_logprobs:
            return None
        pieces = [self._tokenizer.decode_raw([token]) for token in sampled.tokens]
        content: list[Any] = [
            {"token": piece, "logprob": logprob, "bytes": [*piece.encode()], "top_logprobs": []}
            for piece, logprob in zip(pieces, sampled.rollout_logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _head(call: ChatRequest, answer: GivenReplies, kind: str) -> JsonDict:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": call.model}


def _finish_reason(sampled: Completion, message: JsonDict) -> str:
    return "tool_calls" if sampled.finish_reason == "stop" and message.get("tool_calls") else sampled.finish_reason


def _usage(answer: GivenReplies) -> JsonDict:
    num_sampled = sum(len(sampled.tokens) for sampled in answer.sampled)
    context = answer.num_context_tokens
    return {"prompt_tokens": context, "completion_tokens": num_sampled, "total_tokens": context + num_sampled}
