"""The engines of this node as a service of a run that goes on elsewhere: `rlpipe host`, the deployment serve-engines.

GET /status; POST /serve (JSON, bearer key). A flow finds the hosts of its run in the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
import time
from typing import Annotated

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from rlpipe.config import PipelineConfig
from rlpipe.engines.host import EngineHost
from rlpipe.launch import free_port
from rlpipe.secrecy import key_fits
from rlpipe.services import ENGINES, Registration, ServiceRecord, service_key
from rlpipe.store.backend import Store
from rlpipe.types import ArtifactRef, EngineError, StoreError, UserError
from rlpipe.weights import Probe

log = logging.getLogger(__name__)
RELOAD_WAIT_S = 10.0
FAULTS: dict[str, type[Exception]] = {"StoreError": StoreError, "UserError": UserError}  # all else is an EngineError


def engine_keys(key: str) -> tuple[str, str]:
    """API key and admin key of a host's engines, which both sides derive from the host's key."""
    api, admin = (hashlib.sha256(f"{key}:{name}".encode()).hexdigest() for name in ("api", "admin"))
    return api, admin


class Asked(BaseModel):
    """What a /serve asks for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: Annotated[ArtifactRef, PlainValidator(ArtifactRef.from_json)]
    version: int
    probe: Probe


class Agent:
    """HTTP before an EngineHost."""

    def __init__(self, host: EngineHost, key: str) -> None:
        self.host = host
        self.key = key
        self.fault: Exception | None = None  # why the newest weights are not served
        self._serving: set[asyncio.Task[None]] = set()
        self._asked_at = time.monotonic()

    async def idle_s(self) -> float:
        """Seconds since the run last asked for anything; while it samples, it asks all the time."""
        return time.monotonic() - self._asked_at

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._allowed])
        app.add_routes([web.get("/status", self.status), web.post("/serve", self.serve)])
        return app

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not key_fits(request.headers.get("Authorization", ""), self.key):
            return web.json_response({"error": "wrong or missing bearer key"}, status=401)
        self._asked_at = time.monotonic()
        return await handler(request)

    async def serve(self, request: web.Request) -> web.Response:
        """Starts to serve, and waits a moment for it: a run does not wait for a host that joins. /status tells what became of it."""
        try:
            asked = Asked.model_validate_json(await request.read())
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            return _fault(UserError(f"/serve: {'.'.join(map(str, fault['loc']))}: {fault['msg']}"))
        serving = asyncio.create_task(self._serve(asked))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        await asyncio.wait({serving}, timeout=RELOAD_WAIT_S if self.host.weights else 0)
        if not serving.done():
            return web.json_response({}, status=202)
        return _fault(self.fault) if self.fault else web.json_response({})

    async def _serve(self, asked: Asked) -> None:
        try:
            await self.host.serve(asked.policy, asked.version, asked.probe)
            self.fault = None
        except (StoreError, EngineError, UserError, OSError, AssertionError) as error:
            self.fault = error
            log.error("weight version %d is not served: %s", asked.version, error)

    async def close(self) -> None:
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self.host.close()

    async def status(self, request: web.Request) -> web.Response:
        """The engines that were proved to serve the asked version."""
        if self.fault is not None:
            return _fault(self.fault)
        version = request.query.get("version", "")
        if not re.fullmatch(r"-?\d{1,9}", version):
            return _fault(UserError(f"/status?version={version:.20}: a weight version is a number"))
        try:
            clients = await self.host.clients(int(version))
        except EngineError as error:
            return _fault(error)
        return web.json_response({"engines": [{"name": client.name, "url": client.url} for client in clients]})


def _fault(error: Exception) -> web.Response:
    return web.json_response({"error": str(error), "kind": type(error).__name__}, status=409)


async def serve_engines(
    store: Store, config: PipelineConfig, name: str, address: str, port: int, idle_timeout_s: float, ended: asyncio.Event
) -> str:
    """Serves a run with this node's engines until it is over; says why it ended. `address`: of this node; `port` 0: a free one."""
    key, port = service_key(), port or free_port()
    record = ServiceRecord(name, f"http://{address}:{port}", config.engines.kind)
    registration = Registration(store, f"runs/{config.run}", ENGINES, record)
    host = EngineHost(config, store, registration.work_dir(), name, address, engine_keys(key))
    agent = Agent(host, key)
    runner = web.AppRunner(agent.app())
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    try:
        await registration.enter()
        log.info("host %s with %d %s engines joined run %s", name, config.engines.count, config.engines.kind, config.run)
        return await registration.until_over(agent.idle_s, idle_timeout_s, ended)
    finally:
        await registration.leave()
        await agent.close()
        await runner.cleanup()
        await asyncio.to_thread(shutil.rmtree, host.work_dir / "weights", True)
