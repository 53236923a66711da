"""The routes of the engine: each is parse, ask the scheduler, answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from aiohttp import web

from rlpipe.engines.local.options import EngineOptions
from rlpipe.engines.local.protocol import Call, Job, Limits, RequestRefused, answer, parse_generate
from rlpipe.engines.local.scheduler import Scheduler, running_max
from rlpipe.types import JsonDict, UserError

HEARTBEAT_MAX_S = 60.0
HEALTH_TIMEOUT_S = 20.0
PAUSE_MODES = ("abort", "retract", "in_place")


class Routes:
    """Handlers, and the calls that wait for their answers. Lives on the event loop."""

    scheduler: Scheduler  # set once, before the first request

    def __init__(self, options: EngineOptions, limits: Limits) -> None:
        self.options = options
        self.limits = limits
        self._calls: dict[int, tuple[asyncio.Future[None], int]] = {}  # id(call) -> (answered, jobs that are missing)
        self._ids = itertools.count()
        self._seeds = itertools.count(secrets.randbits(63), 1 << 20)

    def add_to(self, app: web.Application) -> None:
        post: dict[str, Callable[[web.Request], Any]] = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/update_weights_from_disk": self.update_weights,
            "/flush_cache": self.flush,
            "/weights_checker": self.check_weights,
        }
        get: dict[str, Callable[[web.Request], Any]] = {
            "/flush_cache": self.flush,
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/ready": self.ready,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_load": self.load,
        }
        app.add_routes([*(web.post(path, handler) for path, handler in post.items())])
        app.add_routes([*(web.get(path, handler) for path, handler in get.items())])

    # sampling

    async def generate(self, request: web.Request) -> web.Response:
        try:
            call = parse_generate(await _body(request), self.limits, f"local-{next(self._ids)}", next(self._seeds))
            await self._run(call)
        except RequestRefused as error:
            return _refused(str(error))
        return web.json_response(answer(call))

    async def _run(self, call: Call) -> None:
        """Returns when all jobs of the call are finished; a caller that goes away ends them."""
        answered = asyncio.get_running_loop().create_future()
        self._calls[id(call)] = (answered, len(call.jobs))
        try:
            await self._ask(lambda: self.scheduler.submit(call))
            await answered
        except asyncio.CancelledError:
            self.scheduler.ask(lambda: self.scheduler.abort_jobs(call.jobs))
            raise
        finally:
            del self._calls[id(call)]

    def settle(self, jobs: list[Job]) -> None:
        """Counts finished jobs; wakes the calls that have all of theirs."""
        for job in jobs:
            if id(job.call) not in self._calls:
                continue  # the caller went away
            answered, missing = self._calls[id(job.call)]
            assert missing > 0, f"{job.rid} was answered twice"
            self._calls[id(job.call)] = (answered, missing - 1)
            if missing == 1 and not answered.done():
                answered.set_result(None)

    async def _ask(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.scheduler.ask(action))

    # control

    async def pause(self, request: web.Request) -> web.Response:
        try:
            mode = (await _body(request)).get("mode", "abort")
        except RequestRefused as error:
            return _refused(str(error))
        if mode not in PAUSE_MODES:
            return _refused(f"mode={mode!r}: choose one of {PAUSE_MODES}")
        await self._ask(lambda: self.scheduler.pause(mode))
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def resume(self, _: web.Request) -> web.Response:
        await self._ask(self.scheduler.resume)
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def abort(self, request: web.Request) -> web.Response:
        try:
            body = await _body(request)
        except RequestRefused as error:
            return _refused(str(error))
        rid = body.get("rid")
        if not body.get("abort_all") and not (isinstance(rid, str) and rid):
            return _refused("rid: give the id of a request, or abort_all=true")
        await self._ask(lambda: self.scheduler.abort(None if body.get("abort_all") else rid))
        return web.json_response({})

    async def update_weights(self, request: web.Request) -> web.Response:
        try:
            body = await _body(request)
            folder, weight_version = body.get("model_path"), body.get("weight_version")
            if not isinstance(folder, str) or not isinstance(weight_version, (str, int, type(None))):
                raise RequestRefused("model_path must be a folder and weight_version a string")
            name = None if weight_version is None else str(weight_version)
            await self._ask(lambda: self.scheduler.update_weights(folder, name, body.get("flush_cache", True)))
        except (RequestRefused, UserError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def flush(self, _: web.Request) -> web.Response:
        await self._ask(self.scheduler.flush)
        return web.Response(text="Cache flushed.\n")

    async def check_weights(self, request: web.Request) -> web.Response:
        try:
            action = (await _body(request)).get("action")
        except RequestRefused as error:
            return _refused(str(error))
        if action != "checksum":
            return web.json_response({"success": False, "message": f"action={action!r}: only checksum is known"}, status=400)
        checksum = await self._ask(self.scheduler.model.checksum)
        return web.json_response({"success": True, "message": "Success.", "checksum": checksum})

    # state

    async def health(self, _: web.Request) -> web.Response:
        """503 when the scheduler has not finished a step for a minute; a pause is no fault."""
        return web.Response(status=200 if time.monotonic() - self.scheduler.heartbeat_s < HEARTBEAT_MAX_S else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """Samples one token; 503 when that takes too long or the engine is paused."""
        if self.scheduler.paused is not None:
            return web.Response(status=503)
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            await asyncio.wait_for(
                self._run(parse_generate(body, self.limits, f"health-{next(self._ids)}", 0)), HEALTH_TIMEOUT_S
            )
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200)

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.scheduler.paused is None else 503)

    async def model_info(self, _: web.Request) -> web.Response:
        scheduler = self.scheduler
        return web.json_response(
            {
                "model_path": scheduler.model.folder,
                "tokenizer_path": self.options.model_path,
                "is_generation": True,
                "weight_version": scheduler.weight_version,
                "model_type": scheduler.model.lm.config.model_type,
                "architectures": scheduler.model.lm.config.architectures,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        options = self.options
        return web.json_response(
            {
                "engine": "rlpipe-local",
                "version": version("rlpipe"),
                "model_path": self.scheduler.model.folder,
                "weight_version": self.scheduler.weight_version,
                "device": options.device,
                "threads": options.threads,
                "context_length": options.context_tokens_max,
                "max_running_requests": running_max(options.context_tokens_max),
                "enable_deterministic_inference": True,
            }
        )

    async def load(self, _: web.Request) -> web.Response:
        return web.json_response(await self._ask(self.scheduler.load))


async def _body(request: web.Request) -> JsonDict:
    raw = await request.read()
    try:
        value = json.loads(raw) if raw else {}
    except ValueError as error:
        raise RequestRefused(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestRefused("the body must be a JSON object")
    return value


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequest", "code": 400}}, status=400)
