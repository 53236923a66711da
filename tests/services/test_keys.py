"""Who listens at the address of a service that died learns no key that another service takes: not
the services' key, and none of another start."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.engines import host as host_module
from rlpipe.engines.client import EngineUnavailable
from rlpipe.engines.finding import HostFinder
from rlpipe.engines.remote import HostService, RemoteHost
from rlpipe.engines.weights import Probe
from rlpipe.processes.launch import free_port
from rlpipe.services.calls import new_session
from rlpipe.services.finder import Peer, nobody_starts
from rlpipe.services.registration import (
    ENGINES,
    FILES,
    KEY_VARIABLE,
    TRAINER,
    Registration,
    ServiceRecord,
    file_keys,
    registered,
)
from rlpipe.store.backend import Store
from rlpipe.store.documents import sealed
from rlpipe.store.nearby import Nearby, NodeDisk
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.process import RegisteredTrainer, TrainerService
from tests.paths import PRESETS

KEY, POLICY, MOMENT = "the-key-of-all-services", "runs/a/rl/00000/policy", "2026-03-04T05:06:07.000+00:00"


@dataclass
class Listener:
    """Listens at a dead service's address, keeps all that it is sent, and
    answers what keeps others talking."""

    url: str
    to: str = ""  # where it sends them on
    body: bytes = b""  # what it answers instead
    sent: list[str] = field(default_factory=list)  # whole requests
    keys: set[str] = field(default_factory=set)  # the bearer keys of these

    async def answer(self, request: web.Request) -> web.Response:
        self.sent.append(f"{request.method} {request.raw_path} {request.headers} {await request.text()}")
        self.keys.add(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if self.to:
            raise web.HTTPTemporaryRedirect(self.to + request.path)
        if request.path.startswith(FILES):
            return web.Response(status=404)
        engine = {"name": "engine-0", "url": self.url, "adapted": False}
        if self.body:
            return web.Response(body=self.body, content_type="application/json")
        return web.json_response({"engines": [engine], "progress": 0, "result": {}, "idle_s": 0})


@dataclass
class World:
    store: Store
    run: Run
    living: HostService
    host: Listener  # at the address of a host that died
    trainer: Listener  # at that of a trainer


def config_of(folder: Path) -> PipelineConfig:
    return read_config(
        "tiny", ["run=a", f"store=file://{folder}/store", "engines.place=elsewhere", "trainer.place=elsewhere"], PRESETS
    )


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path)
    run = create_or_continue(config)
    living = HostService(run.store, config, "living", "127.0.0.1")
    await living.registration.enter()
    listeners, runners = [], []
    for kind, name in ((ENGINES, "dead"), (TRAINER, "node-0")):
        listener = Listener(f"http://127.0.0.1:{free_port()}")
        await Registration(run.store, run.root, kind, ServiceRecord(name, listener.url, "sglang")).enter()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", listener.answer)
        listeners.append(listener)
        runners.append((web.AppRunner(app), int(listener.url.rpartition(":")[2])))
    runners.append((web.AppRunner(living.app()), living._port))
    for runner, port in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    yield World(run.store, run, living, *listeners)
    for runner, _ in runners:
        await runner.cleanup()


async def statuses(url: str, key: str) -> set[int]:
    """How a host's every door answers this key."""
    found = set()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        for method, path in (("GET", "/status?version=0"), ("POST", "/serve"), ("GET", f"{FILES}/x")):
            async with session.request(method, url + path) as response:
                found.add(response.status)
    return found


async def ask_all(world: World, folder: Path) -> None:
    """All that a flow says to a host and to its engines, and to a trainer; and a living
    host that is to fetch from both."""
    finder = HostFinder(world.run, folder, nobody_starts)
    hosts = {host.name: host for host in await finder.find()}
    assert hosts.keys() == {"dead", "living"}
    dead = hosts["dead"]
    await dead.serve(ArtifactRef(POLICY, "0" * 64), 1, Probe([1, 2], [0.0]), None)
    (engine,) = await dead.clients(1)
    assert engine.url == world.host.url  # it is believed: docs/security.md
    await engine.read("/health", 5.0)
    await engine.control("/pause_generation", {}, 5.0)
    await finder.close()
    trainer = TrainerClient(RegisteredTrainer(world.run, nobody_starts))
    await trainer.start()
    await trainer.run("load", {"kind": "load"})
    assert trainer.serves_files
    files_url = trainer.url + FILES
    await trainer.close()
    record = FileRecord("try/config.json", 2, hashlib.sha256(b"{}").hexdigest())
    document = sealed(Manifest("a", "rl", 0, "policy", {}, "0", {}, [record], {}, 1, "x", MOMENT, MOMENT))
    nearby = Nearby(
        POLICY, document.decode(), [NodeDisk("/nowhere", files_url)], peers=[dead.files_url, hosts["living"].files_url]
    )
    policy = ArtifactRef(POLICY, hashlib.sha256(document).hexdigest())
    with pytest.raises(StoreError):  # the store has it no more than they do
        await asyncio.to_thread(world.living.host._fetch, policy, 1, Probe([1, 2], [0.0]), nearby)


