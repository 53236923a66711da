"""The engines of this node: starts them, restarts the dead ones on the newest weights, reloads them through a canary."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from rlpipe.config import PipelineConfig
from rlpipe.engines.client import EngineClient, EngineUnavailable, RequestRefused
from rlpipe.launch import Service, check_port_free, free_port, wrapped
from rlpipe.types import EngineError, UserError
from rlpipe.weights import Weights, check_compatible

log = logging.getLogger(__name__)
SGLANG_CONTEXT_SLACK = 8  # prompt + completion one or two below SGLang's context length stops early, silently


@dataclass
class Engine:
    """One engine process and the client that talks to it."""

    index: int
    port: int
    service: Service
    client: EngineClient
    repair: asyncio.Lock = field(default_factory=asyncio.Lock)  # one control call at a time per engine


class EngineHost:
    """Owns `engines.count` engine processes, all on the weights it was last told of."""

    def __init__(self, config: PipelineConfig, work_dir: Path) -> None:
        self.config = config
        self.work_dir = work_dir
        self.engines: list[Engine] = []
        self.weights: Weights | None = None
        self.session: aiohttp.ClientSession | None = None

    async def start(self, weights: Weights) -> None:
        """Starts all engines on `weights` and waits until each reports their version."""
        assert not self.engines, "the engines run already"
        self.weights = weights
        # each request has its own deadline; the connection pool is bounded by the requests in flight
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        keys = (secrets.token_hex(16), secrets.token_hex(16))
        for index in range(self.config.engines.count):
            self.engines.append(self._engine(index, self._port(index), keys))
        for engine in self.engines:
            engine.service.argv = self._argv(engine)
            engine.service.start()
        try:
            await asyncio.gather(*(self._await_right_version(engine) for engine in self.engines))
        except EngineError:
            await self.close()
            raise

    def _port(self, index: int) -> int:
        first = self.config.engines.port
        if first == 0:
            return free_port()
        try:
            check_port_free("engines.port", first + index)
        except ValueError as error:
            raise UserError(str(error)) from error
        return first + index

    def _engine(self, index: int, port: int, keys: tuple[str, str]) -> Engine:
        assert self.session is not None and self.weights is not None
        url = f"http://127.0.0.1:{port}"
        service = Service(
            name=f"engine {index}",
            argv=[],  # set at each start: it names the newest weights
            log_path=self.work_dir / f"engine-{index}.log",
            ready=lambda: _answers(f"{url}/health"),
            environment=self._environment(index, keys),
            restarts_max=self.config.engines.restarts_max,
        )
        return Engine(index, port, service, EngineClient(url, self.session, *keys))

    def _environment(self, index: int, keys: tuple[str, str]) -> dict[str, str]:
        engines = self.config.engines
        environment = {"RLPIPE_API_KEY": keys[0], "RLPIPE_ADMIN_API_KEY": keys[1], "RLPIPE_DIE_WITH_PARENT": "1",
                       "OMP_NUM_THREADS": str(engines.threads), "HF_HUB_OFFLINE": "1"}  # fmt: skip
        if engines.gpu_ids:
            share = len(engines.gpu_ids) // engines.count
            mine = engines.gpu_ids[index * share : (index + 1) * share]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
        return environment

    def _argv(self, engine: Engine) -> list[str]:
        """The command of an engine on the newest weights."""
        assert self.weights is not None
        engines, model = self.config.engines, self.config.model
        common = ["--model-path", str(self.weights.folder), "--weight-version", str(self.weights.version),
                  "--host", "127.0.0.1", "--port", str(engine.port)]  # fmt: skip
        if engines.kind == "local":
            device = ["--device", "cuda" if engines.gpu_ids else "cpu"]
            size = ["--threads", str(engines.threads), "--context-tokens-max", str(model.context_tokens_max)]
            return [sys.executable, "-m", "rlpipe.engines.local.server", *common, *size, *device]
        keys = ["--api-key", engine.client.api_key, "--admin-api-key", engine.client.admin_api_key]
        size = ["--context-length", str(model.context_tokens_max + SGLANG_CONTEXT_SLACK), "--dtype", model.dtype]
        share = max(1, len(engines.gpu_ids) // engines.count)
        server = [engines.python or sys.executable, "-m", "sglang.launch_server", "--tp-size", str(share)]
        if engines.gpu_ids:  # else sampling_seed is ignored, and a resumed shard samples other tokens; refused on a CPU
            server.append("--enable-deterministic-inference")
        return wrapped([*server, *common, *size, *keys, *engines.flags])

    async def reload(self, weights: Weights) -> None:
        """Puts new weights on every engine: one canary first, then all. An engine that fails is restarted on them.

        UserError or StoreError before any engine sees weights that do not fit; EngineError when the budget is spent.
        """
        assert self.weights is not None and self.engines, "start comes first"
        await asyncio.to_thread(check_compatible, self.weights.folder, weights.folder)
        before, self.weights = self.weights, weights
        canary, *others = self.engines
        await self._reload_or_restart(canary)
        await asyncio.gather(*(self._reload_or_restart(engine) for engine in others))
        if before.folder != weights.folder:
            await asyncio.to_thread(shutil.rmtree, before.folder, True)  # the store has it; local disk holds one version

    async def _reload_or_restart(self, engine: Engine) -> None:
        assert self.weights is not None
        async with engine.repair:
            try:
                await engine.client.pause("retract")
                try:
                    await engine.client.update_weights(str(self.weights.folder), self.weights.version)
                finally:
                    await engine.client.resume()
                if await engine.client.weight_version() == self.weights.version:
                    return
            except (EngineUnavailable, RequestRefused) as error:
                log.warning("engine %d could not reload (%s): restarting it", engine.index, error)
        await self.restart(engine, kill=True)

    async def restart(self, engine: Engine, kill: bool = False) -> None:
        """Brings an engine back on the newest weights; nothing to do when it is well. EngineError past its budget."""
        assert self.weights is not None
        async with engine.repair:
            if not kill and engine.service.alive() and await engine.client.healthy() and await self._right_version(engine):
                return
            await asyncio.to_thread(engine.service.stop)
            engine.service.argv = self._argv(engine)
            try:
                engine.service.ensure()
            except RuntimeError as error:
                raise EngineError(str(error)) from error
            await self._await_right_version(engine)

    async def _await_right_version(self, engine: Engine) -> None:
        try:
            await asyncio.to_thread(engine.service.wait_ready)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        if not await self._right_version(engine):
            raise EngineError(f"engine {engine.index} does not report weight version {self.weights and self.weights.version}")

    async def _right_version(self, engine: Engine) -> bool:
        assert self.weights is not None
        try:
            return await engine.client.weight_version() == self.weights.version
        except EngineUnavailable:
            return False

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(engine.service.stop) for engine in self.engines))
        self.engines, self.weights = [], None
        if self.session is not None:
            await self.session.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
