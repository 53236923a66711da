"""The hosts of a run together: what they serve, and which of their engines may sample now.

Hosts come and go at any time. One that leaves, or is lost, is left out at the next look; one that
joins while an iteration samples is given the weights that the others serve, and takes part as soon
as its engines are proved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from rlpipe.base.errors import EngineError, StoreError
from rlpipe.base.references import ArtifactRef
from rlpipe.engines.client import EngineClient, EngineUnavailable
from rlpipe.engines.weights import Probe
from rlpipe.store.nearby import Nearby

log = logging.getLogger(__name__)
SAY_S = 30.0  # how often it is said that no engine may sample
FIND_AGAIN_S = 5.0  # how often hosts are looked for while there is something to sample


class Host(Protocol):
    """The engines of one node."""

    name: str
    files_url: str  # where other hosts get the weights that it fetches; empty where they do not

    @property
    def progress(self) -> int:
        """Another number each time while weights are fetched or loaded: what takes long is waited
        for, what stands still is not.
        """
        ...

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None:
        """Puts a policy on its engines.

        StoreError: refused before any engine saw it. EngineError: none serves it.
        """

    # its engines give their memory back, until the next `serve`
    async def release(self) -> None: ...

    async def clients(self, version: int) -> list[EngineClient]:
        """The engines that were proved to serve `version`.

        EngineUnavailable: not now; another EngineError: none ever will.
        """
        ...

    async def close(self) -> None: ...


Served = tuple[ArtifactRef, int, Probe, Nearby | None]  # what a host is given to serve
FindHosts = Callable[[], Awaitable[list[Host]]]


class Fleet:
    """All hosts, on the same weights.

    `clients`: the engines that may sample, as last looked up; `well_at`: when one was last there,
    or was on its way, or hosts were waited for (whoever finds them knows for how long).
    """

    def __init__(self, find_hosts: FindHosts) -> None:
        self.hosts: list[Host] = []
        self.clients: list[EngineClient] = []
        self.well_at = 0.0
        self._find_hosts = find_hosts
        self._served: Served | None = None
        self._serving: set[Host] = set()  # those that took what is served
        self._progress: list[int] = []  # of the hosts, as last looked up
        self._found_at = 0.0
        # when it was last asked who may sample; since when none may
        self._looked_at = self._silent_at = 0.0
        self._say_s = SAY_S
        self._finding = asyncio.Lock()
        self._awaiting = False  # hosts are waited for

    @property
    def version(self) -> int | None:
        """The weight version that is served; None before the start
        and after a reload that failed."""
        return self._served[1] if self._served else None

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None:
        """Puts a policy on all hosts.

        StoreError: it was refused and the old one keeps serving. EngineError: no host serves it.
        """
        before, self._served = self._served, None
        self.hosts = await self._find_hosts()
        assert self.hosts, "who finds the hosts waits for one"
        if nearby is not None:
            nearby = replace(nearby, peers=[host.files_url for host in self.hosts if host.files_url])
        faults = await self._put(self.hosts, (policy, version, probe, nearby))
        if len(faults) == len(self.hosts):
            fault = next((fault for fault in faults if not isinstance(fault, EngineUnavailable)), faults[0])
            if isinstance(fault, StoreError):
                self._served = before
            raise fault
        self._served = (policy, version, probe, nearby)

    async def look_up(self) -> None:
        """Updates `clients`, the engines that may sample now. A fault of one host costs only that
        host's engines; the first fault is raised when all hosts have one, and none of them passes
        by itself."""
        assert self.version is not None, "serve comes first"
        outcomes = await asyncio.gather(*(host.clients(self.version) for host in self.hosts), return_exceptions=True)
        faults = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        lasting = [fault for fault in faults if not isinstance(fault, EngineUnavailable)]
        if lasting and len(lasting) == len(outcomes):
            raise lasting[0]
        self.clients = [client for outcome in outcomes if isinstance(outcome, list) for client in outcome]
        before, self._progress = self._progress, [host.progress for host in self.hosts]
        if self.clients or self._progress != before or self._awaiting:
            self.well_at = time.monotonic()
        self._say()

    def _say(self) -> None:
        """Says for how long no engine may sample, every SAY_S, and once when one may again."""
        now, before, self._looked_at = time.monotonic(), self._looked_at, time.monotonic()
        if self.clients or now - before > SAY_S:  # nobody asked for so long
            if self._say_s > SAY_S and self.clients:
                log.warning("engines sample again, after %.0f s", now - self._silent_at)
            self._silent_at, self._say_s = now, SAY_S
        elif now - self._silent_at >= self._say_s:
            self._say_s += SAY_S
            names = ", ".join(host.name for host in self.hosts)
            log.warning(
                "no engine may sample for %.0f s: those of %s start, load weights, or are lost",
                now - self._silent_at,
                names,
            )

    async def keep_taking_in(self) -> None:
        """Until it is cancelled: hosts that join are given what the others serve, all hosts where
        no engine may sample.

        EngineError when there is no engine, and no host can be found any more.
        """
        while True:
            await asyncio.sleep(FIND_AGAIN_S)
            if (
                not self._finding.locked() and time.monotonic() - self._found_at >= FIND_AGAIN_S
            ):  # calls side by side do it once
                async with self._finding:
                    await self._take_in()
                self._found_at = time.monotonic()

    async def release(self, joined: list[Host]) -> None:
        """The engines of all hosts give their memory back; nothing is served until the next
        `serve`. `joined`: hosts that another process of the run may have had serve something,
        beside those of this one.
        """
        self._served, self.clients, self._serving = None, [], set()
        await asyncio.gather(*(host.release() for host in {*self.hosts, *joined}))

    async def close(self) -> None:
        self._served = None
        await asyncio.gather(*(host.close() for host in self.hosts))

    async def _take_in(self) -> None:
        self._awaiting = True
        try:
            hosts = await self._find_hosts()
        except (OSError, StoreError, EngineError) as error:
            if not self.clients and isinstance(error, EngineError):
                raise
            log.warning("hosts that join or leave are not seen for a while: %s", error)
            return
        finally:
            self._awaiting = False
        self.hosts, served = hosts, self._served
        waiting = [host for host in hosts if host not in self._serving or not self.clients]
        if waiting and served is not None:  # what faults there are says the next look-up
            await self._put(waiting, served)

    async def _put(self, hosts: list[Host], served: Served) -> list[BaseException]:
        """Asks hosts to serve a policy; the faults of those that do not."""
        outcomes = await asyncio.gather(*(host.serve(*served) for host in hosts), return_exceptions=True)
        self._serving = (self._serving - {*hosts}) & {*self.hosts}
        for host, outcome in zip(hosts, outcomes, strict=True):
            if outcome is None:
                self._serving.add(host)
            else:
                log.warning("host %s does not serve weight version %d: %s", host.name, served[1], outcome)
        return [outcome for outcome in outcomes if outcome is not None]
