"""A pool of real engines over a store of tiny policies, and ways to break it.

Shared by the pool's and the host's tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import psutil
from aiohttp import web

from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.engines import host as engine_host
from rlpipe.engines.client import NOTHING_YET, Completion, Sampling
from rlpipe.engines.fleet import Host
from rlpipe.engines.host import Engine, EngineHost
from rlpipe.engines.pool import EnginePool, GroupRequest
from rlpipe.engines.weights import Probe
from rlpipe.store.artifacts import write_file
from rlpipe.store.backend import Store, open_store
from tests.deadlines import until_async
from tests.engine_fixtures import (
    CONTEXT_TOKENS,
    ENGINE_KIND,
    SGLANG_VENV,
    VLLM_VENV,
    VOCAB,
    reference_logprobs,
    tiny_model,
)
from tests.living import descendants
from tests.paths import ROOT
from tests.trainer_world import committed

GROUPS, GROUP_SIZE = 24, 4
SEEDED = ENGINE_KIND == "local"  # the same tokens whatever else is in the batch


KINDS = {
    "local": [],
    "sglang": [
        "engines.kind=sglang",
        f"engines.python={Path(SGLANG_VENV).expanduser()}/bin/python",
        f'engines.environment={{PYTHONPATH = "{ROOT}/scripts/sglang-cpu/shims"}}',
        'engines.flags=["--max-total-tokens", "8192"]',
    ],
    "vllm": ["engines.kind=vllm", f"engines.python={Path(VLLM_VENV).expanduser()}/bin/python"],
}
SAMPLERS = {
    "sglang": "sglang::scheduler",
    "vllm": "VLLM::Worker",
}  # the process that samples, where it is a child of the server


def config(*sets: str) -> PipelineConfig:
    """Two engines of the kind that the tests are asked to use."""
    defaults = ["engines.count=2", "engines.threads=1", f"model.context_tokens_max={CONTEXT_TOKENS}"]
    return read_config("tiny", ["run=a", *defaults, *KINDS[ENGINE_KIND], *sets], ROOT / "flows" / "presets")


def probe(seed: int) -> Probe:
    """What transformers says of the probe: the trainer's part, without a trainer."""
    tokens = [index * 7919 % VOCAB for index in range(32)]
    return Probe(tokens, reference_logprobs(tiny_model(seed), tokens[:1], tokens[1:]).tolist())


@dataclass
class World:
    """A pool, its host, and a store from which they are served."""

    store: Store
    host: EngineHost
    pool: EnginePool
    hosts: list[Host]
    refs: dict[str, ArtifactRef] = field(default_factory=dict)
    version: int = 2  # the one that is served
    serving: int = 0  # the seed of the policy that is served

    def policy(self, seed: int, name: str | None = None, damage: Any = None) -> ArtifactRef:
        """A committed tiny policy; `damage` may change its files before they are committed."""
        name = name or f"policy-{seed}"
        if name not in self.refs:
            folder = Path(self.store.url.removeprefix("file://")).parent / f"source-{name}"
            shutil.copytree(tiny_model(seed), folder)
            # without one vLLM dies of a token out of the vocabulary
            build_tokenizer(["text"], folder)
            if damage is not None:
                damage(folder)
            records = [write_file(self.store, name, "a1", path.name, path) for path in sorted(folder.iterdir())]
            self.refs[name] = committed(self.store, name, records)
        return self.refs[name]

    async def serve(self, seed: int) -> None:
        """Puts policy `seed` on the engines, as the next weight version."""
        await self.pool.serve(self.policy(seed), self.version + 1, probe(seed))
        self.version, self.serving = self.version + 1, seed

    @property
    def other(self) -> int:
        """The seed of a policy that is not served."""
        return 1 - self.serving

    def restarts(self) -> list[int]:
        return [engine.service.restarts for engine in self.host.engines]

    def engine(self, index: int) -> Engine:
        return self.host.engines[index]

    def signal(self, index: int, number: signal.Signals) -> None:
        """To the process that samples."""
        process = self.engine(index).service.process
        assert process is not None
        if ENGINE_KIND == "local":
            os.kill(process.pid, number)
            return
        (sampler,) = descendants(process.pid, SAMPLERS[ENGINE_KIND])
        sampler.send_signal(number)

    def memory_bytes(self) -> int:
        """Of this process (client and host) and of its engines."""
        mine = psutil.Process()
        return sum(process.memory_info().rss for process in (mine, *mine.children(recursive=True)))

    async def until_back(self) -> None:
        """Until every engine is proved to serve the newest version."""

        async def proved() -> bool:
            return len(await self.host.clients(self.version)) == len(self.host.engines)

        await until_async(proved, "an engine does not come back")


@contextlib.asynccontextmanager
async def world(folder: Path, *sets: str, restarts_max: int = 99) -> AsyncIterator[World]:
    """A world whose pool serves policy 0 as version 3."""
    store = open_store(f"file://{folder}/store")
    told = config(*sets)
    host = EngineHost(told, store, folder / "work")
    hosts: list[Host] = [host]

    async def find_hosts() -> list[Host]:
        return [*hosts]

    pool = EnginePool(find_hosts, told.engines.in_flight_max, told.engines.progress_timeout_s)
    made = World(store, host, pool, hosts)
    try:
        with patch.object(engine_host, "RESTARTS_MAX", restarts_max):
            await made.serve(0)
            yield made
    finally:
        await pool.close()


def requests(new_tokens: int = 6, groups: int = GROUPS) -> list[GroupRequest]:
    params = [Sampling(new_tokens, seed=seed, ignore_eos=True) for seed in range(GROUP_SIZE)]
    return [
        GroupRequest(f"set/{index}", [5 + index, 17, 200], params, [NOTHING_YET] * GROUP_SIZE)
        for index in range(groups)
    ]


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens for completion in group] for group in groups]


def logprobs(groups: list[list[Completion]]) -> list[list[array[float]]]:
    return [[completion.rollout_logprobs for completion in group] for group in groups]


def versions(groups: list[list[Completion]]) -> set[int]:
    return {version for group in groups for completion in group for version, _ in completion.spans}


@contextlib.asynccontextmanager
async def unavailable(engine: Engine) -> AsyncIterator[asyncio.Event]:
    """Puts a proxy before an engine that answers 503 to everything until the event is set."""
    url, recovered = engine.client.url, asyncio.Event()

    async def relay(request: web.Request) -> web.Response:
        if not recovered.is_set():
            return web.Response(status=503)
        headers = {"Authorization": request.headers.get("Authorization", ""), "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url + request.path, data=await request.read(), headers=headers) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    engine.client.url = proxy = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield recovered
    finally:
        if engine.client.url == proxy:  # else it was restarted, and is elsewhere
            engine.client.url = url
        await runner.cleanup()
