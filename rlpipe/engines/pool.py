"""The pool: spreads groups over engines, bounds what is in flight, sends what a lost engine left to another one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from rlpipe.engines.client import Completion, EngineClient, EngineUnavailable, RequestRefused, SampleRequest, SamplingParams
from rlpipe.types import ArtifactRef, EngineError, StoreError
from rlpipe.weights import Probe

log = logging.getLogger(__name__)
ATTEMPTS_MAX = 10
REST_FIRST_S, REST_MAX_S = 0.2, 30.0  # an engine that failed gets nothing for so long, doubled with each fault in a row
ASK_AGAIN_S = 5.0  # how often hosts are asked to serve while no engine is there
LOOK_AGAIN_S = 0.5  # how often hosts are asked which engines may sample
ABORT_AGAIN_S = 0.2  # a request may reach the engine after the abort: it is repeated until all have answered


@dataclass(frozen=True)
class GroupRequest:
    """All completions wanted for one prompt: they go to one engine, which computes the prompt once.

    `prior`: what is there of each completion already, `NOTHING_YET` for nothing; a finished one is not sampled again, an
    unfinished one goes on where it was cut short. Example: GroupRequest("words/17", [5, 9, 300], params, [NOTHING_YET] * 8)
    """

    prompt_id: str
    prompt_tokens: list[int]
    params: list[SamplingParams]  # one per completion; max_new_tokens counts the prior tokens too
    prior: list[Completion]

    def __post_init__(self) -> None:
        assert self.prompt_tokens and self.params, f"{self.prompt_id} asks for nothing"
        assert len(self.prior) == len(self.params), f"{self.prompt_id}: {len(self.prior)} priors, {len(self.params)} params"


OnGroup = Callable[[int, list[Completion]], Awaitable[GroupRequest | None]]


class Host(Protocol):
    """The engines of one node."""

    name: str

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe) -> None:
        """Puts a committed policy on its engines. StoreError: refused before any engine saw it. EngineError: none serves it."""
        ...

    async def clients(self, version: int) -> list[EngineClient]:
        """The engines that were proved to serve `version`. EngineUnavailable: not now; another EngineError: none ever will."""
        ...

    async def close(self) -> None: ...


FindHosts = Callable[[], Awaitable[list[Host]]]


@dataclass
class _Seat:
    """What the pool remembers of one engine."""

    in_flight: int = 0
    faults: int = 0  # in a row
    rest_until: float = 0.0


@dataclass
class _Order:
    """One group on its way: what is there of it so far."""

    index: int
    group: GroupRequest
    done: list[Completion] = field(default_factory=list)
    fault: str = ""  # the last one

    def missing(self) -> list[int]:
        return [index for index, completion in enumerate(self.done) if not completion.finished]


class EnginePool:
    """The engines of all hosts as one place to send groups to."""

    def __init__(self, find_hosts: FindHosts, in_flight_max: int, request_timeout_s: float) -> None:
        self.find_hosts = find_hosts
        self.hosts: list[Host] = []
        self.in_flight_max = in_flight_max
        self.request_timeout_s = request_timeout_s
        self._served: tuple[ArtifactRef, int, Probe] | None = None
        self._well_at = 0.0  # when an engine was last there
        self._clients: list[EngineClient] = []  # the engines that may sample, as last looked up
        self._seats: dict[str, _Seat] = {}
        self._changed = asyncio.Condition()  # an engine has room, or is back

    @property
    def version(self) -> int | None:
        """The weight version that the pool serves; None before the start and after a reload that failed."""
        return self._served[1] if self._served else None

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe) -> None:
        """Puts a policy on all hosts. StoreError: it was refused and the old one keeps serving. EngineError: no host serves it."""
        before, self._served = self._served, None
        self.hosts = await self.find_hosts()
        assert self.hosts, "who finds the hosts waits for one"
        told = await asyncio.gather(*(host.serve(policy, version, probe) for host in self.hosts), return_exceptions=True)
        faults = [outcome for outcome in told if isinstance(outcome, BaseException)]
        for host, fault in zip(self.hosts, told, strict=True):
            if isinstance(fault, BaseException):
                log.warning("host %s does not serve weight version %d: %s", host.name, version, fault)
        if len(faults) == len(told):
            fault = next((fault for fault in faults if not isinstance(fault, EngineUnavailable)), faults[0])
            if isinstance(fault, StoreError):
                self._served = before
            raise fault
        self._served = (policy, version, probe)

    async def generate(
        self, groups: list[GroupRequest], on_group: OnGroup | None = None, enough: asyncio.Event | None = None
    ) -> list[list[Completion]]:
        """The completions of every group, in order; EngineError when a rollout found no engine within its bounds.

        `on_group` (index, completions) is awaited as each group finishes; a request that it returns is the group's next turn. Once
        `enough` is set, what runs is cut short and what waits is not started: every group is answered all the same, its unfinished
        completions with `finish_reason` "abort".
        """
        assert self.version is not None, "serve comes first"
        enough = enough or asyncio.Event()
        self._well_at = time.monotonic()  # engines that are only being started get their time too
        orders = [_Order(index, group, list(group.prior)) for index, group in enumerate(groups)]
        await self._look_up()
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(self._keep_looking_up())
                filling = [tasks.create_task(self._fill_turns(order, on_group, enough)) for order in orders]
                await asyncio.gather(*filling)
                watcher.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # one group's fault says it; hundreds of them say no more
        return [order.done for order in orders]

    async def _look_up(self) -> None:
        """Which engines may sample now. A fault of one host is that host's; of all, and a lasting one, it is raised."""
        version = self.version
        assert version is not None
        told = await asyncio.gather(*(host.clients(version) for host in self.hosts), return_exceptions=True)
        lasting = [fault for fault in told if isinstance(fault, BaseException) and not isinstance(fault, EngineUnavailable)]
        if lasting and len(lasting) == len(told):
            raise lasting[0]
        self._clients = [client for outcome in told if isinstance(outcome, list) for client in outcome]
        if self._clients:
            self._well_at = time.monotonic()

    async def _keep_looking_up(self) -> None:
        asked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            if not self._clients and time.monotonic() - asked > ASK_AGAIN_S:
                asked = time.monotonic()
                await self._ask_hosts_again()
            await self._look_up()
            async with self._changed:
                self._changed.notify_all()

    async def _ask_hosts_again(self) -> None:
        """No engine is there: a host may have joined meanwhile, or have missed what is to be served."""
        assert self._served is not None
        self.hosts = await self.find_hosts()
        with contextlib.suppress(EngineError, StoreError):  # the look-up says what becomes of it
            await asyncio.gather(*(host.serve(*self._served) for host in self.hosts))

    async def _fill_turns(self, order: _Order, on_group: OnGroup | None, enough: asyncio.Event) -> None:
        """Samples one group, turn after turn."""
        while True:
            await self._fill(order, enough)
            if order.missing() or on_group is None:
                return
            again = await on_group(order.index, order.done)
            if again is None:
                return
            order.group, order.done = again, list(again.prior)

    async def _fill(self, order: _Order, enough: asyncio.Event) -> None:
        """Samples what is missing of one group, on one engine after another until it is all there."""
        started = time.monotonic()
        for attempt in itertools.count():
            if not order.missing() or enough.is_set():
                break
            # engines that refuse connections use up attempts in no time: both bounds have to be passed
            if attempt >= ATTEMPTS_MAX and time.monotonic() - started > self.request_timeout_s:
                raise EngineError(f"{order.group.prompt_id} was given up after {attempt} attempts; last: {order.fault}")
            count = len(order.missing())
            client = await self._take_seat(count, enough)
            if client is None:
                break
            try:
                await self._ask(client, order, enough)
            finally:
                self._seats[client.name].in_flight -= count
                async with self._changed:
                    self._changed.notify_all()

    async def _take_seat(self, count: int, enough: asyncio.Event) -> EngineClient | None:
        """Takes room for `count` requests on the engine that has the fewest in flight; None once `enough` is set."""
        async with self._changed:
            while not enough.is_set():
                free = [client for client in self._clients if self._has_room(client.name, count)]
                if free:
                    client = min(free, key=lambda client: self._seats[client.name].in_flight)
                    self._seats[client.name].in_flight += count
                    return client
                if time.monotonic() - self._well_at > self.request_timeout_s:
                    raise EngineError(f"no engine was well for {self.request_timeout_s:g} s: see the engines' logs")
                await self._changed.wait()  # woken at least every LOOK_AGAIN_S
        return None

    def _has_room(self, name: str, count: int) -> bool:
        seat = self._seats.setdefault(name, _Seat())
        fits = seat.in_flight + count <= self.in_flight_max or seat.in_flight == 0
        return fits and time.monotonic() >= seat.rest_until

    async def _ask(self, client: EngineClient, order: _Order, enough: asyncio.Event) -> None:
        """Asks one engine for what is missing; keeps what came back whole, or was cut short because there is enough."""
        missing = order.missing()
        requests = [_request(order.group, index) for index in missing]
        cutting = asyncio.create_task(_cut_short(client, requests, enough))
        try:
            outcomes = await client.sample(requests, self.request_timeout_s)
        finally:
            cutting.cancel()
        faults = []
        for index, outcome in zip(missing, outcomes, strict=True):
            fault = outcome if isinstance(outcome, EngineUnavailable) else self._fault(client, outcome, enough)
            if fault is None:
                assert isinstance(outcome, Completion)
                order.done[index] = order.group.prior[index].then(outcome)
            else:
                faults.append(fault)
        seat = self._seats[client.name]
        if not faults:
            seat.faults = 0
            return
        order.fault = str(faults[0])
        log.info("%d of %d rollouts of %s go elsewhere: %s", len(faults), len(requests), order.group.prompt_id, faults[0])
        if time.monotonic() >= seat.rest_until:  # all that were in flight fail together: that is one fault
            log.warning("%s gets nothing for a while, its rollouts go elsewhere: %s", client.name, faults[0])
            seat.rest_until = time.monotonic() + min(REST_FIRST_S * 2**seat.faults, REST_MAX_S)
            seat.faults += 1

    def _fault(self, client: EngineClient, completion: Completion, enough: asyncio.Event) -> EngineUnavailable | None:
        versions = {version for version, _ in completion.spans}
        if versions - {self.version}:
            return EngineUnavailable(f"{client.url} sampled with weight versions {sorted(versions)}, expected {self.version}")
        if not completion.finished and not enough.is_set():
            return EngineUnavailable(f"{client.url} aborted a request that nobody asked it to abort")
        return None

    async def close(self) -> None:
        self._served = None
        await asyncio.gather(*(host.close() for host in self.hosts))


async def _cut_short(client: EngineClient, requests: list[SampleRequest], enough: asyncio.Event) -> None:
    """Ends requests once there is enough, until this is cancelled."""
    await enough.wait()
    while True:
        try:
            await client.abort([request.request_id for request in requests])
        except RequestRefused as error:
            log.warning("%s: %s; what it runs for nothing goes on to its end", client.url, error)
            return
        except EngineError:  # then the requests fail as well, or run to their end
            pass
        await asyncio.sleep(ABORT_AGAIN_S)


def _request(group: GroupRequest, index: int) -> SampleRequest:
    prior, params = group.prior[index], group.params[index]
    left = params.max_new_tokens - len(prior.tokens)
    assert left > 0, f"{group.prompt_id}: a completion with all its tokens is finished"
    # random: the same rollout may still run on an engine that was given up; equal lengths: no id is a prefix of another
    return SampleRequest(uuid.uuid4().hex, group.prompt_tokens + prior.tokens, replace(params, max_new_tokens=left))