async def test_who_listens_where_a_service_died_learns_nothing_that_another_takes(world: World, tmp_path: Path) -> None:
    await ask_all(world, tmp_path)
    for listener, asked in ((world.host, ("GET /status", "POST /serve", "GET /health", "POST /pause_generation")),
                            (world.trainer, ("GET /status", "POST /load", f"GET {FILES}/{POLICY}"))):  # fmt: skip
        assert [any(request.startswith(one) for request in listener.sent) for one in asked] == [True] * len(asked)
    learned = world.host.keys | world.trainer.keys
    assert len(learned) == 4 and KEY not in " ".join(world.host.sent + world.trainer.sent)
    assert not world.host.keys & world.trainer.keys
    assert await statuses(world.living.registration.record.url, world.living.key) == {200, 404, 409}
    for key in (*learned, KEY, ""):
        assert await statuses(world.living.registration.record.url, key) == {401}
    assert not learned & {world.living.key, *world.living.host.keys}


async def test_a_trainer_takes_another_key_after_each_of_its_starts_and_from_each_service(
    tmp_path: Path, world: World
) -> None:
    config = config_of(tmp_path)
    keys = []
    for _service in range(2):
        service = TrainerService(world.store, config, 0, "127.0.0.1")
        await service.registration.enter()
        for _start in range(2):
            await service._meeting_point("")
            (record,) = registered(world.store, world.run.root, TRAINER)
            keys.append(service.registration.record.key)
            assert record.key == keys[-1]
    assert len({*keys, *world.trainer.keys, KEY}) == 5


async def test_who_listens_there_cannot_send_the_flow_on_with_its_key(world: World, tmp_path: Path) -> None:
    world.host.to = world.trainer.to = world.living.registration.record.url
    before = world.living._called_at
    (record,) = [record for record in registered(world.store, world.run.root, ENGINES) if record.name == "dead"]
    async with new_session() as session:
        host = RemoteHost(Peer(record), session)
        with pytest.raises(EngineUnavailable, match="answered 307 without JSON"):
            await host.clients(1)
        with pytest.raises(EngineUnavailable, match="answered 307 without JSON"):
            await host.serve(ArtifactRef(POLICY, "0" * 64), 1, Probe([1, 2], [0.0]), None)
    assert world.living._called_at == before


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"[]",
        b"1",
        b"null",
        b"[" * 100_000,
        b'{"engines": 1}',
        b'{"engines": [1]}',
        b'{"engines": [{"name": 1, "url": [], "adapted": 2}]}',
    ],
)
async def test_nonsense_from_there_is_a_host_that_cannot_be_reached(world: World, body: bytes) -> None:
    world.host.body = body
    (record,) = [record for record in registered(world.store, world.run.root, ENGINES) if record.name == "dead"]
    async with new_session() as session:
        with pytest.raises(EngineUnavailable, match="host dead "):
            await RemoteHost(Peer(record), session).clients(1)


async def test_a_host_fetches_only_from_services_of_its_run(world: World) -> None:
    """Who has a host's key, and no other, cannot have it send that of
    another service to where he listens."""
    stranger = Nearby(
        POLICY, "{}", [NodeDisk("/nowhere", "http://10.6.6.6:1/files")], peers=["http://10.6.6.7:1/files"]
    )
    keys = file_keys(world.store, world.run.root)
    assert keys.keys() == {
        world.host.url + FILES,
        world.trainer.url + FILES,
        world.living.registration.record.files_url,
    }
    assert not keys.keys() & {*stranger.servers}


async def test_a_host_whose_store_is_away_fetches_with_the_keys_that_it_read_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> dict[str, str]:
        raise OSError("the store is away")

    host, nearby = world.living.host, Nearby(POLICY, "{}", [NodeDisk("/nowhere", world.trainer.url + FILES)])
    for read in (host_module.file_keys, away):
        monkeypatch.setattr(host_module, "file_keys", read)
        with pytest.raises(StoreError):  # there is no such policy, it found out
            await asyncio.to_thread(host._fetch, ArtifactRef(POLICY, "0" * 64), 1, Probe([1, 2], [0.0]), nearby)
        assert world.trainer.url + FILES in host._file_keys


async def test_without_a_services_key_none_is_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert ServiceRecord("a", "http://127.0.0.1:1").key == ""
    assert {*file_keys(world.store, world.run.root).values()} == {""}


async def test_a_key_that_is_none_is_refused_before_any_service_is_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, f"{KEY}\x01")
    with pytest.raises(UserError, match=f"{KEY_VARIABLE} has characters"):
        HostFinder(world.run, tmp_path, nobody_starts)
    with pytest.raises(UserError, match=f"{KEY_VARIABLE} has characters"):
        RegisteredTrainer(world.run, nobody_starts)
