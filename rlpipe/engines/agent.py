"""`rlpipe host`: the engines of this node for a run that goes on elsewhere. Joins it through the store, serves it over HTTP.

GET /status; POST /serve (JSON, bearer key). A flow finds the hosts of its run in `runs/<run>/hosts/`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import shutil
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
RELOAD_WAIT_S = 10.0
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
        self.fault: Exception | None = None  # why the newest weights are not served
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
        """Starts to serve, and waits a moment for it: a run does not wait for a host that joins. /status tells what became of it."""
        body = await request.json()
        serving = asyncio.create_task(
            self._serve(ArtifactRef.from_json(body["policy"]), body["version"], Probe(**body["probe"]))
        )
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        await asyncio.wait({serving}, timeout=RELOAD_WAIT_S if self.host.weights else 0)
        if not serving.done():
            return web.json_response({}, status=202)
        return _fault(self.fault) if self.fault else web.json_response({})

    async def _serve(self, policy: ArtifactRef, version: int, probe: Probe) -> None:
        try:
            await self.host.serve(policy, version, probe)
            self.fault = None
        except (StoreError, EngineError, UserError, OSError, AssertionError) as error:
            self.fault = error
            log.error("weight version %d is not served: %s", version, error)

    async def close(self) -> None:
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self.host.close()

    async def status(self, request: web.Request) -> web.Response:
        """The engines that were proved to serve the asked version."""
        if self.fault is not None:
            return _fault(self.fault)
        try:
            clients = await self.host.clients(int(request.query["version"]))
        except EngineError as error:
            return _fault(error)
        return web.json_response({"engines": [{"name": client.name, "url": client.url} for client in clients]})


def _fault(error: Exception) -> web.Response:
    kind = next((name for name, known in FAULTS.items() if isinstance(error, known)), "EngineError")
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
    if others := [entry for entry in sets if not entry.startswith("engines.")]:
        raise UserError(f"--set {others[0]}: a host's own settings are those of its engines; the rest is the run's")
    config = override_config(await _config_of(store, run), sets)
    name = f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
    host = EngineHost(config, store, Path.cwd() / ".rlpipe" / f"host-{name}", name, address, engine_keys(key))
    agent = Agent(host, key)
    runner = web.AppRunner(agent.app())
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
        await agent.close()
        await runner.cleanup()
        await asyncio.to_thread(shutil.rmtree, host.work_dir / "weights", True)
