"""Where the engines of a run are: in child processes of the flow, in services of the run, or in both."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rlpipe.engines.host import EngineHost
from rlpipe.engines.pool import Host
from rlpipe.engines.remote import RegisteredHosts, RemoteHost
from rlpipe.services import ENGINES, LOST_S, QUEUE_WAIT_S, StartService, dismiss, node_name
from rlpipe.store.run import Run
from rlpipe.types import EngineError

LOOK_AGAIN_S = 1.0


class HostFinder:
    """The hosts of a run, as they come and go."""

    def __init__(self, run: Run, work_dir: Path, start_service: StartService) -> None:
        self._run = run
        self._start_service = start_service
        self._own: list[Host] = [EngineHost(run.config, run.store, work_dir)] if run.config.engines_here else []
        self._registered = RegisteredHosts(run.store, run.root)

    async def find(self) -> list[Host]:
        """At least one host that can be reached, waiting for it where none is this process's own. EngineError past the wait."""
        engines = self._run.config.engines
        wait_s = QUEUE_WAIT_S if engines.place == "deployment" else engines.request_timeout_s
        deadline = time.monotonic() + wait_s
        while True:
            registered = await self._registered.current()
            reached = await asyncio.gather(*(host.answers() for host in registered))
            if engines.place == "deployment":
                await self._start_missing(registered)
            if self._own or any(reached):
                return [*self._own, *registered]
            if time.monotonic() > deadline:
                raise EngineError(f"no engine host could be reached within {wait_s:g} s; {self._advice()}")
            await asyncio.sleep(LOOK_AGAIN_S)

    async def close(self) -> None:
        """Lets go of them; those that were started for the run are dismissed."""
        if self._run.config.engines.place == "deployment":
            for host in await self._registered.current():
                await asyncio.to_thread(dismiss, self._run.store, self._run.root, ENGINES, host.name)
        await self._registered.close()

    async def _start_missing(self, registered: list[RemoteHost]) -> None:
        by_name = {host.name: host for host in registered}
        for node in range(self._run.config.engines.nodes):
            host = by_name.get(node_name(node))
            if host is None or host.lost_s > 0:
                await self._start_service(ENGINES, node, host is not None and host.lost_s > LOST_S)

    def _advice(self) -> str:
        engines, run = self._run.config.engines, self._run
        if engines.place == "deployment":
            return f"does a worker serve the pool of engines.deployment={engines.deployment!r}?"
        return f"on each node that samples run `rlpipe host --store {run.store.url} --run {run.name}`"
