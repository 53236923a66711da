"""The engines of one node: brings weights to them, proves that they serve them, and restarts what died or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.adapters import loads_adapters
from rlpipe.engines.client import EngineClient
from rlpipe.engines.commands import EngineAddress, argv_of, environment_of
from rlpipe.engines.engine import Engine
from rlpipe.engines.proof import prove
from rlpipe.engines.protocols import client_of
from rlpipe.engines.weights import Probe, Weights, check_compatible, folder_bytes, prune, reading_s, same_weights, untied
from rlpipe.models.finite import check_finite
from rlpipe.models.whole import base_and_adapter, whole_policy
from rlpipe.processes.launch import READY_TIMEOUT_S, Service, answers, free_port
from rlpipe.services.calls import new_session
from rlpipe.services.registration import file_keys
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.nearby import Nearby, nearer
from rlpipe.store.patience import hurrying
from rlpipe.store.relay import Relay
from rlpipe.types import ArtifactRef, EngineError, UserError

log = logging.getLogger(__name__)
WATCH_S = 0.5
HEALTH_S = 5.0
BASES = "bases"  # the folder of what adapters are merged into, beside what they are merged to
RESTARTS_MAX = 5  # of an engine within one start of a run


@dataclass(eq=False, repr=False)
class EngineHost:
    """Owns `engines.count` engine processes, all on the weights that it was last told to serve.

    `address`: where the engines listen. `keys`: API key and admin key of the engines; `relay`: passes weights on to the hosts of other nodes.
    """

    config: PipelineConfig
    store: Store
    work_dir: Path
    name: str = "engine"
    address: str = "127.0.0.1"
    keys: tuple[str, str] = field(default_factory=lambda: (secrets.token_hex(16), secrets.token_hex(16)))
    relay: Relay | None = None
    files_url: str = field(default="", init=False)  # the flow's own host is asked by nobody
    engines: list[Engine] = field(default_factory=list, init=False)
    _file_keys: dict[str, str] = field(default_factory=dict, init=False)
    weights: Weights | None = field(default=None, init=False)
    _served: tuple[ArtifactRef, int] | None = field(default=None, init=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _watches: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _serving: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _fetching: bool = field(default=False, init=False)

    # what the pool asks

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None = None) -> None:
        """Puts a policy on all engines, starting them if need be; nothing to do when they serve it.

        One canary first, then all. An engine that fails is restarted on the new weights beside the work of the others.
        UserError or StoreError before any engine sees weights that do not fit; EngineError when no engine serves them.
        """
        async with self._serving:
            if self._served == (policy, version) and any(engine.proved == version for engine in self.engines):
                return
            self._fetching = True
            try:
                weights = await asyncio.to_thread(self._fetch, policy, version, probe, nearby)
            finally:
                self._fetching = False
            serving = (self.weights or weights).folder
            await asyncio.to_thread(check_compatible, serving, weights.folder)
            self._served = (policy, version)
            if self.weights is None:
                await self._start(weights)
                return
            self.weights = weights
            await self._reload(weights)
            # an engine that is being restarted may still read older ones
            local = self.work_dir / "weights"
            read = [weights, *(engine.restarting_on for engine in self.engines if engine.restarting_on)]
            kept = {local / BASES, *(one.folder for one in read), *(one.materialised for one in read)}
            await asyncio.to_thread(prune, local, kept)

    async def release(self) -> None:
        """Every engine gives its memory back, or has ended, until the next `serve`. No request may be in flight."""
        async with self._serving:
            await asyncio.gather(*(engine.release() for engine in self.engines))

    @property
    def progress(self) -> int:
        """Bytes on disk while weights are fetched; seconds while engines load them, as each load has a deadline of its own."""
        if self._fetching:
            return folder_bytes(self.work_dir / "weights")
        loading = self._serving.locked() or any(engine.restarting_on for engine in self.engines)
        return int(time.monotonic()) if loading else 0

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

    def _fetch(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> Weights:
        if nearby and nearby.servers:
            with contextlib.suppress(OSError), hurrying():  # those that were read last will do while the store is away
                self._file_keys = file_keys(self.store, f"runs/{self.config.run}")
        store = nearer(self.store, nearby, self._file_keys, self.relay)
        made = read_manifest(store, policy.folder, policy.sha256).weight_version
        # every token would be taken for another policy's; the base model is version 0 too, and -1 where SFT has made another one
        if made not in (None, max(version, 0)):
            raise UserError(f"version={version}: {policy.folder} is weight version {made}")
        local = self.work_dir / "weights"
        # what the gang has made just now is not read once more, for which a reload would wait: the proof of the engines finds NaN too
        checked: Callable[[Path], Path] = check_finite if nearby is None else lambda folder: folder
        bases = local / BASES if self.config.model.adapter != "none" else None
        if bases is not None:
            base, adapter = base_and_adapter(store, policy, local, bases)
            if loads_adapters(self.config, base):
                known = self.weights is not None and self.weights.folder == base
                for folder in ([] if known else [base]) + ([adapter] if adapter else []):
                    checked(folder)
                return Weights(base, version, probe, str(adapter or ""), adapter)
        folder = materialised = checked(whole_policy(store, policy, local, bases))
        assert (folder / "config.json").is_file(), f"{folder} is no policy"
        if self.config.engines.kind == "vllm":  # it reloads tied embeddings wrongly, and says nothing
            folder = untied(folder)
        before = self.weights
        differs = before.version if before is not None and not same_weights(before.folder, folder) else None
        return Weights(folder, version, probe, materialised=materialised, differs_from=differs)

    async def _reload(self, weights: Weights) -> None:
        """The first engine that reloads is the canary. When none can, one is restarted: if that fails, the weights are at fault."""
        # an engine that hangs or is being restarted would make all others wait for it
        living = sorted(
            (engine for engine in self.engines if not engine.given_up),
            key=lambda engine: engine.restarting_on is not None or engine.unwell_since is not None,
        )
        waiting = iter(living)
        for engine in waiting:
            if await self._put(engine, weights):
                break
        else:
            await self._restart_one(living, weights)
        await asyncio.gather(*(self._put(engine, weights) for engine in waiting if not engine.restarting_on))

    async def _restart_one(self, engines: list[Engine], weights: Weights) -> None:
        for engine in engines:
            async with engine.control:
                if engine.proved != weights.version:
                    await self._restart(engine)
            if engine.proved == weights.version:
                return
        raise EngineError(self.engines[0].given_up)

    async def _put(self, engine: Engine, weights: Weights) -> bool:
        """Loads and proves weights on a running engine; False when it has to be restarted."""
        async with engine.control:
            if weights is not self.weights:
                return True  # newer ones came while this waited, and whoever brought them puts them
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
        """EngineError where it does not serve them."""
        engine.answered = await prove(engine.client, weights, self.config.model, engine.answered)
        engine.proved, engine.unwell_since = weights.version, None

    # processes

    async def _start(self, weights: Weights) -> None:
        """Starts all engines and waits until each is proved; a fault here is the configuration's, so it is not retried."""
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
        address = EngineAddress(index, self.address, 0, self.keys)  # of its port too
        client = client_of(self.config.engines.kind, name, address.url, self._session, self.keys)
        service = Service(
            name=name,
            argv=[],  # set at each start: it names the newest weights, and a port that is free then
            log_path=self.work_dir / f"{name}.log",
            ready=lambda: answers(client.url + client.ready_path),
            environment=environment_of(self.config, address),
            restarts_max=RESTARTS_MAX,
        )
        return Engine(address, service, client)

    async def _launch(self, engine: Engine, weights: Weights) -> None:
        """Starts an engine process and proves it. EngineError when it does not come up, another RuntimeError past its budget."""
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
        """Brings an engine back on the newest weights, or gives it up once its budget is spent. The caller holds `control`."""
        assert engine.control.locked() and self.weights is not None
        engine.proved = None
        while engine.proved is None and not engine.given_up:
            engine.restarting_on = weights = self.weights
            try:
                await asyncio.to_thread(engine.service.stop)
                await self._launch(engine, weights)
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
        """Looks after one engine for as long as the host lives: dead, hung, broken or behind the newest weights."""
        looked_at = time.monotonic()
        while not engine.given_up:
            await asyncio.sleep(WATCH_S)
            if self._serving.locked():
                continue  # it is being reloaded: paused is not dead
            async with engine.control:
                if engine.released:
                    continue  # dead or not: its memory is another's now
                if engine.proved is None or time.monotonic() - looked_at > HEALTH_S or not engine.service.alive():
                    looked_at = time.monotonic()
                    await self._look_after(engine)
            assert self.weights is not None
            if engine.proved not in (None, self.weights.version) and not self._serving.locked():
                await self._put(engine, self.weights)  # it was being restarted when the others were reloaded

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
