"""Finds the hosts that a run has now."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from rlpipe.engines.fleet import Host
from rlpipe.engines.host import EngineHost
from rlpipe.engines.remote import RemoteHost
from rlpipe.services.calls import new_session
from rlpipe.services.finder import Peer, ServiceFinder, StartService
from rlpipe.services.registration import ENGINES
from rlpipe.store.run import Run


class HostFinder:
    """The hosts of a run, as they come and go: in child processes of the flow, in services of the
    run, or in both.
    """

    def __init__(self, run: Run, work_dir: Path, start_service: StartService) -> None:
        self._own: list[Host] = [EngineHost(run.config, run.store, work_dir)] if run.config.engines_here else []
        self._services = ServiceFinder(run, ENGINES, start_service)
        self._session: aiohttp.ClientSession | None = None
        self._remote: dict[Peer, RemoteHost] = {}  # a host is the same one at each look

    async def find(self) -> list[Host]:
        """At least one host that can be reached, waiting for it where none is this process's own.

        EngineError past the wait.
        """
        return self._hosts(await (self._services.current() if self._own else self._services.find()))

    async def joined(self) -> list[Host]:
        """The hosts that have joined by now, also those that cannot be reached."""
        return self._hosts(await self._services.current())

    def _hosts(self, peers: list[Peer]) -> list[Host]:
        self._session = session = self._session or new_session()
        self._remote = {peer: self._remote.get(peer) or RemoteHost(peer, session) for peer in peers}
        return [*self._own, *self._remote.values()]

    async def close(self) -> None:
        """Lets go of them; those that were started for the run are dismissed."""
        await self._services.close()
        if self._session is not None:
            await self._session.close()
