"""Finds the current hosts of a run."""

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
    """Finds the hosts of a run, which join and leave at any time: child processes of the flow,
    services of the run, or both.
    """

    def __init__(self, run: Run, work_dir: Path, start_service: StartService) -> None:
        self._own: list[Host] = [EngineHost(run.config, run.store, work_dir)] if run.config.engines_here else []
        self._services = ServiceFinder(run, ENGINES, start_service)
        self._session: aiohttp.ClientSession | None = None
        self._remote: dict[Peer, RemoteHost] = {}  # the same object for a host at each call

    async def find(self) -> list[Host]:
        """Returns the hosts that can be reached, at least one; waits for a first one if this
        process has none of its own.

        EngineError when none joins in time.
        """
        return self._hosts(await (self._services.current() if self._own else self._services.find()))

    async def joined(self) -> list[Host]:
        """All hosts that have joined so far, also those that cannot be reached."""
        return self._hosts(await self._services.current())

    def _hosts(self, peers: list[Peer]) -> list[Host]:
        self._session = session = self._session or new_session()
        self._remote = {peer: self._remote.get(peer) or RemoteHost(peer, session) for peer in peers}
        return [*self._own, *self._remote.values()]

    async def close(self) -> None:
        """Releases the hosts; those that were started for the run are dismissed."""
        await self._services.close()
        if self._session is not None:
            await self._session.close()
