"""Engines on other nodes: `HostService` runs there, for `rlpipe host` and the deployment
serve-engines, `RemoteHost` in the flow.

GET /status, /files/KEY; POST /serve, /release (JSON, bearer key). A flow finds the hosts of its run
in the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, Never

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from rlpipe.base.errors import EngineError, StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.config import extras
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.secrecy import key_fits
from rlpipe.engines.client import EngineClient, EngineUnavailable
from rlpipe.engines.host import EngineHost
from rlpipe.engines.kind import kind_of
from rlpipe.engines.weights import Probe
from rlpipe.processes.launch import free_port
from rlpipe.services.finder import ANSWER_TIMEOUT_S, Peer
from rlpipe.services.registration import ENGINES, FILES, Registration, ServiceRecord
from rlpipe.store.artifacts import MANIFEST
from rlpipe.store.backend import Store
from rlpipe.store.commits import load_published
from rlpipe.store.nearby import Nearby
from rlpipe.store.relay import Relay
from rlpipe.store.transfer import PART_BYTES

log = logging.getLogger(__name__)
RELOAD_WAIT_S = 10.0
SERVE_TIMEOUT_S = 20.0  # more than RELOAD_WAIT_S
RELEASE_AGAIN_S = 1.0
COMMIT_WAIT_S = 7200.0  # for an upload
COMMIT_POLL_S = 1.0
SHUTDOWN_S = 1.0  # to finish the answers that are being sent
FILE_CHUNK = 1 << 20
# of a request that has the key; the hashes of a policy's parts are 8 MB for each TB
BODY_BYTES_MAX = 1 << 26
LOCAL_FAULTS = (StoreError, EngineError, ValueError, OSError, AssertionError)
# any other fault is an EngineError
FAULTS: dict[str, type[Exception]] = {"StoreError": StoreError, "UserError": UserError}


def engine_keys(key: str) -> tuple[str, str]:
    """Derives the API key and the admin key of a host's engines from the host's key; done on both
    sides.
    """
    api, admin = (hashlib.sha256(f"{key}:{name}".encode()).hexdigest() for name in ("api", "admin"))
    return api, admin


class ServeRequest(BaseModel):
    """The body of a /serve."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: Annotated[ArtifactRef, PlainValidator(ArtifactRef.from_json)]
    version: int
    probe: Probe
    nearby: Nearby | None = None


class ServedEngine(BaseModel):
    """An engine in a host's status."""

    name: str
    url: str
    adapted: bool


class HostStatus(BaseModel):
    """The answer to a /status."""

    engines: list[ServedEngine]
    progress: int = 0


