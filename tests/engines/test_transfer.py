"""What a host does where the trainer does not send it a policy: no engine waits
for what does not come any more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlpipe.base.errors import EngineError
from rlpipe.base.values import JsonDict
from rlpipe.engines import host as engine_host
from rlpipe.engines import receiving
from rlpipe.engines.commands import EngineAddress
from rlpipe.engines.engine import Engine
from rlpipe.engines.receiving import Transfer
from rlpipe.engines.sglang_client import SglangClient
from rlpipe.processes.launch import Service
from rlpipe.records.sending import Group, Sender, TensorBucket
from rlpipe.services.calls import new_session
from rlpipe.store.artifacts import MANIFEST
from rlpipe.store.nearby import Nearby, NodeDisk
from tests.deadlines import DEADLINE_S
from tests.engine_world import config, probe, world

Answer = tuple[int, JsonDict]
OFFERED: Answer = (200, {"result": {"offer": {"address": "127.0.0.1", "port": 1, "buckets": []}}})


class Deaf(SglangClient):
    """An engine that does not get into a group."""

    async def receive(self, group: Group, rank: int, buckets: list[TensorBucket], version: int) -> None:
        raise EngineError("no group")

    async def leave(self, group: Group, *, go_on: bool) -> None:
        assert not go_on, "it may hold parts of two policies"


async def fault_of(answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """What becomes of a policy at position `p`, where the trainer answers so."""

    async def call(session: object, method: str, url: str, *_: object) -> tuple[int, bytes]:
        status, answer = answers[url.rpartition("/")[2]]
        return status, json.dumps(answer).encode()

    monkeypatch.setattr(receiving, "http_call", call)
    monkeypatch.setattr(receiving, "check_shapes", lambda *_: None)
    service = Service("engine-0", [], folder / "log", lambda: False)
    async with new_session() as session, asyncio.timeout(DEADLINE_S):
        engine = Engine(
            EngineAddress(0, "127.0.0.1", 0, ("", "")), service, Deaf("engine-0", "http://127.0.0.1:2", session, "", "")
        )
        with pytest.raises(EngineError) as caught:
            await Transfer(config(), Sender("http://127.0.0.1:1", "p"), {}, [engine]).receive(folder, 1, {})
    return str(caught.value)


async def test_a_trainer_that_trains_already_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trains: Answer = (409, {"error": "busy", "position": None})
    assert "refused to offer weights: busy" in await fault_of({"offer": trains}, monkeypatch, tmp_path)


async def test_who_receives_nothing_does_not_wait_for_his_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_another: Answer = (409, {"error": "busy", "position": "p"})
    assert await fault_of({"offer": OFFERED, "send": of_another}, monkeypatch, tmp_path) == "no group"


class Broken(Transfer):
    """The way from the trainer's memory, on which it is lost in the middle."""

    tries = 0

    async def receive(self, serving: Path, version: int, files: dict[str, str]) -> None:
        Broken.tries += 1
        for engine in self._engines:
            engine.proved = None
        raise EngineError("lost")


@pytest.mark.e2e
async def test_a_way_that_is_broken_again_and_again_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_host, "Transfer", Broken)
    async with world(tmp_path, "engines.count=1") as one:
        for version in range(4, 7):
            policy = one.policy(version % 2)
            document = one.store.read(f"{policy.folder}/{MANIFEST}").decode()
            sender = Sender("http://127.0.0.1:1", "p")
            nearby = Nearby(policy.folder, document, [NodeDisk("/nowhere", "")], sender=sender)
            await one.host.serve(policy, version, probe(version % 2), nearby)
            assert len(await one.host.clients(version)) == 1, "it was read from disk"
        assert Broken.tries == 2 and one.restarts() == [0]
