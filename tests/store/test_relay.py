"""Nodes that fetch the same weights at the same time get them from each other: the trainer's cable
carries them once, and who fails holds up nobody."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.engines.remote import HostService
from rlpipe.services.registration import KEY_VARIABLE
from rlpipe.store import nearby as module
from rlpipe.store.artifacts import blocks_of, commit
from rlpipe.store.backend import open_store
from rlpipe.store.disk import Disk
from rlpipe.store.documents import sealed
from rlpipe.store.file_server import FileServer
from rlpipe.store.local_copy import materialise
from rlpipe.store.nearby import Nearby, NodeDisk, nearer
from rlpipe.store.relay import Relay, order_of_parts, owner_of
from rlpipe.store.transfer import PART_BYTES
from tests.engine_world import config

FOLDER, MOMENT, KEY = "runs/a/rl/00000/policy", "2026-03-04T05:06:07.000+00:00", "the key of the hosts"
TRAINER, SECOND, GONE = "http://trainer/files", "http://trainer-1/files", "http://127.0.0.1:9/files"
NUM_PARTS = 5
LARGE = "model-2.safetensors"
FILES = {
    "config.json": b"{}",
    "model-1.safetensors": b"".join(bytes([part]) * PART_BYTES for part in range(NUM_PARTS))[:-7],
    LARGE: b"".join(bytes([100 + part]) * PART_BYTES for part in range(NUM_PARTS - 1)) + b"end",
}


class PlayedTrainer(Disk):
    """The trainer's node, which counts the parts that it sends; `damaged`: from
    where on it sends other bytes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sent: list[tuple[str, int]] = []
        self.down = False
        self.dies_after = 1_000  # parts

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        if self.down or len(self.sent) >= self.dies_after:
            raise ConnectionError("down")
        self.sent.append((key.rpartition("/")[2], start))
        return super().copy_part(key, start, end, descriptor)


