"""`rlpipe serve`: OpenAI's API in front of a stored policy.

Routes: GET /v1/models, GET /health; POST /v1/chat/completions, /v1/completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from rlpipe.base.errors import EngineError, UserError
from rlpipe.chat_api.chat import ChatRefused, json_text
from rlpipe.chat_api.openai_wire import OpenAiWire
from rlpipe.config.secrecy import key_fits
from rlpipe.engines.client import Completion, RequestRefused
from rlpipe.extras.serve.policy import ServedPolicy, Spoken, served
from rlpipe.extras.serve.routes import ChatRoute, Route, SentPart, TextRoute, Wanted
from rlpipe.extras.serve.settings import too_long
from rlpipe.records.messages import strict_json
from rlpipe.services.registration import LOOPBACK
from rlpipe.store.run import Run

KEY_VARIABLE = "RLPIPE_SERVE_KEY"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY_BYTES_MAX = 64 << 20
BACKLOG = 1024
SHUTDOWN_S = 2.0  # to finish the answers that are being sent
SAMPLING_MAX = 1024  # completions of one request
News = tuple[int, str, Completion] | None  # choice, its text so far and its tokens; None: all have ended
_json = functools.partial(web.json_response, dumps=json_text)


class PolicyServer:
    """The handlers. `key`: the bearer key of all routes but /health; empty: none."""

    def __init__(self, policy: ServedPolicy, key: str) -> None:
        self._policy, self._key = policy, key
        self._wire = OpenAiWire(policy.tokenizer)
        routes: dict[str, Route] = {CHAT: ChatRoute(policy, self._wire), TEXT: TextRoute(policy)}
        self.app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        self.app.add_routes([web.post(path, functools.partial(self._answer, to)) for path, to in routes.items()])
        self.app.add_routes([web.get("/v1/models", self._models), web.get("/health", self._health)])

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers 401 without the key, and each refusal as an error in OpenAI's form."""
        try:
            if request.path != "/health" and not key_fits(request.headers.get("Authorization", ""), self._key):
                raise ChatRefused(401, f"the API key is not that of {KEY_VARIABLE}", "invalid_api_key")
            if not self._key and request.url.host not in LOOPBACK:  # a page of another site (DNS rebinding)
                raise ChatRefused(403, f"without {KEY_VARIABLE} the host must be 127.0.0.1 or localhost", "wrong_host")
            origin = request.headers.get("Origin")  # of a page that a browser shows
            if not self._key and origin is not None and urlsplit(origin).hostname not in LOOPBACK:
                raise ChatRefused(403, f"without {KEY_VARIABLE} no page of another site may ask", "wrong_origin")
            return await handler(request)
        except ChatRefused as error:
            refused = error
        except web.HTTPException as error:
            refused = ChatRefused(error.status, f"{request.method} {request.path}: {error.reason}", "not_found")
        return _json(self._wire.error(refused), status=refused.status)

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"policy": self._policy.name})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._policy.name, "object": "model", "created": 0, "owned_by": "rlpipe"}
        return _json({"object": "list", "data": [model]})

    async def _answer(self, route: Route, request: web.Request) -> web.StreamResponse:
        """Answers a request that samples; one whose client has hung up is cancelled."""
        try:
            body = strict_json(await request.read())
        except (ValueError, RecursionError, web.RequestPayloadError) as error:
            raise ChatRefused(400, f"the body is no JSON: {error}", "invalid_json") from error
        wanted = await asyncio.to_thread(route.read, body)
        if any(self._policy.room(prompt) <= 0 for prompt in wanted.prompts):
            raise too_long(self._policy)
        if len(wanted.prompts) * wanted.settings.num_choices > SAMPLING_MAX:
            raise ChatRefused(400, f"n: at most {SAMPLING_MAX} completions in one request", "unsupported", "n")
        if wanted.chat.stream:
            return await self._stream(route, request, wanted)
        return _json(route.whole(wanted, await self._spoken(wanted, None)))

    async def _spoken(self, wanted: Wanted, news: asyncio.Queue[News] | None) -> list[Spoken]:
        """Samples all choices, prompt by prompt. ChatRefused when the engines fail or refuse."""
        settings, tasks = wanted.settings, list[asyncio.Task[Spoken]]()
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in wanted.prompts:
                    for index in range(settings.num_choices):
                        params, place = settings.of_choice(index, self._policy.room(prompt)), len(tasks)
                        hear = None if news is None or not wanted.streams_text else _telling(news, place)
                        tasks.append(group.create_task(self._policy.say(prompt, params, settings.stops, hear)))
        except ExceptionGroup as failures:  # those of all choices are alike: one is enough
            fault = failures.exceptions[0]
            if isinstance(fault, RequestRefused):
                raise ChatRefused(400, f"the engine refused: {fault}", "engine_refused") from fault
            if isinstance(fault, EngineError):
                raise ChatRefused(503, f"no engine answers: {fault}", "engine_lost") from fault
            raise
        return [task.result() for task in tasks]

    async def _stream(self, route: Route, request: web.Request, wanted: Wanted) -> web.StreamResponse:
        news = asyncio.Queue[News]()
        answering = asyncio.create_task(self._spoken(wanted, news))
        answering.add_done_callback(lambda _: news.put_nowait(None))
        try:
            first = await news.get()
            if first is None:
                answering.result()  # a refusal must be known before the status is sent
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            with contextlib.suppress(ConnectionError):  # it has hung up
                await answer.prepare(request)
                async for event in self._events(route, wanted, first, news, answering):
                    await answer.write(event.encode())
                await answer.write_eof()
            return answer
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _events(
        self, route: Route, wanted: Wanted, one: News, news: asyncio.Queue[News], answering: asyncio.Task[list[Spoken]]
    ) -> AsyncIterator[str]:
        """The events of a stream that begins with the news `one`."""
        head = route.head()
        sent = [SentPart(index) for index in range(len(wanted.prompts) * wanted.settings.num_choices)]
        while one is not None:
            index, text, so_far = one
            of = sent[index]
            # an engine that takes over may say what was sent already, or not all of it
            if text.startswith(of.text) and len(text) > len(of.text):
                yield route.part(wanted, head, of, text[len(of.text) :], so_far)
                of.text, of.num_tokens = text, len(so_far.tokens) if wanted.streams_logprobs else 0
            one = await news.get()
        try:
            spoken = answering.result()
        except ChatRefused as error:  # too late for a status
            yield f"data: {json_text(self._wire.error(error))}\n\n"
            return
        for of, said in zip(sent, spoken, strict=True):
            for event in route.rest(wanted, head, of, said):
                yield event
        for event in route.end(wanted, head, spoken):
            yield event


def _telling(news: asyncio.Queue[News], place: int) -> Callable[[str, Completion], None]:
    return lambda text, so_far: news.put_nowait((place, text, so_far))


def serve_key(host: str) -> str:
    """The bearer key of the server; empty: none. UserError when other machines could reach it
    without one.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if host not in LOOPBACK and not key:
        raise UserError(f"--host {host}: beyond loopback the server needs a key: set {KEY_VARIABLE}")
    return key


async def serve_policy(run: Run, version: int | None, host: str, port: int, say: Callable[..., Any]) -> None:
    """Serves a policy until it is cancelled; `say` gets the address.

    UserError when it cannot listen there, or there is no such policy; EngineError when no engine
    serves it.
    """
    key = serve_key(host)
    async with served(run, version) as policy:
        runner = web.AppRunner(
            PolicyServer(policy, key).app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
            except (OSError, OverflowError) as error:
                raise UserError(
                    f"--host {host} --port {port}: cannot listen there ({error}); --port 0 takes a free one"
                ) from error
            name = f"[{host}]" if ":" in host else host
            say(f"{policy.name} answers at http://{name}:{runner.addresses[0][1]}/v1; Ctrl-C ends it")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
