"""The engines of one node: loads weights, proves that the engines serve them, and restarts engines
that died or hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from rlpipe.base.errors import EngineError, StoreError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.client import EngineClient
from rlpipe.engines.commands import EngineAddress, argv_of, environment_of
from rlpipe.engines.engine import Engine
from rlpipe.engines.fetching import BASES, fetched, weight_hashes
from rlpipe.engines.kind import kind_of
from rlpipe.engines.proof import prove
from rlpipe.engines.receiving import SPOILT_MAX, Transfer
from rlpipe.engines.weights import Probe, Weights, check_compatible, folder_bytes, prune, reading_s
from rlpipe.processes.launch import READY_TIMEOUT_S, Service, answers, free_port
from rlpipe.services.calls import new_session
from rlpipe.services.registration import file_keys
from rlpipe.store.backend import Store
from rlpipe.store.nearby import Nearby, nearer
from rlpipe.store.patience import hurrying
from rlpipe.store.relay import Relay

log = logging.getLogger(__name__)
WATCH_S = 0.5
HEALTH_S = 5.0
RESTARTS_MAX = 5  # of an engine within one start of a run


@dataclass(eq=False, repr=False)
class EngineHost:
    """Owns `engines.count` engine processes, all on the weights of the last `serve`.

    `address`: on which the engines listen. `keys`: API key and admin key of the engines. `relay`:
    serves weights to the hosts of other nodes.
    """

    config: PipelineConfig
    store: Store
    work_dir: Path
    name: str = "engine"
    address: str = "127.0.0.1"
    keys: tuple[str, str] = field(default_factory=lambda: (secrets.token_hex(16), secrets.token_hex(16)))
    relay: Relay | None = None
    # empty: no host fetches from the flow's own host
    files_url: str = field(default="", init=False)
    engines: list[Engine] = field(default_factory=list, init=False)
    _file_keys: dict[str, str] = field(default_factory=dict, init=False)
    weights: Weights | None = field(default=None, init=False)
    _served: tuple[ArtifactRef, int] | None = field(default=None, init=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _watches: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _serving: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _fetching: bool = field(default=False, init=False)
    # consecutive policies that failed to arrive from the trainer's memory
    _spoilt: int = field(default=0, init=False)

    # calls of the pool

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None = None) -> None:
        """Loads a policy on all engines, and starts them if needed. Engines that serve it already
        go on: what they sample would have other bits after a reload.

        UserError or StoreError for weights that do not fit, before any engine loads them;
        EngineError when no engine serves them. One canary loads first, then all others. An engine
        that fails is restarted on the new weights while the others work.
        """
        async with self._serving:
            if self._served == (policy, version) and self.weights is not None:
                if not any(engine.proved == version for engine in self.engines):
                    await self._reload(self.weights, [])
                return
            self._doubt(version, [])
            received = await self._receive(policy, version, probe, nearby)
            self._fetching = True
            try:
                weights = await asyncio.to_thread(self._fetch, policy, version, probe, nearby)
            finally:
                self._fetching = False
            await asyncio.to_thread(check_compatible, (self.weights or weights).folder, weights.folder)
            self._served = (policy, version)
            if self.weights is None:
                await self._start(weights)
                return
            self.weights = weights
            self._doubt(version, received)  # a restart may have ended meanwhile
            await self._reload(weights, received)
            # an engine that is being restarted may still read older weights
            local = self.work_dir / "weights"
            read = [weights, *(engine.restarting_on for engine in self.engines if engine.restarting_on)]
            kept = {local / BASES, *(one.folder for one in read), *(one.materialised for one in read)}
            await asyncio.to_thread(prune, local, kept)

    async def release(self) -> None:
        """Frees the memory of every engine, or ends the engine, until the next `serve`.

        No request may be in flight.
        """
        async with self._serving:
            await asyncio.gather(*(engine.release() for engine in self.engines))

    @property
    def progress(self) -> int:
        """Bytes on disk while weights are fetched; the clock, in seconds, while engines load them,
        as each load has a deadline of its own; else 0.
        """
        if self._fetching:
            return folder_bytes(self.work_dir / "weights")
        loading = self._serving.locked() or any(engine.restarting_on for engine in self.engines)
        return int(time.monotonic()) if loading else 0

    async def clients(self, version: int) -> list[EngineClient]:
        """The engines that may sample `version`. EngineError when all engines are given up."""
        for watch in self._watches:
            if watch.done():
                watch.result()  # raises a fault of the watch itself
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

    def _fetch(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> Weights:
        store, local = nearer(self.store, nearby, self._keys_of(nearby), self.relay), self.work_dir / "weights"
        return fetched(self.config, store, policy, version, probe, local, self.weights, checked=nearby is None)

    def _keys_of(self, nearby: Nearby | None) -> dict[str, str]:
        """The bearer keys of the nodes that serve files to this run, read only if any is needed."""
        if nearby and (nearby.servers or nearby.sender):
            # while the store is unavailable, those that were read last are used
            with contextlib.suppress(OSError), hurrying():
                self._file_keys = file_keys(self.store, f"runs/{self.config.run}")
        return self._file_keys

    async def _receive(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> list[Engine]:
        """Transfers a policy from the trainer's memory to engines. Returns the engines that
        received it and were proved; all others must load it from disk.
        """
        before, sender = self.weights, nearby.sender if nearby else None
        receivers = [engine for engine in self.engines if before and sender and engine.serves(before.version)]
        if before is None or sender is None or not receivers or self._spoilt >= SPOILT_MAX:
            return []
        async with contextlib.AsyncExitStack() as stack:
            for engine in receivers:
                await stack.enter_async_context(engine.control)
            try:
                keys = await asyncio.to_thread(self._keys_of, nearby)
                files = await asyncio.to_thread(weight_hashes, nearer(self.store, nearby, keys), policy)
                await Transfer(self.config, sender, keys, receivers).receive(before.folder, version, files)
            except (EngineError, StoreError, OSError) as error:
                self._spoilt += any(engine.proved is None for engine in receivers)
                onward = "; all later versions are loaded from disk as well" if self._spoilt == SPOILT_MAX else ""
                log.warning(
                    "weight version %d is loaded from disk, because the transfer from the trainer's memory failed"
                    " (%s)%s",
                    version,
                    error,
                    onward,
                )
                return []
            self._spoilt = 0
            # the two versions may have the same weights if the trainer's answers are equal; `stale`
            # allows for that
            weights = replace(before, version=version, probe=probe, differs_from=before.version)
            proofs = await asyncio.gather(
                *(self._prove(engine, weights) for engine in receivers), return_exceptions=True
            )
            for fault in filter(None, proofs):
                log.warning(
                    "weights that came from the trainer's memory cannot be served (%s): they are loaded from disk",
                    fault,
                )
            return [engine for engine, fault in zip(receivers, proofs, strict=True) if fault is None]

    async def _reload(self, weights: Weights, received: list[Engine]) -> None:
        """Loads weights on the engines that have not `received` them; the first one is the canary.

        When none can load, and none has received them, one engine is restarted: if that fails, too,
        the weights are at fault.
        """
        # last, as all others would wait for a canary that hangs or is being restarted
        living = sorted(
            (engine for engine in self.engines if not engine.given_up and engine not in received),
            key=lambda engine: engine.restarting_on is not None or engine.unwell_since is not None,
        )
        waiting = iter(living)
        for engine in waiting:
            if await self._put(engine, weights):
                break
        else:
            if not received:
                await self._restart_one(living, weights)
        await asyncio.gather(*(self._put(engine, weights) for engine in waiting if not engine.restarting_on))

    def _doubt(self, version: int, received: list[Engine]) -> None:
        """Ends the sampling of engines that serve another policy as `version`, which was never
        committed.
        """
        for engine in self.engines:
            if engine.proved == version and engine not in received:
                engine.proved = None

    async def _restart_one(self, engines: list[Engine], weights: Weights) -> None:
        for engine in engines:
            async with engine.control:
                if engine.proved != weights.version:
                    await self._restart(engine)
            if engine.proved == weights.version:
                return
        raise EngineError(self.engines[0].given_up)

    async def _put(self, engine: Engine, weights: Weights) -> bool:
        """Loads weights on a running engine and proves them, unless it serves them already. False
        when it must be restarted.
        """
        async with engine.control:
            if weights is not self.weights:
                return True  # there are newer weights by now, which another call loads
            if engine.proved == weights.version:
                return True  # it was restarted on them meanwhile
            engine.proved = None
            try:
                await engine.wake()
                await engine.load(weights)
                await self._prove(engine, weights)
            except EngineError as error:
                log.warning("%s could not reload (%s): it is restarted", engine.client.name, error)
                return False
            return True

    async def _prove(self, engine: Engine, weights: Weights) -> None:
        """Proves that the engine serves `weights`. EngineError when it does not."""
        engine.answered = await prove(engine.client, weights, self.config.model, engine.answered)
        engine.proved, engine.unwell_since = weights.version, None

    async def _start(self, weights: Weights) -> None:
        """Starts all engines and waits until each is proved. A fault here is one of the
        configuration, and is not retried.
        """
        self.weights = weights
        self._session = new_session()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            self.engines = [self._engine(index) for index in range(self.config.engines.count)]
            await asyncio.gather(*(self._launch(engine, weights) for engine in self.engines))
            undo.pop_all()
        self._watches = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    def _engine(self, index: int) -> Engine:
        assert self._session is not None
        name = f"{self.name}-{index}"
        address = EngineAddress(index, self.address, 0, self.keys)  # the port is set at each start
        client = kind_of(self.config.engines.kind).client(name, address.url, self._session, self.keys)
        service = Service(
            name=name,
            argv=[],  # set at each start, with the newest weights and a free port
            log_path=self.work_dir / f"{name}.log",
            ready=lambda: answers(client.url + client.ready_path),
            environment=environment_of(self.config, address),
            restarts_max=RESTARTS_MAX,
        )
        return Engine(address, service, client)

    async def _launch(self, engine: Engine, weights: Weights) -> None:
        """Starts an engine process and proves it.

        EngineError when it does not start, another RuntimeError when its budget of restarts is
        spent.
        """
        engine.move_to(free_port())
        engine.service.ready_timeout_s = READY_TIMEOUT_S + reading_s(weights.folder)
        engine.service.argv = await asyncio.to_thread(argv_of, self.config, engine.address, weights)
        engine.service.ensure()
        try:
            await asyncio.to_thread(engine.service.wait_ready)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        engine.answered = None  # a new process
        await engine.started_on(weights)
        await self._prove(engine, weights)

    async def _restart(self, engine: Engine) -> None:
        """Restarts an engine on the newest weights, or gives it up once its budget of restarts is
        spent.

        The caller holds `control`.
        """
        assert engine.control.locked() and self.weights is not None
        engine.proved = None
        while engine.proved is None and not engine.given_up:
            engine.restarting_on = weights = self.weights
            try:
                await asyncio.to_thread(engine.service.stop)
                await self._launch(engine, weights)
                if weights is not self.weights and weights.version == self.weights.version:
                    engine.proved = None  # they are of a policy that was never committed
            except EngineError as error:
                log.warning("%s did not come back: %s", engine.client.name, error)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                engine.given_up = str(error)
                log.error("%s is given up: %s", engine.client.name, error)
        engine.restarting_on = None
        if engine.proved is not None:
            log.warning("%s is back, on weight version %d", engine.client.name, engine.proved)

    # the watch

    async def _watch(self, engine: Engine) -> None:
        """Watches one engine for as long as the host runs: restarts it when it is dead, hung or
        broken, and reloads it when its weights are not the newest.
        """
        looked_at = time.monotonic()
        while not engine.given_up:
            await asyncio.sleep(WATCH_S)
            if self._serving.locked():
                continue  # during a reload engines are paused, not dead
            async with engine.control:
                if engine.released:
                    continue  # dead or not, its memory belongs to the trainer now
                if engine.proved is None or time.monotonic() - looked_at > HEALTH_S or not engine.service.alive():
                    looked_at = time.monotonic()
                    await self._look_after(engine)
            assert self.weights is not None
            if engine.proved not in (None, self.weights.version) and not self._serving.locked():
                # it was being restarted while the others were reloaded
                await self._put(engine, self.weights)

    async def _look_after(self, engine: Engine) -> None:
        alive = engine.service.alive()
        if alive and engine.proved is not None:
            if await engine.client.healthy():
                engine.unwell_since = None
                return
            engine.unwell_since = engine.unwell_since or time.monotonic()
            if time.monotonic() - engine.unwell_since < self.config.engines.hung_timeout_s:
                return
        log.warning("%s is %s: restarting it", engine.client.name, "broken or hung" if alive else "dead")
        await self._restart(engine)
