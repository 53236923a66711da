"""A real trainer and real SGLang engines (`make test-sglang`): a policy out of the trainer's memory
is the one of the files, and a fault ends on the disk's."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.engines.host import EngineHost
from rlpipe.engines.weights import Probe
from rlpipe.records.sending import Sender
from rlpipe.store.backend import open_store
from rlpipe.store.documents import sealed
from rlpipe.store.nearby import Nearby, NodeDisk
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.process import TrainerProcesses
from tests.engine_fixtures import ENGINE_KIND
from tests.engine_world import config
from tests.trainer_world import load_new, save

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(ENGINE_KIND != "sglang", reason="only SGLang receives weights from a trainer"),
]


@dataclass
class Made:
    """A policy that a trainer has published, and that no manifest names yet."""

    policy: ArtifactRef
    version: int
    probe: Probe
    nearby: Nearby


@dataclass
class Pair:
    """A trainer and a host with two engines."""

    trainer: TrainerClient
    host: EngineHost

    async def make(self, version: int) -> Made:
        """Another model as weight version `version`, resident in the trainer."""
        position, folder = f"p{version}", f"runs/a/rl/{version - 1:05d}/policy"
        await self.trainer.run("load", load_new(position, seed=version))
        answer = await self.trainer.run("save", {**save(position, folder, None), "attempt": f"a{version}"})
        # the next one takes its place on the trainer's disk
        await self.trainer.run("upload", {"attempt": f"a{version}"})
        files = [FileRecord(**record) for record in answer["policy"]]
        manifest = Manifest("a", "rl", version - 1, "policy", {}, "", {}, files, {}, version, "test", "", "")
        document = sealed(manifest)
        ref = ArtifactRef(folder, hashlib.sha256(document).hexdigest())
        places = [NodeDisk(place["disk"], "") for place in answer["places"]]
        nearby = Nearby(folder, document.decode(), places, answer["made_on"], sender=self.trainer.sender(position))
        return Made(ref, version, Probe(**answer["probe"]), nearby)

    async def serve(self, made: Made, **changes: Sender | None) -> float:
        """Seconds."""
        nearby = Nearby(**{**vars(made.nearby), **changes})
        began = time.monotonic()
        await self.host.serve(made.policy, made.version, made.probe, nearby)
        return time.monotonic() - began

    async def held(self, made: Made) -> list[tuple[str, list[float]]]:
        """Of each engine the checksum of its weights, and what it says of the probe."""
        clients = await self.host.clients(made.version)
        return [
            (await client.checksum(), await client.score(made.probe.tokens, len(made.probe.logprobs)))
            for client in clients
        ]


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    settings = config(f"store=file://{folder}/store", "engines.transport=tensor", "model.context_tokens_max=256")
    trainer = TrainerClient(TrainerProcesses(settings, folder / "trainer", "key"))
    host = EngineHost(settings, open_store(settings.store), folder / "host")
    (folder / "trainer").mkdir()
    (folder / "host").mkdir()
    await trainer.start()
    try:
        yield Pair(trainer, host)
    finally:
        await host.close()
        await trainer.close()


async def test_engines_have_the_same_bits_whichever_way_a_policy_travelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlpipe.engines")
    async with pair(tmp_path) as world:
        await world.serve(await world.make(1), sender=None)
        seconds: dict[str, list[float]] = {"tensor": [], "disk": []}
        for version in range(2, 6):
            made = await world.make(version)
            seconds["tensor"].append(await world.serve(made))
            assert f"weight version {version} came from the trainer's memory" in caplog.text
            sent = await world.held(made)
            assert len(sent) == 2 and sent[0] == sent[1]
            await world.serve(again := await world.make(version + 10), sender=None)  # another one in between
            assert (await world.held(again))[0] != sent[0]
            seconds["disk"].append(await world.serve(made, sender=None))
            assert await world.held(made) == sent, "the same checksum, and the same logprobs to the bit"
        assert "loaded from disk" not in caplog.text and "restarting" not in caplog.text
        print("seconds of a reload:", {way: [round(value, 3) for value in values] for way, values in seconds.items()})


async def test_what_goes_wrong_on_the_way_ends_with_the_policy_of_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path) as world:
        await world.serve(await world.make(1), sender=None)
        late = await world.make(2)
        await world.make(3)  # the trainer goes on
        await world.serve(late)
        assert "the trainer refused to offer weights: not resident" in caplog.text
        caplog.clear()
        await world.serve(late, sender=None)
        assert not caplog.text, "it is served"
        # what is sent is another policy than the manifest says
        wrong = await world.make(4)
        other = await world.make(5)
        await world.serve(wrong, sender=other.nearby.sender)
        assert "the trainer sent the files" in caplog.text
        held = await world.held(wrong)
        assert len(held) == 2 and held[0] == held[1]
