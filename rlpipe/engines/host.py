"""The engines of one node: brings weights to them, proves that they serve them, and restarts what died or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from rlpipe.config import PipelineConfig
from rlpipe.engines.client import EngineClient, new_session
from rlpipe.engines.commands import Place, argv_of, client_of, environment_of
from rlpipe.launch import Service, answers, check_port_free, free_port
from rlpipe.store.artifacts import materialise
from rlpipe.store.backend import Store
from rlpipe.types import ArtifactRef, EngineError
from rlpipe.weights import Probe, Weights, check_compatible, untied

log = logging.getLogger(__name__)
WATCH_S = 0.5
HEALTH_S = 5.0
# mean |engine - trainer| of the probe's logprobs. A wrong model is off by 1 or more; two right ones by rounding
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}


@dataclass
class Engine:
    """One engine process and the client that talks to it."""

    place: Place
    service: Service
    client: EngineClient
    control: asyncio.Lock = field(default_factory=asyncio.Lock)  # one control call at a time; no repair during a reload
    proved: int | None = None  # the weight version that it was proved to serve; None: it may not sample
    broken: bool = False  # only a restart helps
    restarting_on: Path | None = None  # the weights that a restart under way reads
    unwell_since: float | None = None
    given_up: str = ""  # why it is not restarted any more


class EngineHost:
    """Owns `engines.count` engine processes, all on the weights that it was last told to serve.

    `address`: where the engines listen. `keys`: API key and admin key of the engines.
    """

    def __init__(
        self,
        config: PipelineConfig,
        store: Store,
        work_dir: Path,
        name: str = "engine",
        address: str = "127.0.0.1",
        keys: tuple[str, str] | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.work_dir = work_dir
        self.name = name
        self.address = address
        self.keys = keys or (secrets.token_hex(16), secrets.token_hex(16))
        self.engines: list[Engine] = []
        self.weights: Weights | None = None
        self._served: tuple[ArtifactRef, int] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._serving = asyncio.Lock()

    # what the pool asks

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe) -> None:
        """Puts a committed policy on all engines, starting them if need be; nothing to do when they serve it.

        One canary first, then all. An engine that fails is restarted on the new weights beside the work of the others.
        UserError or StoreError before any engine sees weights that do not fit; EngineError when no engine serves them.
        """
        async with self._serving:
            if self._served == (policy, version) and any(engine.proved == version for engine in self.engines):
                return
            weights = await asyncio.to_thread(self._fetch, policy, version, probe)
            serving = (self.weights or weights).folder
            await asyncio.to_thread(check_compatible, serving, weights.folder)
            self._served = (policy, version)
            if self.weights is None:
                await self._start(weights)
                return
            self.weights = weights
            await self._reload(weights)
            # an engine that is being restarted may still read older ones
            kept = {weights.folder, *(engine.restarting_on for engine in self.engines)}
            await asyncio.to_thread(_prune, weights.folder.parent, kept)

    async def clients(self, version: int) -> list[EngineClient]:
        """The engines that may sample `version`; EngineError when none ever will again."""
        for watch in self._watches:
            if watch.done():
                watch.result()  # a fault of the watch itself
        if self.engines and all(engine.given_up for engine in self.engines):
            raise EngineError(self.engines[0].given_up)
        return [engine.client for engine in self.engines if engine.proved == version]

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(engine.service.stop) for engine in self.engines))
        self.engines, self._watches, self.weights, self._served = [], [], None, None
        if self._session is not None:
            await self._session.close()

    # weights

    def _fetch(self, policy: ArtifactRef, version: int, probe: Probe) -> Weights:
        folder = materialise(self.store, policy, self.work_dir / "weights")
        if self.config.engines.kind == "vllm":  # it reloads tied embeddings wrongly, and says nothing
            folder = untied(folder)
        return Weights(folder, version, probe)

    async def _reload(self, weights: Weights) -> None:
        """The first engine that reloads is the canary. When none can, one is restarted: if that fails, the weights are at fault."""
        # an engine that hangs or is being restarted would make all others wait for it
        waiting = sorted(
            (engine for engine in self.engines if not engine.given_up),
            key=lambda engine: engine.restarting_on is not None or engine.unwell_since is not None,
        )
        living = [*waiting]
        while waiting and not await self._put(waiting.pop(0), weights):
            pass
        for engine in living:
            if not any(each.proved == weights.version for each in self.engines):
                await self._restart_or_give_up(engine)
        if not any(each.proved == weights.version for each in self.engines):
            raise EngineError(self.engines[0].given_up)
        await asyncio.gather(*(self._put(engine, weights) for engine in waiting if not engine.restarting_on))

    async def _put(self, engine: Engine, weights: Weights) -> bool:
        """Loads and proves weights on a running engine; False when it has to be restarted."""
        async with engine.control:
            if weights is not self.weights:
                return True  # newer ones came while this waited, and whoever brought them puts them
            engine.proved = None
            try:
                await engine.client.load(str(weights.folder), weights.version)
                await self._prove(engine, weights)
            except EngineError as error:
                log.warning("%s could not reload (%s): it is restarted", engine.client.name, error)
                engine.broken = True
                return False
            return True

    async def _prove(self, engine: Engine, weights: Weights) -> None:
        """A version label proves nothing: the engine's logprobs of a fixed text must be the trainer's. EngineError otherwise."""
        if (reported := await engine.client.weight_version()) != weights.version:
            raise EngineError(f"{engine.client.name} reports weight version {reported}, not {weights.version}")
        scored = await engine.client.score(weights.probe.tokens, len(weights.probe.logprobs))
        pairs = zip(scored, weights.probe.logprobs, strict=True)
        differences = [math.inf if mine is None else abs(mine - told) for mine, told in pairs]  # a NaN comes as null
        mean, tolerance = sum(differences) / len(differences), PROBE_TOLERANCE[self.config.model.dtype]
        if not (math.isfinite(mean) and mean <= tolerance):
            raise EngineError(
                f"{engine.client.name} says that it serves weight version {weights.version}, but its logprobs of the probe are "
                f"{mean:.3g} away from the trainer's (at most {tolerance:g})"
            )
        engine.proved, engine.broken, engine.unwell_since = weights.version, False, None

    # processes

    async def _start(self, weights: Weights) -> None:
        """Starts all engines and waits until each is proved; a fault here is the configuration's, so it is not retried."""
        self.weights = weights
        self._session = new_session()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            self.engines = [self._engine(index) for index in range(self.config.engines.count)]
            for engine in self.engines:
                engine.service.argv = argv_of(self.config, engine.place, weights)
                engine.service.start()
            await asyncio.gather(*(self._await_proof(engine, weights) for engine in self.engines))
            undo.pop_all()
        self._watches = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    def _engine(self, index: int) -> Engine:
        assert self._session is not None
        kind, name = self.config.engines.kind, f"{self.name}-{index}"
        place = Place(index, self.address, self._port(index), *self.keys)
        service = Service(
            name=name,
            argv=[],  # set at each start: it names the newest weights
            log_path=self.work_dir / f"{name}.log",
            ready=lambda: answers(f"{place.url}/health"),
            environment=environment_of(self.config, place),
            restarts_max=self.config.engines.restarts_max,
        )
        return Engine(place, service, client_of(kind, name, place.url, self._session, self.keys))

    def _port(self, index: int) -> int:
        first = self.config.engines.port
        if first == 0:
            return free_port()
        check_port_free("engines.port", first + index)
        return first + index

    async def _await_proof(self, engine: Engine, weights: Weights) -> None:
        try:
            await asyncio.to_thread(engine.service.wait_ready)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        await engine.client.adopt(weights.version)
        await self._prove(engine, weights)

    async def _restart_or_give_up(self, engine: Engine) -> None:
        async with engine.control:
            try:
                await self._restart(engine)
            except EngineError as error:
                log.error("%s is given up: %s", engine.client.name, error)

    async def _restart(self, engine: Engine) -> None:
        """Brings an engine back on the newest weights, within its budget. The caller holds `control`. EngineError past it."""
        assert engine.control.locked()
        engine.proved = None
        try:
            while True:
                assert self.weights is not None
                weights = self.weights
                engine.restarting_on = weights.folder
                try:
                    await asyncio.to_thread(engine.service.stop)
                    engine.service.argv = argv_of(self.config, engine.place, weights)
                    engine.service.ensure()
                except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                    engine.given_up = str(error)
                    raise EngineError(engine.given_up) from error
                try:
                    return await self._await_proof(engine, weights)
                except EngineError as error:
                    log.warning("%s did not come back: %s", engine.client.name, error)
        finally:
            engine.restarting_on = None

    # the watch

    async def _watch(self, engine: Engine) -> None:
        """Looks after one engine for as long as the host lives: dead, hung, broken or behind the newest weights."""
        looked = time.monotonic()
        while not engine.given_up:
            await asyncio.sleep(WATCH_S)
            if self._serving.locked():
                continue  # it is being reloaded: paused is not dead
            try:
                async with engine.control:
                    if engine.broken or time.monotonic() - looked > HEALTH_S or not engine.service.alive():
                        looked = time.monotonic()
                        await self._look_after(engine)
                assert self.weights is not None
                if engine.proved != self.weights.version and not engine.broken and not self._serving.locked():
                    await self._put(engine, self.weights)  # it was being restarted when the others were reloaded
            except EngineError as error:
                log.error("%s: %s", engine.client.name, error)

    async def _look_after(self, engine: Engine) -> None:
        alive = engine.service.alive()
        if alive and not engine.broken:
            if await engine.client.healthy():
                engine.unwell_since = None
                return
            engine.unwell_since = engine.unwell_since or time.monotonic()
            if time.monotonic() - engine.unwell_since < self.config.engines.hung_timeout_s:
                return
        log.warning("%s is %s: restarting it", engine.client.name, "broken or hung" if alive else "dead")
        await self._restart(engine)


def _prune(folder: Path, kept: set[Path | None]) -> None:
    """Local disk holds what is served; the store has the rest."""
    for entry in folder.iterdir():
        if entry not in kept:
            shutil.rmtree(entry)