class HostService:
    """This node's engines, as a service of a run on another node.

    `address`: of this node; `port` 0: chooses a free one.
    """

    def __init__(self, store: Store, config: PipelineConfig, name: str, address: str, port: int = 0) -> None:
        self._address = address
        self._port = port or free_port()
        record = ServiceRecord(name, f"http://{address}:{self._port}", config.engines.kind)
        self.registration, self.key = Registration(store, f"runs/{config.run}", ENGINES, record), record.key
        work_dir = self.registration.work_dir(config.scratch_folder)
        self.relay = Relay(work_dir / "relayed", record.files_url)
        self.host = EngineHost(config, store, work_dir, name, address, engine_keys(self.key), self.relay)
        self.fault: Exception | None = None  # the reason why the newest weights are not served
        self._serving: dict[asyncio.Task[None], ServeRequest] = {}
        self._wanted: ServeRequest | None = None  # the newest
        self._releasing: asyncio.Task[None] | None = None
        self._waited = 0  # number of checks whether the store has the policy by now
        self._called_at = time.monotonic()

    async def work(self) -> Never:
        runner = web.AppRunner(self.app(), shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._address, self._port).start()
            engines = self.host.config.engines
            log.info("host %s with %d %s engines joined its run", self.host.name, engines.count, engines.kind)
            while True:
                await asyncio.sleep(3600)
        finally:
            await runner.cleanup()

    async def idle_s(self) -> float:
        """Seconds since the run's last request; while it samples, it sends requests all the
        time.
        """
        return time.monotonic() - self._called_at

    async def close(self) -> None:
        under_way = [*self._serving, *([self._releasing] if self._releasing else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self.host.close()
        await asyncio.to_thread(shutil.rmtree, self.host.work_dir / "weights", True)
        await asyncio.to_thread(self.relay.clear)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._allowed], client_max_size=BODY_BYTES_MAX)
        routes = [web.get("/status", self.status), web.post("/serve", self.serve), web.post("/release", self.release)]
        app.add_routes([*routes, web.get(f"{FILES}/{{key:.+}}", self.file)])
        return app

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handles a request that has the key; answers 401 to one without it, and 409 to a fault."""
        if not key_fits(request.headers.get("Authorization", ""), self.key):
            return web.json_response({"error": "wrong or missing bearer key"}, status=401)
        self._called_at = time.monotonic()
        try:
            return await handler(request)
        except LOCAL_FAULTS as fault:
            return web.json_response({"error": str(fault), "kind": type(fault).__name__}, status=409)

    async def serve(self, request: web.Request) -> web.Response:
        """Begins to serve a policy, and waits a moment for it, as a run must not wait for a host
        that joins. /status then has the result.
        """
        try:
            wanted = ServeRequest.model_validate_json(await request.read())
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            raise UserError(f"/serve: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error
        # a client that waits repeats its request
        serving = next((task for task, body in self._serving.items() if body == wanted), None)
        if serving is None:
            if self._releasing and self._releasing.done():  # nobody asked for its end
                self._releasing = None
            serving = asyncio.create_task(self._serve(wanted))
            self._serving[serving] = wanted
            serving.add_done_callback(self._serving.pop)
        await asyncio.wait({serving}, timeout=RELOAD_WAIT_S if self.host.weights else 0)
        if not serving.done():
            return web.json_response({}, status=202)
        self._raise_fault()
        return web.json_response({})

    async def _serve(self, wanted: ServeRequest) -> None:
        self._wanted = wanted
        load = partial(self.host.serve, wanted.policy, wanted.version, wanted.probe)
        try:
            if await load_published(load, wanted.nearby, partial(self._until_committed, wanted)):
                self.fault = None
        except LOCAL_FAULTS as error:
            self.fault = error
            log.error("weight version %d is not served: %s", wanted.version, error)

    async def release(self, request: web.Request) -> web.Response:
        """Begins to free the engines' memory (`engines.colocate`), and waits a moment for it;
        answers 202 until it is done. A `serve` in progress is finished first; one that waits for
        the store is dropped.
        """
        ended = self._releasing if self._releasing and self._releasing.done() else None
        if ended:  # after a 202: its fault is this request's answer; freeing twice does nothing
            self._releasing = None
            ended.result()
        if self._releasing is None:
            self._wanted = None
            self._releasing = asyncio.create_task(self._release())
        releasing = self._releasing
        await asyncio.wait({releasing}, timeout=RELOAD_WAIT_S)
        if not releasing.done():
            return web.json_response({}, status=202)
        if self._releasing is releasing:
            self._releasing = None
        releasing.result()
        return web.json_response({})

    async def _release(self) -> None:
        await asyncio.gather(*self._serving)
        await self.host.release()

    async def _until_committed(self, wanted: ServeRequest, fault: StoreError) -> bool:
        """Waits until the store has a policy that could not be fetched from the trainer's node;
        raises the fault if the store had it already. False once another policy is wanted.
        """
        manifest, deadline = f"{wanted.policy.folder}/{MANIFEST}", time.monotonic() + COMMIT_WAIT_S
        if await asyncio.to_thread(self.host.store.exists, manifest):
            raise fault
        log.warning(
            "weight version %d cannot be fetched from the trainer's node, so this host waits until the store has it"
            " (%s)",
            wanted.version,
            fault,
        )
        while wanted is self._wanted and not await asyncio.to_thread(self.host.store.exists, manifest):
            if time.monotonic() > deadline:
                raise fault
            self._waited += 1
            await asyncio.sleep(COMMIT_POLL_S)
        return wanted is self._wanted

    async def status(self, request: web.Request) -> web.Response:
        """Answers with the engines that were proved to serve the requested version, and the
        progress of a fetch or load.
        """
        self._raise_fault()
        version = request.query.get("version", "")
        if not re.fullmatch(r"-?\d{1,9}", version):
            raise UserError(f"/status?version={version:.20}: a weight version is a number")
        clients = await self.host.clients(int(version))
        engines = [ServedEngine(name=client.name, url=client.url, adapted=client.adapted) for client in clients]
        return web.json_response(HostStatus(engines=engines, progress=self.host.progress + self._waited).model_dump())

    async def file(self, request: web.Request) -> web.StreamResponse:
        """Answers with a part of a file of weights that this host has, or is fetching, for the
        hosts of other nodes.
        """
        key, part = request.match_info["key"], request.http_range
        start, end = part.start, part.stop
        is_part = isinstance(start, int) and isinstance(end, int) and 0 < end - start <= PART_BYTES
        path = await self.relay.part(key, start) if is_part else None
        if path is None:
            return web.json_response({"error": f"{key!r:.200} is not here"}, status=404)
        return web.FileResponse(path, chunk_size=FILE_CHUNK)

    def _raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault


class RemoteHost:
    """The engines of another node, for the pool.

    They outlive the flow: the next start of the run finds them running.
    """

    def __init__(self, peer: Peer, session: aiohttp.ClientSession) -> None:
        self.name = peer.record.name
        self.files_url = peer.record.files_url
        self.peer = peer
        self.session = session
        self.progress = 0  # from the host's last status

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None:
        if (
            nearby is not None and nearby.sender is not None and nearby.sender.key
        ):  # a child process of the flow, which other nodes cannot reach
            nearby = replace(nearby, sender=None)
        body = {"policy": policy.as_json(), "version": version, "probe": asdict(probe)}
        body |= {"nearby": asdict(nearby)} if nearby else {}
        await self._call("POST", "/serve", body, SERVE_TIMEOUT_S)

    async def release(self) -> None:
        """Returns when the memory of its engines is free: they freed it, or ended with a host that
        is lost. EngineError when the host refuses.
        """
        while True:
            try:
                status, answer = await self.peer.call("POST", "/release", {}, SERVE_TIMEOUT_S)
            except ConnectionError as error:
                if self.peer.lost:
                    log.warning("%s: this host counts as lost, and the memory of its engines as free", error)
                    return
                await asyncio.sleep(RELEASE_AGAIN_S)
                continue
            if status == 200:
                return
            if status != 202:
                raise EngineError(f"host {self.name} did not free the memory of its engines ({status}): {answer}")

    async def clients(self, version: int) -> list[EngineClient]:
        if self.peer.resting:
            raise EngineUnavailable(f"host {self.name} could not be reached a moment ago")
        answer = await self._call("GET", f"/status?version={version}", None, ANSWER_TIMEOUT_S)
        try:
            status = HostStatus.model_validate(answer)
        except ValidationError as error:
            raise EngineUnavailable(
                f"host {self.name} does not answer as an engine host does: {answer!r:.200}"
            ) from error
        self.progress = status.progress
        kind, keys = self.peer.record.engine, engine_keys(self.peer.record.key)
        if kind not in extras.ENGINES:  # a host of newer code
            raise EngineUnavailable(
                f"host {self.name} has engines of kind {kind!r}, which this version of rlpipe does not know"
            )
        clients = [kind_of(kind).client(engine.name, engine.url, self.session, keys) for engine in status.engines]
        for client, engine in zip(clients, status.engines, strict=True):
            client.adapted = engine.adapted
        return clients

    async def close(self) -> None: ...

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> dict[str, Any]:
        """Makes a call; returns the host's answer. A fault on the host is raised here with the same
        type.
        """
        try:
            status, answer = await self.peer.call(method, path, body, timeout_s)
        except ConnectionError as error:
            raise EngineUnavailable(f"host {error}") from error
        if status in (200, 202):
            return answer
        if "kind" in answer:
            raise FAULTS.get(str(answer["kind"]), EngineError)(str(answer.get("error")))
        raise EngineUnavailable(f"host {self.name} answered {status}: {answer}")
