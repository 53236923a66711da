"""Hosts that join a run as processes of their own, die and leave, while the
pool goes on with what is there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.base.errors import EngineError, StoreError, UserError
from rlpipe.engines import fleet
from rlpipe.engines.client import EngineUnavailable
from rlpipe.engines.finding import HostFinder
from rlpipe.engines.fleet import Host
from rlpipe.engines.pool import EnginePool
from rlpipe.engines.remote import RemoteHost
from rlpipe.services.calls import new_session
from rlpipe.services.finder import Peer, nobody_starts
from rlpipe.services.registration import ENGINES, KEY_VARIABLE, own_address, registered
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from tests.deadlines import DEADLINE_S, until_async
from tests.engine_world import World, config, probe, requests, tokens, versions, world
from tests.engines.test_pool import check_whole
from tests.paths import ROOT

pytestmark = pytest.mark.e2e
KEY = "test-host-key"


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, "engines.count=1") as made:
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """In the store of `one`, which may have no engine."""
    store = f"store=file://{tmp_path}/store"
    timeouts = [f"engines.progress_timeout_s={DEADLINE_S}", "engines.lost_timeout_s=5"]
    return create_or_continue(config("engines.count=1", *timeouts, store))


@contextmanager
def host_process(run: Run, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "flows.cli", "host", "--store", run.store.url, "--run", "a"]
    root = ROOT
    environment = {**os.environ, KEY_VARIABLE: KEY, "PYTHONPATH": str(root)}
    with (folder / "host.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)


async def until_joined(run: Run, count: int) -> None:
    await until_async(lambda: len(registered(run.store, run.root, ENGINES)) == count, look_s=0.1)


def elsewhere(run: Run, folder: Path) -> HostFinder:
    """Finds hosts as the flow of a run does whose engines are all elsewhere."""
    engines = run.config.engines.model_copy(update={"place": "elsewhere"})
    return HostFinder(replace(run, config=run.config.model_copy(update={"engines": engines})), folder, nobody_starts)


async def until_engines(one: World, version: int, count: int) -> None:
    """Until so many engines of all hosts may sample a version."""

    async def sampling() -> bool:
        answers = await asyncio.gather(
            *(host.clients(version) for host in one.pool.fleet.hosts), return_exceptions=True
        )
        return sum(len(clients) for clients in answers if isinstance(clients, list)) == count

    await until_async(sampling, look_s=0.1)


async def test_hosts_join_follow_the_weights_die_and_leave(
    one: World, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    undisturbed = await one.pool.generate(requests())
    finder = elsewhere(run, tmp_path)
    assert run.store.url == one.store.url
    with host_process(run, tmp_path) as process:
        await until_joined(run, 1)
        one.hosts += await finder.find()
        monkeypatch.setattr(fleet, "FIND_AGAIN_S", 0.2)

        async def both_sample() -> bool:
            return (
                len({completion.engine for group in await one.pool.generate(requests()) for completion in group}) == 2
            )

        # it is given the weights while the pool samples, and takes part
        await until_async(both_sample, look_s=0)
        await one.serve(1)
        check_whole(await one.pool.generate(requests()), 6)
        await until_engines(one, one.version, 2)
        groups = await one.pool.generate(requests())
        assert len({completion.engine for group in groups for completion in group}) == 2 and versions(groups) == {
            one.version
        }
        await one.serve(0)
        groups = await one.pool.generate(requests())
        assert len({completion.engine for group in groups for completion in group}) == 2 and versions(groups) == {
            one.version
        }
        assert tokens(groups) == tokens(undisturbed)

        another = EnginePool(
            finder.find, 8, DEADLINE_S
        )  # of the next start of the run, which has had nobody serve anything
        await another.release(await finder.joined())
        assert await joined_host(one).clients(one.version) == []
        await one.serve(1)
        await one.serve(0)
        await until_engines(one, one.version, 2)
        assert tokens(await one.pool.generate(requests())) == tokens(undisturbed)

        # a host far away refuses as the one in this process does
        with pytest.raises(StoreError, match="torn"):
            await joined_host(one).serve(one.policy(2, "torn", tear), one.version + 1, probe(2), None)
        with pytest.raises(StoreError, match="torn"):
            await joined_host(one).clients(one.version + 1)
        await one.serve(0)  # and forgets it with the next weights
        await until_engines(one, one.version, 2)

        process.kill()
        process.wait(timeout=DEADLINE_S)
        check_whole(await one.pool.generate(requests()), 6)
        await one.serve(1)  # the dead host's record still stands
        check_whole(await one.pool.generate(requests()), 6)
        with pytest.raises(EngineUnavailable):
            await joined_host(one).clients(one.version)
    with host_process(run, tmp_path) as process:
        await until_joined(run, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_S) == 0
        await until_joined(run, 1)  # left; the dead one's record is still there
    await finder.close()


def joined_host(one: World) -> Host:
    (host,) = [host for host in one.pool.fleet.hosts if host is not one.host]
    return host


def tear(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


async def test_a_wrong_key_is_refused_and_beyond_loopback_one_is_needed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host_process(run, tmp_path):
        await until_joined(run, 1)
        (record,) = registered(run.store, run.root, ENGINES)
        monkeypatch.setenv(KEY_VARIABLE, "another key")
        assert not registered(run.store, run.root, ENGINES), "it would be sent a key that is not its own"
        with pytest.raises(EngineError, match="no engine host could be reached"):
            await elsewhere(run, tmp_path).find()
        async with new_session() as session:
            wrong = RemoteHost(Peer(record), session)
            with pytest.raises(EngineUnavailable, match="401"):
                await wrong.clients(3)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match=KEY_VARIABLE):
        own_address("0.0.0.0")
    assert registered(run.store, run.root, ENGINES)
