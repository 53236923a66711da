"""The routes of the engine: each is parse, ask the scheduler, answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ValidationError

from rlpipe.engines.local.checkpoint import checksums
from rlpipe.engines.local.protocol import Limits, MalformedBody, RequestRefused, answer, first_fault, parse_generate
from rlpipe.engines.local.scheduler import Scheduler
from rlpipe.secrecy import key_fits
from rlpipe.types import UserError

BODY_BYTES_MAX = 1 << 30
HEARTBEAT_MAX_S = 60.0
HEALTH_TIMEOUT_S = 20.0  # as SGLang's
HEALTH_POLL_S = 0.05
OPEN_PATHS = frozenset({"/health", "/ready"})
CONTROL_PATHS = frozenset(
    {
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/update_weights_from_disk",
        "/flush_cache",
        "/weights_checker",
    }
)
Form = TypeVar("Form", bound=BaseModel)


class Pause(BaseModel):
    """What /pause_generation takes."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(BaseModel):
    """What /abort_request takes."""

    rid: str = ""
    abort_all: bool = False


class Update(BaseModel):
    """What /update_weights_from_disk takes."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class Check(BaseModel):
    """What /weights_checker takes."""

    action: str = "checksum"


def key_wanted(path: str, api_key: str, admin_api_key: str) -> str:
    """The key that a path takes; empty when it is open. With one key set, that key opens everything it guards."""
    if path in OPEN_PATHS:
        return ""
    return (admin_api_key or api_key) if path in CONTROL_PATHS else api_key


class Routes:
    """Handlers before a scheduler. Lives on the event loop. Two keys: the API key samples, the admin key controls."""

    def __init__(self, scheduler: Scheduler, limits: Limits, api_key: str, admin_api_key: str) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._keys = api_key, admin_api_key
        self._tokenizer_path = scheduler.model.folder
        self._ids = itertools.count()
        self._seeds = itertools.count(secrets.randbits(63), 1 << 20)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/abort_request", self.abort),
                web.post("/update_weights_from_disk", self.update_weights),
                web.post("/flush_cache", self.flush),
                web.post("/weights_checker", self.check_weights),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/v1/loads", self.loads),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """401 to requests without the key that their path takes, 400 to those that are refused."""
        if not key_fits(request.headers.get("Authorization", ""), key_wanted(request.path, *self._keys)):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except RequestRefused as error:
            return web.json_response(error.body(), status=400)

    async def _ask(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.scheduler.ask(action))

    # sampling

    async def generate(self, request: web.Request) -> web.Response:
        """Answers when all jobs of the call are finished; a caller that goes away ends them."""
        call = parse_generate(await _json(request), self.limits, f"local-{next(self._ids)}", next(self._seeds))
        try:
            await self._ask(lambda: self.scheduler.submit(call))
            await call.answered.wait()
        except asyncio.CancelledError:
            self.scheduler.ask(lambda: self.scheduler.abort_jobs(call.jobs))
            raise
        return web.json_response(answer(call))

    # control

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await _form(Pause, request)).mode
        await self._ask(lambda: self.scheduler.pause(mode))
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def resume(self, _: web.Request) -> web.Response:
        await self._ask(self.scheduler.resume)
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def abort(self, request: web.Request) -> web.Response:
        """200 whether or not there was something to end."""
        asked = await _form(Abort, request)
        await self._ask(lambda: self.scheduler.abort(None if asked.abort_all else asked.rid))
        return web.Response()

    async def update_weights(self, request: web.Request) -> web.Response:
        asked = await _form(Update, request)
        try:
            await self._ask(lambda: self.scheduler.update_weights(asked.model_path, asked.weight_version, asked.flush_cache))
        except UserError as error:
            return web.json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        told = f" Weight version updated to {asked.weight_version}." if asked.weight_version is not None else ""
        message = f"Succeeded to update model weights.{told}"
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def flush(self, _: web.Request) -> web.Response:
        if await self._ask(self.scheduler.flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def check_weights(self, request: web.Request) -> web.Response:
        action = (await _form(Check, request)).action
        if action != "checksum":
            return web.json_response({"success": False, "message": f"action={action!r}: only checksum is known"}, status=400)
        each, overall = await self._ask(lambda: checksums(self.scheduler.model.lm))
        ranks = [{"checksums": each, "per_gpu_checksum": overall}]
        return web.json_response({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": overall})

    # state

    async def health(self, _: web.Request) -> web.Response:
        """503 when the scheduler has not finished a step for a minute, or a pause does not end: it is waited for, as in SGLang."""
        deadline_s = time.monotonic() + HEALTH_TIMEOUT_S
        while self.scheduler.paused is not None and time.monotonic() < deadline_s:
            await asyncio.sleep(HEALTH_POLL_S)
        steps = time.monotonic() - self.scheduler.heartbeat_s < HEARTBEAT_MAX_S
        return web.Response(status=200 if steps and self.scheduler.paused is None else 503)

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.scheduler.paused is None else 503)

    async def model_info(self, _: web.Request) -> web.Response:
        model = self.scheduler.model
        return web.json_response(
            {
                "model_path": model.folder,
                "tokenizer_path": self._tokenizer_path,
                "is_generation": True,
                "weight_version": self.scheduler.weight_version,
                "architectures": model.lm.config.architectures,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "engine": "rlpipe-local",
                "version": version("rlpipe"),
                "weight_version": self.scheduler.weight_version,
                "context_length": self.limits.context_tokens_max,
                "enable_deterministic_inference": True,
            }
        )

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"version": version("rlpipe"), "loads": [await self._ask(self.scheduler.load)]})


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise MalformedBody(f"the body is no JSON: {error}") from error


async def _form(form: type[Form], request: web.Request) -> Form:
    try:
        return form.model_validate(await _json(request))
    except ValidationError as error:
        raise MalformedBody(first_fault(error)) from error
