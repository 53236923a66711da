"""Hosts on other nodes, as the pool sees them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict

import aiohttp

from rlpipe.engines.agent import FAULTS, engine_keys
from rlpipe.engines.client import EngineClient, EngineUnavailable, new_session
from rlpipe.engines.commands import client_of
from rlpipe.services import ENGINES, ServiceRecord, registered, service_key
from rlpipe.store.backend import Store
from rlpipe.types import ArtifactRef, EngineError, JsonDict, StoreError, UserError
from rlpipe.weights import Probe

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 3.0
STATUS_TIMEOUT_S = 5.0
SERVE_TIMEOUT_S = 20.0  # longer than the agent waits for a reload
REST_FIRST_S, REST_MAX_S = 1.0, 60.0  # a host that cannot be reached is left alone for so long, doubled each time


class RemoteHost:
    """The engines of another node, behind its agent."""

    def __init__(self, record: ServiceRecord, session: aiohttp.ClientSession, key: str) -> None:
        self.name = record.name
        self.record = record
        self.session = session
        self.key = key
        self._clients: dict[str, EngineClient] = {}
        self._rest_s = 0.0
        self._rest_until = 0.0
        self._lost_at: float | None = None  # when it could not be reached for the first time since it last was

    @property
    def lost_s(self) -> float:
        """For how many seconds it could not be reached, as far as somebody tried."""
        return time.monotonic() - self._lost_at if self._lost_at is not None else 0.0

    async def answers(self) -> bool:
        """Whether it can be reached now, whatever it has to say."""
        try:
            await self._call("GET", "/status?version=-1", None, STATUS_TIMEOUT_S)
        except EngineUnavailable:
            return False
        except (EngineError, StoreError, UserError):
            return True
        return True

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe) -> None:
        body = {"policy": policy.as_json(), "version": version, "probe": asdict(probe)}
        await self._call("POST", "/serve", body, SERVE_TIMEOUT_S)

    async def clients(self, version: int) -> list[EngineClient]:
        if time.monotonic() < self._rest_until:
            raise EngineUnavailable(f"host {self.name} could not be reached a moment ago")
        told = await self._call("GET", f"/status?version={version}", None, STATUS_TIMEOUT_S)
        return [self._client(engine["name"], engine["url"]) for engine in told["engines"]]

    async def close(self) -> None:
        """The engines stay: another start of the run finds them warm."""

    def _client(self, name: str, url: str) -> EngineClient:
        if name not in self._clients:
            self._clients[name] = client_of(self.record.engine, name, url, self.session, engine_keys(self.key))
        return self._clients[name]

    async def _call(self, method: str, path: str, body: JsonDict | None, timeout_s: float) -> JsonDict:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self.key}"}
        url = self.record.url + path
        try:
            async with self.session.request(method, url, json=body, headers=headers, timeout=timeout) as answer:
                told = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self._lost_at = self._lost_at or time.monotonic()
            if time.monotonic() >= self._rest_until:  # calls that fail together are one fault
                self._rest_s = min(max(2 * self._rest_s, REST_FIRST_S), REST_MAX_S)
                self._rest_until = time.monotonic() + self._rest_s
            raise EngineUnavailable(f"host {self.name} at {self.record.url}: {type(error).__name__} {error}") from error
        self._rest_s, self._lost_at = 0.0, None
        if answer.status in (200, 202):
            return told
        if "kind" in told:
            raise FAULTS.get(told["kind"], EngineError)(told["error"])
        raise EngineUnavailable(f"host {self.name} answered {answer.status}: {told}")


class RegisteredHosts:
    """The hosts that serve a run: looked up in the store, so that they may come and go while it runs."""

    def __init__(self, store: Store, run_root: str) -> None:
        self.store = store
        self.run_root = run_root
        self._hosts: dict[str, RemoteHost] = {}  # by the start of the service
        self._session: aiohttp.ClientSession | None = None

    async def current(self) -> list[RemoteHost]:
        """Those that have joined and not left."""
        records = {record.start: record for record in await asyncio.to_thread(registered, self.store, self.run_root, ENGINES)}
        for start in records.keys() - self._hosts.keys():
            log.warning("host %s has joined", records[start].name)
            self._session = self._session or new_session()
            self._hosts[start] = RemoteHost(records[start], self._session, service_key())
        for start in self._hosts.keys() - records.keys():
            log.warning("host %s has left", self._hosts.pop(start).name)
        return list(self._hosts.values())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