class World:
    """A policy on the trainer's node, and hosts on nodes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, open_store(f"file://{folder}/store")
        records = [
            FileRecord(f"try/{name}", len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()
        ]
        for name, data in FILES.items():
            path = folder / "trainer" / FOLDER / "try" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.trainer = PlayedTrainer(folder / "trainer")
        self.manifest = Manifest("a", "rl", 0, "policy", {}, "0", {}, records, {}, 1, "x", MOMENT, MOMENT)
        document = sealed(self.manifest)
        self.ref = ArtifactRef(FOLDER, hashlib.sha256(document).hexdigest())
        self.second = PlayedTrainer(folder / "trainer-1")  # another node of the trainer
        self.hosts: list[HostService] = []
        self.runners: list[web.AppRunner] = []
        self.nearby = Nearby(FOLDER, document.decode(), [NodeDisk(str(folder / "nowhere"), TRAINER)])

    async def host(self) -> HostService:
        host = HostService(
            self.store, config("engines.count=1", f"store={self.store.url}"), f"host-{len(self.hosts)}", "127.0.0.1"
        )
        runner = web.AppRunner(host.app(), shutdown_timeout=1.0)  # short: what still asks is cut off
        self.runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", host._port).start()
        self.hosts.append(host)
        self.nearby = replace(self.nearby, peers=[host.relay.url for host in self.hosts])
        return host

    async def fetched(self, host: HostService, nearby: Nearby | None = None) -> dict[str, bytes]:
        keys = {TRAINER: KEY, SECOND: KEY, GONE: KEY, **{host.relay.url: host.key for host in self.hosts}}
        store = nearer(self.store, nearby or self.nearby, keys, host.relay)
        folder = await asyncio.to_thread(materialise, store, self.ref, self.folder / f"{host.host.name}-weights")
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def share(self) -> None:
        """The large file was made on the second node, and lies there alone."""
        source, target = (
            root / FOLDER / "try" / LARGE for root in (self.folder / "trainer", self.folder / "trainer-1")
        )
        target.parent.mkdir(parents=True)
        source.rename(target)
        places = [NodeDisk(str(self.folder / "nowhere"), url) for url in (TRAINER, SECOND)]
        self.nearby = replace(self.nearby, places=places, made_on={f"try/{LARGE}": 1})

    def know_parts(self) -> None:
        """The trainer told the hashes of the parts of both files of weights."""
        folder = self.folder / "trainer" / FOLDER
        names = [record.name for record in self.manifest.files if record.plain_name != "config.json"]
        self.nearby = replace(self.nearby, parts={name: blocks_of(folder / name, PART_BYTES) for name in names})

    def land(self) -> None:
        for record in self.manifest.files:
            self.store.put(f"{FOLDER}/{record.name}", FILES[record.plain_name])
        assert commit(self.store, FOLDER, self.manifest)[0] == self.ref


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    made = World(tmp_path)
    trainers = {TRAINER: made.trainer, SECOND: made.second}
    monkeypatch.setattr(
        module, "FileServer", lambda url, key: trainers[url] if url in trainers else FileServer(url, key)
    )
    yield made
    for runner in made.runners:
        await runner.cleanup()


PARTS_ONCE = sorted(
    (name, start) for name, data in FILES.items() for start in range(0, len(data), PART_BYTES) if name != "config.json"
)


async def test_three_nodes_at_once_have_all_and_the_trainer_sent_every_part_once(world: World) -> None:
    hosts = [await world.host() for _ in range(3)]
    assert await asyncio.gather(*(world.fetched(host) for host in hosts)) == [FILES] * 3
    assert sorted(world.trainer.sent) == PARTS_ONCE


async def test_each_node_of_the_trainer_sends_the_files_that_it_made(world: World) -> None:
    hosts = [await world.host() for _ in range(3)]
    world.share()
    assert await asyncio.gather(*(world.fetched(host) for host in hosts)) == [FILES] * 3
    assert sorted(world.second.sent) == [(name, start) for name, start in PARTS_ONCE if name == LARGE]
    assert sorted(world.trainer.sent) == [(name, start) for name, start in PARTS_ONCE if name != LARGE]


async def test_a_node_of_the_trainer_that_dies_in_the_midst_is_replaced_by_the_store_and_the_others_go_on(
    world: World,
) -> None:
    hosts = [await world.host() for _ in range(2)]
    world.share()
    world.second.dies_after = 2
    faults = await asyncio.gather(*(world.fetched(host) for host in hosts), return_exceptions=True)
    # neither has it all, nor has the store
    assert {type(fault) for fault in faults} == {StoreError}
    world.land()
    world.trainer.sent.clear()
    assert await asyncio.gather(*(world.fetched(host) for host in hosts)) == [FILES] * 2
    assert sorted(world.trainer.sent) == [(name, start) for name, start in PARTS_ONCE if name != LARGE]


async def test_a_host_on_a_node_of_the_trainer_links_what_was_made_there(world: World) -> None:
    host = await world.host()
    world.share()
    places = [world.nearby.places[0], NodeDisk(str(world.folder / "trainer-1"), SECOND)]
    assert await world.fetched(host, replace(world.nearby, places=places)) == FILES
    assert not world.second.sent and world.trainer.sent


def test_a_file_is_made_on_a_place_that_is_given() -> None:
    for places, made_on in (([], {}), ([NodeDisk("/a", "")], {"try/x": 1}), ([NodeDisk("/a", "")], {"try/x": -1})):
        with pytest.raises(ValueError, match="places are given"):
            Nearby(FOLDER, "{}", places, made_on)


async def test_a_node_that_joins_later_gets_all_from_the_others(world: World) -> None:
    first = [await world.host() for _ in range(2)]
    nearby = world.nearby
    await asyncio.gather(*(world.fetched(host) for host in first))
    sent = len(world.trainer.sent)
    assert await world.fetched(await world.host(), nearby) == FILES
    assert len(world.trainer.sent) == sent


async def test_nodes_that_are_gone_or_never_begin_hold_up_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.store.relay.WAIT_S", 0.3)
    hosts = [await world.host() for _ in range(3)]
    peers = [hosts[0].relay.url, GONE, hosts[1].relay.url, hosts[2].relay.url]
    nearby = replace(world.nearby, peers=peers)
    assert await asyncio.gather(*(world.fetched(host, nearby) for host in hosts[:2])) == [FILES] * 2


async def test_lists_of_nodes_in_another_order_end_too(world: World) -> None:
    hosts = [await world.host() for _ in range(2)]
    other = replace(world.nearby, peers=world.nearby.peers[::-1])
    assert await asyncio.gather(world.fetched(hosts[0]), world.fetched(hosts[1], other)) == [FILES] * 2


async def test_what_is_damaged_on_its_way_is_noticed_by_every_node_and_comes_from_the_store(world: World) -> None:
    hosts = [await world.host() for _ in range(3)]
    path = world.folder / "trainer" / FOLDER / "try" / LARGE
    path.write_bytes(b"x" + path.read_bytes()[1:])
    faults = await asyncio.gather(*(world.fetched(host) for host in hosts), return_exceptions=True)
    assert [type(fault) for fault in faults] == [StoreError] * 3
    world.land()
    assert await asyncio.gather(*(world.fetched(host) for host in hosts)) == [FILES] * 3


async def test_a_part_that_another_node_sends_damaged_comes_from_the_trainer_alone(world: World) -> None:
    """The other parts are right, so no file is fetched twice."""
    world.know_parts()
    first = [await world.host() for _ in range(2)]
    nearby = world.nearby
    await asyncio.gather(*(world.fetched(host) for host in first))
    for host in first:  # on its disk, after it was hashed there
        path = host.relay._files[f"{FOLDER}/try/{LARGE}"].path
        data = bytearray(path.read_bytes())
        data[2 * PART_BYTES + 9] ^= 1
        path.unlink()
        path.write_bytes(data)
    world.trainer.sent.clear()
    assert await world.fetched(await world.host(), nearby) == FILES
    assert (LARGE, 2 * PART_BYTES) in world.trainer.sent
    assert len(world.trainer.sent) < len(PARTS_ONCE) / 2 + 1


async def test_a_part_that_the_trainer_sends_damaged_comes_from_the_store_and_no_node_passes_it_on(
    world: World,
) -> None:
    world.know_parts()
    hosts = [await world.host() for _ in range(3)]
    path = world.folder / "trainer" / FOLDER / "try" / LARGE
    data = bytearray(path.read_bytes())
    data[3 * PART_BYTES + 1] ^= 1
    path.write_bytes(data)
    faults = await asyncio.gather(*(world.fetched(host) for host in hosts), return_exceptions=True)
    assert {type(fault) for fault in faults} == {StoreError}, "nobody has the part"
    world.land()
    assert await asyncio.gather(*(world.fetched(host) for host in hosts)) == [FILES] * 3


async def test_a_trainer_that_goes_away_is_replaced_by_the_store_and_nodes_still_share(world: World) -> None:
    hosts = [await world.host() for _ in range(2)]
    world.trainer.down = True
    world.land()
    assert await asyncio.gather(*(world.fetched(host) for host in hosts)) == [FILES] * 2


async def test_only_parts_of_what_is_fetched_are_given_and_only_with_the_key(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpipe.store.relay.WAIT_S", 0.1)
    host = await world.host()
    await world.fetched(host)
    file, part = f"{FOLDER}/try/{LARGE}", f"bytes=0-{PART_BYTES - 1}"

    async def status(key: str, wanted: str, bearer: str = host.key) -> int:
        headers = {"Authorization": f"Bearer {bearer}", "Range": wanted}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{host.relay.url}/{key}", headers=headers) as response,
        ):
            assert response.status != 206 or await response.read() == FILES[LARGE][:PART_BYTES]
            return response.status

    assert await status(file, part) == 206
    # the services' key itself, and that of another host
    for other in ("another", KEY, (await world.host()).key):
        assert await status(file, part, other) == 401
    for key, wanted in (
        (file, "bytes=1-9"), (file, "bytes=0-"), (file, "bytes=-5"),
        (file, f"bytes=0-{PART_BYTES}"), (f"{file}x", part),
        (f"{FOLDER}/try/config.json", "bytes=0-1"), ("..%2F..%2Fetc%2Fpasswd", part),
    ):  # fmt: skip
        assert await status(key, wanted) == 404, (key, wanted)
    assert await status(file, "nonsense") == 409


async def test_a_part_that_will_not_come_is_said_at_once_to_who_waits_for_it(tmp_path: Path) -> None:
    relay, path = Relay(tmp_path / "relayed", "http://here"), tmp_path / "file"
    path.touch()

    async def fail() -> None:
        with relay.arriving("a/file", path, [0, 3 * PART_BYTES]) as arrived:
            arrived(0)
            assert await relay.part("a/file", 0) == tmp_path / "relayed/a/file"
            assert await relay.part("a/file", PART_BYTES) is None  # another node's
            waiting.append(asyncio.create_task(relay.part("a/file", 3 * PART_BYTES)))
            await asyncio.sleep(0)
            raise OSError(errno.ENOSPC, "no space")

    waiting: list[asyncio.Task[Path | None]] = []
    with pytest.raises(OSError, match="no space"):
        await fail()
    assert await waiting[0] is None


def test_a_new_policy_takes_the_place_of_what_was_passed_on(tmp_path: Path) -> None:
    relay, path = Relay(tmp_path / "relayed", "http://here"), tmp_path / "file"
    path.write_bytes(b"w" * (PART_BYTES + 1))
    relay.has("a/file", path)
    path.unlink()
    assert asyncio.run(relay.part("a/file", PART_BYTES)) == tmp_path / "relayed/a/file"
    nearer(open_store(f"file://{tmp_path}"), None, {}, relay)
    assert not (tmp_path / "relayed").exists()


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7])
@pytest.mark.parametrize("num_parts", [0, 1, 2, 6, 20])
def test_the_order_has_every_part_once_and_own_ones_a_round_before_they_are_needed(
    num_nodes: int, num_parts: int
) -> None:
    size = num_parts * PART_BYTES - (num_parts > 0)
    orders = [order_of_parts(size, place, num_nodes) for place in range(num_nodes)]
    assert all(sorted(order) == [*range(0, size, PART_BYTES)] for order in orders)
    for place, order in enumerate(orders):
        for other in orders:
            for start in (
                start for start in order if owner_of(start, num_nodes) == place and start >= num_nodes * PART_BYTES
            ):
                assert order.index(start) <= other.index(start), (place, start)
