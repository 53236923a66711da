"""All hosts of a run: the policy that they serve, and their engines that may sample now.

Hosts may join and leave at any time. A host that leaves or is lost is left out from the next
look-up on. A host that joins during sampling gets the weights that the others serve, and takes part
once its engines are proved.
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
SAY_S = 30.0  # how often it is logged that no engine may sample
FIND_AGAIN_S = 5.0  # how often hosts are searched during sampling


class Host(Protocol):
    """The engines of one node."""

    name: str
    files_url: str  # the URL from which other hosts get the weights that it fetches; empty for none

    @property
    def progress(self) -> int:
        """A number that changes while weights are fetched or loaded: the pool waits for a slow
        host, but not for one without progress.
        """
        ...

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None:
        """Loads a policy on its engines.

        StoreError: the policy was refused, and no engine loaded it. EngineError: no engine serves
        it.
        """

    # frees the memory of its engines, until the next `serve`
    async def release(self) -> None: ...

    async def clients(self, version: int) -> list[EngineClient]:
        """The engines that were proved to serve `version`.

        EngineUnavailable: none can now; another EngineError: none ever will.
        """
        ...

    async def close(self) -> None: ...


Served = tuple[ArtifactRef, int, Probe, Nearby | None]  # the arguments of a host's `serve`
FindHosts = Callable[[], Awaitable[list[Host]]]


class Fleet:
    """All hosts of a run, which serve the same weights.

    `clients`: the engines that may sample, at the last look-up. `well_at`: the last time at which
    there was one, a host made progress, or hosts were awaited (which has a timeout of its own).
    """

    def __init__(self, find_hosts: FindHosts) -> None:
        self.hosts: list[Host] = []
        self.clients: list[EngineClient] = []
        self.well_at = 0.0
        self._find_hosts = find_hosts
        self._served: Served | None = None
        self._serving: set[Host] = set()  # hosts that have loaded the served policy
        self._progress: list[int] = []  # of the hosts, at the last look-up
        self._found_at = 0.0
        # the time of the last look-up; the time since when no engine may sample
        self._looked_at = self._silent_at = 0.0
        self._say_s = SAY_S
        self._finding = asyncio.Lock()
        self._awaiting = False  # true while it waits for hosts

    @property
    def version(self) -> int | None:
        """The weight version that is served; None before the start
        and after a reload that failed."""
        return self._served[1] if self._served else None

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None:
        """Loads a policy on all hosts.

        StoreError: it was refused, and hosts serve the old one. EngineError: no host serves it.
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
        """Updates `clients`, the engines that may sample now. The fault of one host leaves out only
        its engines; the first fault is raised when all hosts have a permanent one.
        """
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
        """Logs for how long no engine could sample, every SAY_S, and once when one can again."""
        now, before, self._looked_at = time.monotonic(), self._looked_at, time.monotonic()
        if self.clients or now - before > SAY_S:  # no look-up for so long
            if self._say_s > SAY_S and self.clients:
                log.warning("engines sample again, after %.0f s", now - self._silent_at)
            self._silent_at, self._say_s = now, SAY_S
        elif now - self._silent_at >= self._say_s:
            self._say_s += SAY_S
            names = ", ".join(host.name for host in self.hosts)
            log.warning(
                "no engine has been able to sample for %.0f s: the engines of %s are starting, loading weights, or"
                " lost",
                now - self._silent_at,
                names,
            )

    async def keep_taking_in(self) -> None:
        """Gives the served policy to hosts that join, or to all hosts while no engine may sample;
        runs until it is cancelled.

        EngineError when there is no engine, and no host can be found.
        """
        while True:
            await asyncio.sleep(FIND_AGAIN_S)
            if (
                not self._finding.locked() and time.monotonic() - self._found_at >= FIND_AGAIN_S
            ):  # concurrent calls do it once
                async with self._finding:
                    await self._take_in()
                self._found_at = time.monotonic()

    async def release(self, joined: list[Host]) -> None:
        """Frees the memory of the engines of all hosts; none serves until the next `serve`.
        `joined`: further hosts, on which another process of the run may have loaded a policy.
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
            log.warning("cannot see which hosts join or leave, and tries again: %s", error)
            return
        finally:
            self._awaiting = False
        self.hosts, served = hosts, self._served
        waiting = [host for host in hosts if host not in self._serving or not self.clients]
        if waiting and served is not None:  # the next look-up raises the faults
            await self._put(waiting, served)

    async def _put(self, hosts: list[Host], served: Served) -> list[BaseException]:
        """Makes hosts serve a policy; returns the faults of those that do not."""
        outcomes = await asyncio.gather(*(host.serve(*served) for host in hosts), return_exceptions=True)
        self._serving = (self._serving - {*hosts}) & {*self.hosts}
        for host, outcome in zip(hosts, outcomes, strict=True):
            if outcome is None:
                self._serving.add(host)
            else:
                log.warning("host %s does not serve weight version %d: %s", host.name, served[1], outcome)
        return [outcome for outcome in outcomes if outcome is not None]
