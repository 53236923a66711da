"""The services of a run, for its flow: finds those that are registered, those that answer, and
those that are missing and must be started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rlpipe.base.errors import EngineError, TrainerError, UserError
from rlpipe.base.values import JsonDict
from rlpipe.services.batch_job import batch_job
from rlpipe.services.calls import http_call, json_of, new_session
from rlpipe.services.registration import (
    ENGINES,
    TRAINER,
    ServiceRecord,
    anybody_registered,
    dismiss,
    node_name,
    registered,
    service_key,
)
from rlpipe.store.run import Run

log = logging.getLogger(__name__)
# a registered service that cannot be reached for so long is lost: a restart on its own node is
# faster
LOST_S = 45.0
SAY_S = 60.0  # how often it is logged that none has joined yet
LOOK_AGAIN_S = 1.0
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 3.0, 5.0
# a service that could not be reached is not called for so long; doubled each time
REST_FIRST_S, REST_MAX_S = 1.0, 60.0
WANTED = {
    TRAINER: (TrainerError, "no trainer of the run answered", "on the node that trains run `rlpipe trainer"),
    ENGINES: (EngineError, "no engine host could be reached", "on each node that samples run `rlpipe host"),
}

# (kind, node, the service registered there is lost): starts one, unless one is being started
StartService = Callable[[str, int, bool], Awaitable[None]]


async def nobody_starts(kind: str, node: int, lost: bool) -> None:
    """Raises UserError: a process without Prefect cannot start services."""
    raise UserError(f"{kind}.place='deployment': only a flow starts deployments; use place = 'process' or 'elsewhere'")


@dataclass(eq=False, repr=False)
class Peer:
    """A registered service, and the time since when it cannot be reached."""

    record: ServiceRecord
    # the time of the first failed call since the last successful one
    lost_at: float | None = None
    _rest_s: float = 0.0
    _rest_until: float = 0.0

    @property
    def lost(self) -> bool:
        """True when calls to the service have failed for LOST_S."""
        return self.lost_at is not None and time.monotonic() - self.lost_at > LOST_S

    @property
    def resting(self) -> bool:
        """True when the service should not be called now, as a call failed a moment ago."""
        return time.monotonic() < self._rest_until

    async def answers(self) -> bool:
        """True when the service can be reached now and accepts the key, whatever its answer."""
        if not self.record.url:
            self.lost_at = None  # trainer processes that are starting
            return False
        try:
            return (await self.call("GET", "/status"))[0] in (200, 409)
        except ConnectionError:
            return False

    async def call(
        self, method: str, path: str, body: object = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[int, JsonDict]:
        """Makes an HTTP call; returns its status and JSON. ConnectionError when the service cannot
        be reached.
        """
        try:
            async with new_session() as session:
                url = self.record.url + path
                status, content = await http_call(
                    session, method, url, self.record.key, body, timeout_s, CONNECT_TIMEOUT_S
                )
            answer = json_of(url, status, content)
        except ConnectionError as error:
            self.lost_at = self.lost_at or time.monotonic()
            if not self.resting:  # calls that fail together count as one fault
                self._rest_s = min(max(2 * self._rest_s, REST_FIRST_S), REST_MAX_S)
                self._rest_until = time.monotonic() + self._rest_s
            raise ConnectionError(f"{self.record.name} at {error}") from error
        self._rest_s, self.lost_at = 0.0, None
        return status, answer


class ServiceFinder:
    """Finds a run's services of one kind, which may join and leave while it runs."""

    def __init__(self, run: Run, kind: str, start_service: StartService) -> None:
        """Prepares the search. UserError when the services' key is invalid, as no service could
        join.
        """
        service_key()
        self._run = run
        self._kind = kind
        self._start_service = start_service
        self._settings = run.config.trainer if kind == TRAINER else run.config.engines
        self._started_here = self._settings.place == "deployment"
        self._peers: dict[str, Peer] = {}  # by the id of the service's start
        self._unreached: set[str] = set()  # the ids of those for which that was logged
        self._awaited = True  # true until the first one has joined since this process began
        self._job = None if self._started_here else batch_job(kind)

    async def current(self) -> list[Peer]:
        """Returns the services that have joined and not left."""
        services = await asyncio.to_thread(registered, self._run.store, self._run.root, self._kind)
        records = {record.start: record for record in services}
        for start in records.keys() - self._peers.keys():
            log.warning("%s: %s has joined", self._kind, records[start].name)
            self._peers[start] = Peer(records[start])
        for start in self._peers.keys() - records.keys():
            log.warning("%s: %s has left", self._kind, self._peers.pop(start).record.name)
        for start, record in records.items():
            self._peers[start].record = record  # trainer processes change their record
        for start, peer in self._peers.items():
            if peer.record.url and (peer.lost_at is None) == (start in self._unreached):
                self._unreached ^= {start}
                now = "cannot be reached" if start in self._unreached else "is reached again"
                log.warning("%s: %s at %s %s", self._kind, peer.record.name, peer.record.url, now)
        return list(self._peers.values())

    async def find(self) -> list[Peer]:
        """Returns the registered services, once one of them answers. Starts missing and lost ones
        if the run starts its services itself.

        EngineError or TrainerError when none answers for `lost_timeout_s`, or for `queue_timeout_s`
        if the run starts them or none has joined yet (a start elsewhere may be queued, too); at
        once if their batch job has ended, and never while it is queued. Meanwhile a line is logged
        every minute.
        """
        began_at = since = time.monotonic()
        say_s = SAY_S
        while True:
            peers = await self.current()
            if self._awaited and await asyncio.to_thread(
                anybody_registered, self._run.store, self._run.root, self._kind
            ):
                self._awaited, since = False, time.monotonic()
            # of trainer nodes only node 0 is asked
            speakers = [peer for peer in peers if self._kind == ENGINES or peer.record.name == node_name(0)]
            answers = await asyncio.gather(*(peer.answers() for peer in speakers))
            if self._started_here:
                names = (peer.record.name for peer, answered in zip(speakers, answers, strict=True) if answered)
                await self._start_missing({*names})
            if any(answers):
                return peers
            now = time.monotonic()
            if await self._is_queued():
                since = now
            settings = self._settings
            patience_s = settings.queue_timeout_s if self._started_here or self._awaited else settings.lost_timeout_s
            if now - since > patience_s or (self._job and self._job.ended):
                raise self._fault(now - began_at)
            if now - began_at >= say_s:
                say_s += SAY_S
                log.warning("%s", self._fault(now - began_at))
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _is_queued(self) -> bool:
        """True while their batch job is queued."""
        if self._job is None:
            return False
        await self._job.ask()
        return self._job.queued

    async def close(self) -> None:
        """Dismisses the services that were started for the run."""
        if self._run.lease is not None and self._run.lease.is_over:
            return  # they belong to the process that holds the run now
        for peer in await self.current() if self._started_here else ():
            await asyncio.to_thread(dismiss, self._run.store, self._run.root, self._kind, peer.record.name)

    async def _start_missing(self, answering: set[str]) -> None:
        """Starts a service on each node where none answers.

        The trainer nodes count as one: node 0 answers for all.
        """
        lost = {peer.record.name: peer for peer in self._peers.values() if peer.lost}
        for node in range(self._settings.nodes):
            name = node_name(0 if self._kind == TRAINER else node)
            if name not in answering:
                await self._start_service(self._kind, node, name in lost)
        for peer in lost.values():
            peer.lost_at = None  # replaced only once: the replacement may be queued

    def _fault(self, waited_s: float) -> Exception:
        fault, what, command = WANTED[self._kind]
        advice = f"{command} --store {self._run.store.url} --run {self._run.name}`"
        if self._job and self._job.ended:
            return fault(f"{what}, because its job has ended: {self._job}; the log of that job, if it began, says why")
        if self._job and self._job.lines is not None:
            advice = str(self._job)
        elif self._started_here:
            advice = (
                f"does a worker serve the pool of {self._kind}.deployment={self._settings.deployment_of(self._kind)!r}?"
            )
        return fault(f"{what} within {waited_s:.0f} s; {advice}")
