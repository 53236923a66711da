"""`rlpipe host`: the engines of this node for a run that goes on elsewhere. Joins it through the store, serves it over HTTP.

GET /status; POST /serve (JSON, bearer key). A flow finds the hosts of its run in `runs/<run>/hosts/`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import signal
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from rlpipe.config import PipelineConfig
from rlpipe.config_source import override_config
from rlpipe.engines.host import EngineHost
from rlpipe.launch import free_port
from rlpipe.store.backend import Store
from rlpipe.store.run import open_existing
from rlpipe.types import ArtifactRef, EngineError, JsonDict, StoreError, UserError, canonical_json
from rlpipe.weights import Probe

log = logging.getLogger(__name__)
KEY_VARIABLE = "RLPIPE_HOST_KEY"
RUN_WAIT_S, RUN_POLL_S = 600.0, 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FAULTS: dict[str, type[Exception]] = {"StoreError": StoreError, "EngineError": EngineError, "UserError": UserError}


@dataclass(frozen=True)
class HostRecord:
    """What a host leaves in the store, so that the run finds it."""

    name: str
    url: str
    kind: str


def engine_keys(key: str) -> tuple[str, str]:
    """API key and admin key of a host's engines, which both sides derive from the host's key."""
    api, admin = (hashlib.sha256(f"{key}:{name}".encode()).hexdigest() for name in ("api", "admin"))
    return api, admin


def hosts_folder(run_root: str) -> str:
    return f"{run_root}/hosts"


class Agent:
    """HTTP before an EngineHost."""

    def __init__(self, host: EngineHost, key: str) -> None:
        self.host = host
        self.key = key
        self.fault: Exception | None = None  # why the engines could not be started
        self._serving: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._allowed])
        app.add_routes([web.get("/status", self.status), web.post("/serve", self.serve)])
        return app

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer").strip()  # on loopback the key may be empty
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            return web.json_response({"error": "wrong or missing bearer key"}, status=401)
        return await handler(request)

    async def serve(self, request: web.Request) -> web.Response:
        """Waits for a reload; answers at once while the engines are started: a run does not wait for a host that joins."""
        body = await request.json()
        serving = asyncio.create_task(
            self._serve(ArtifactRef.from_json(body["policy"]), body["version"], Probe(**body["probe"]))
        )
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        if not self.host.engines:
            return web.json_response({}, status=202)
        try:
            await asyncio.shield(serving)
        except tuple(FAULTS.values()) as error:
            return _fault(error)
        return web.json_response({})

    async def _serve(self, policy: ArtifactRef, version: int, probe: Probe) -> None:
        starting = not self.host.engines
        try:
            await self.host.serve(policy, version, probe)
        except tuple(FAULTS.values()) as error:
            if not starting:
                raise
            self.fault = error
            log.error("the engines could not be started: %s", error)

    async def status(self, request: web.Request) -> web.Response:
        """The engines that were proved to serve the asked version."""
        try:
            if self.fault is not None:
                raise self.fault
            clients = await self.host.clients(int(request.query["version"]))
        except tuple(FAULTS.values()) as error:
            return _fault(error)
        return web.json_response({"engines": [{"name": client.name, "url": client.url} for client in clients]})


def _fault(error: Exception) -> web.Response:
    kind = next(name for name, known in FAULTS.items() if isinstance(error, known))
    return web.json_response({"error": str(error), "kind": kind}, status=409)


async def _config_of(store: Store, run: str) -> PipelineConfig:
    deadline = time.monotonic() + RUN_WAIT_S
    while True:
        try:
            return (await asyncio.to_thread(open_existing, store, run)).config
        except UserError:
            if time.monotonic() > deadline:
                raise
            log.info("waiting for run %s to be started", run)
            await asyncio.sleep(RUN_POLL_S)


async def join_run(store: Store, run: str, sets: list[str], address: str, port: int) -> None:
    """Joins a run (waiting until it is there), serves it until SIGTERM or SIGINT, and leaves.

    UserError when others could reach it without a key, or no such run was started within RUN_WAIT_S.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if address not in LOOPBACK and not key:
        raise UserError(
            f"address={address}: beyond loopback a host needs a key: set {KEY_VARIABLE} here and where the flow runs"
        )
    config = override_config(await _config_of(store, run), sets)
    name = f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
    host = EngineHost(config, store, Path.cwd() / ".rlpipe" / f"host-{name}", name, address, engine_keys(key))
    runner = web.AppRunner(Agent(host, key).app())
    await runner.setup()
    port = port or free_port()
    await web.TCPSite(runner, address, port).start()
    record_key = f"{hosts_folder(f'runs/{run}')}/{name}.json"
    record: JsonDict = asdict(HostRecord(name, f"http://{address}:{port}", config.engines.kind))
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        await asyncio.to_thread(store.create, record_key, canonical_json(record))
        log.info("host %s with %d %s engines joined run %s", name, config.engines.count, config.engines.kind, run)
        await ended.wait()
    finally:
        await asyncio.to_thread(store.delete, record_key)
        await host.close()
        await runner.cleanup()
