"""The engine pool: distributes rollouts over engines, limits the requests in flight, and continues
the rollouts of a lost engine on others.

A request has no deadline; an engine is given up when none of its requests has had a token for
`engines.progress_timeout_s`. So a completion may take hours, and may wait in the engine's own
queue. The tokens that a killed engine had sampled are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from rlpipe.base.errors import EngineError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.seeds import rollout_seed
from rlpipe.engines.asking import EngineLoad, ask
from rlpipe.engines.client import NOTHING_YET, Completion, EngineClient, EngineUnavailable, SampleRequest, Sampling
from rlpipe.engines.fleet import FindHosts, Fleet, Host
from rlpipe.engines.weights import Probe
from rlpipe.store.nearby import Nearby

log = logging.getLogger(__name__)
FAULTS_MAX = 10  # of a rollout, without a token in between
# an engine that failed gets no requests for so long; doubled with each consecutive fault
REST_FIRST_S, REST_MAX_S = 0.2, 30.0
# tokens; an engine that repeats prompts first gets a single request with a prompt of this length or
# more, as computing it takes longer than a round trip
LONG_PROMPT = 512
LOOK_AGAIN_S = 0.5  # how often hosts are asked for the engines that may sample
GIVEN_UP_S = 30.0  # to give up a request that had no token for `progress_timeout_s`


@dataclass(frozen=True)
class GroupRequest:
    """The request for all completions of one prompt. They go to one engine as far as it has room,
    so that it computes the prompt once.

    `prior`: the tokens that each completion has already, `NOTHING_YET` for none; a finished one is
    not sampled again, a partial one continues after its last token. Example:
    GroupRequest("words/17", [5, 9, 300], params, [NOTHING_YET] * 8)
    """

    prompt_id: str
    prompt_tokens: list[int]
    params: list[Sampling]  # one per completion; max_new_tokens includes the prior tokens
    prior: list[Completion]
    home: str = ""  # the engine that has computed the prefix already; empty for none
    # of a group of one: called with the completion so far as its tokens arrive. After a fault an
    # exact engine samples the same tokens again, from the first on
    hear: Callable[[Completion], None] | None = None

    def __post_init__(self) -> None:
        assert self.prompt_tokens and self.params, f"{self.prompt_id} asks for nothing"
        assert len(self.prior) == len(self.params), (
            f"{self.prompt_id}: {len(self.prior)} priors, {len(self.params)} params"
        )
        assert self.hear is None or len(self.params) == 1, "only one completion is heard as it is sampled"


OnGroup = Callable[[int, list[Completion]], Awaitable[None]]
NextTurn = tuple[Sampling, Completion]  # the parameters of the next turn, and the completion so far
OnRollout = Callable[[int, int, Completion], Awaitable[NextTurn | None]]


@dataclass
class Anchor:
    """The engine that computes a rollout's prefix: in the first turn shared by its group, later the
    rollout's own.

    `computed`: per engine, set once its first request has a token or has ended. On an engine that
    would otherwise compute the prefix for each request, the other requests wait for it, each in its
    seat.
    """

    engine: str = ""
    num_tokens: int = 0  # of a prefix that several rollouts share; else 0
    computed: dict[str, asyncio.Event] = field(default_factory=dict)


class EnginePool:
    """Samples rollouts on the engines of all hosts."""

    def __init__(self, find_hosts: FindHosts, in_flight_max: int, progress_timeout_s: float) -> None:
        self.fleet = Fleet(find_hosts)
        self.in_flight_max = in_flight_max
        self.progress_timeout_s = progress_timeout_s
        self.num_lost = 0  # times that an engine failed its requests
        self._loads: defaultdict[str, EngineLoad] = defaultdict(EngineLoad)
        self._changed = asyncio.Condition()  # an engine has room, or is available again
        self._entrance = asyncio.Lock()  # calls begin in the order in which they arrive
        self._num_calls = 0  # calls of `generate` in progress
        self._last_ended = asyncio.Event()

    @property
    def version(self) -> int | None:
        """The weight version that the pool serves; None before the start and after a reload that
        failed.
        """
        return self.fleet.version

    @property
    def heard_at(self) -> float:
        """The time of the last token of any rollout."""
        return max((load.heard_at for load in self._loads.values()), default=0.0)

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None = None) -> None:
        """Loads a policy on all hosts.

        StoreError: it was refused, and hosts serve the old one. EngineError: no host serves it.

        `nearby`: further places of its files, as the store may not have them yet.
        """
        await self.fleet.serve(policy, version, probe, nearby)

    async def generate(
        self,
        groups: list[GroupRequest],
        on_group: OnGroup | None = None,
        enough: asyncio.Event | None = None,
        on_rollout: OnRollout | None = None,
    ) -> list[list[Completion]]:
        """Samples the completions of every group; returns them in order. EngineError when a rollout
        found no engine within its limits.

        `on_rollout` (index of the group, of the rollout, completion) is awaited as each rollout
        finishes, and returns its next turn or None. `on_group` (index, completions) is awaited as
        each group finishes. Once `enough` is set, running requests are aborted and waiting ones are
        not started: unfinished completions have the `finish_reason` "abort".
        """
        assert self.version is not None, "serve comes first"
        enough = enough or asyncio.Event()
        # the timeout starts now, also for engines that are still starting
        self.fleet.well_at = time.monotonic()
        self._num_calls += 1
        try:
            async with self._entrance:
                await self.fleet.look_up()
            async with asyncio.TaskGroup() as tasks:
                watchers = [
                    tasks.create_task(self._keep_looking_up(enough)),
                    tasks.create_task(self.fleet.keep_taking_in()),
                ]
                whole = []
                for number, group in enumerate(groups):
                    home = Anchor(group.home, len(group.prompt_tokens))
                    rollouts = [
                        tasks.create_task(self._rollout(group, (number, index), home, on_rollout, enough))
                        for index in range(len(group.params))
                    ]
                    whole.append(tasks.create_task(_group(number, rollouts, on_group)))
                completions = await asyncio.gather(*whole)
                for watcher in watchers:
                    watcher.cancel()
        except ExceptionGroup as failures:
            # the faults of all rollouts are alike: one is enough
            raise failures.exceptions[0] from None
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._last_ended.set()
        return completions

    async def release(self, joined: list[Host]) -> None:
        """Frees the memory of the engines of all hosts, and of those that have `joined`; none
        serves until the next `serve`.

        Waits for calls that still sample. EngineError when these had no token for so long that they
        should have been given up.
        """
        since = time.monotonic()
        while self._num_calls:
            left = max(since, self.heard_at) + self.progress_timeout_s + GIVEN_UP_S - time.monotonic()
            if left <= 0:
                raise EngineError(f"{self._num_calls} sampling calls do not end, so engines cannot free their memory")
            self._last_ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._last_ended.wait(), left)
        assert not any(load.in_flight for load in self._loads.values()), "a rollout is in flight"
        await self.fleet.release(joined)

    async def close(self) -> None:
        await self.fleet.close()

    async def _keep_looking_up(self, enough: asyncio.Event) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            await self.fleet.look_up()
            seats = sum(self.in_flight_max - self._loads[client.name].in_flight for client in self.fleet.clients)
            # thousands may wait: unless all must end, only as many are woken as there are free
            # seats
            async with self._changed:
                self._changed.notify(
                    seats
                ) if self.fleet.clients and not enough.is_set() else self._changed.notify_all()

    async def _rollout(
        self,
        group: GroupRequest,
        place: tuple[int, int],
        home: Anchor,
        on_rollout: OnRollout | None,
        enough: asyncio.Event,
    ) -> Completion:
        """Samples one rollout, turn by turn."""
        params, prior = group.params[place[1]], group.prior[place[1]]
        while True:
            completion = await self._turn(group, params, prior, home, enough)
            if on_rollout is None or not completion.finished:
                return completion
            next_turn = await on_rollout(*place, completion)
            if next_turn is None:
                return completion
            params, prior = next_turn
            home = Anchor(completion.engine)

    async def _turn(
        self, group: GroupRequest, params: Sampling, prior: Completion, home: Anchor, enough: asyncio.Event
    ) -> Completion:
        """Samples the rest of one turn of a rollout; after a fault it continues on another
        engine.
        """
        completion, num_faults, since = prior, 0, time.monotonic()
        while not completion.finished and not enough.is_set():
            client = await self._take_seat(home, enough)
            if client is None:
                break
            try:
                request = _request(group, params, prior, completion)
                sampled, fault = await self._ask_in_order(client, request, home, enough)
            finally:
                self._loads[client.name].in_flight -= 1
                async with self._changed:
                    self._changed.notify()
            completion = completion.then(sampled)
            if sampled.tokens:
                num_faults, since = 0, time.monotonic()
            if fault is not None:
                num_faults += 1
                log.info(
                    "a rollout of %s continues on another engine with its %d tokens: %s",
                    group.prompt_id,
                    len(completion.tokens),
                    fault,
                )
                # engines that refuse connections use up attempts at once: both limits must be
                # exceeded
                if num_faults >= FAULTS_MAX and time.monotonic() - since > self.progress_timeout_s:
                    raise EngineError(
                        f"{group.prompt_id} was given up after {num_faults} attempts without a token; last: {fault}"
                    )
        return completion

    async def _ask_in_order(
        self, client: EngineClient, request: SampleRequest, home: Anchor, enough: asyncio.Event
    ) -> tuple[Completion, EngineUnavailable | None]:
        """Returns `_ask`'s result. The request waits for the first one with this prefix, where the
        engine would otherwise compute it again.
        """
        computed = home.computed.get(client.name)
        if computed is None:
            computed = home.computed[client.name] = asyncio.Event()
        elif client.repeats_prompts and home.num_tokens >= LONG_PROMPT:
            await computed.wait()  # the first one also ends when `enough` is set
            if enough.is_set():
                return NOTHING_YET, None
        try:
            return await self._ask(client, request, enough, computed)
        finally:
            computed.set()

    async def _ask(
        self, client: EngineClient, request: SampleRequest, enough: asyncio.Event, computed: asyncio.Event
    ) -> tuple[Completion, EngineUnavailable | None]:
        """Returns the completion that one engine sampled, and the fault that ended it early, if
        any. An engine that failed gets no requests for a while.
        """
        assert self.version is not None
        load = self._loads[client.name]
        sampled, fault = await ask(client, request, self.version, load, self.progress_timeout_s, enough, computed)
        if fault is None:
            load.faults = 0
        elif time.monotonic() >= load.rest_until:
            # all requests in flight fail together, which counts as one fault
            log.warning(
                "%s gets no requests for a while, its rollouts continue on other engines: %s", client.name, fault
            )
            load.rest_until = time.monotonic() + min(REST_FIRST_S * 2**load.faults, REST_MAX_S)
            load.faults += 1
            self.num_lost += 1
        return sampled, fault

    async def _take_seat(self, home: Anchor, enough: asyncio.Event) -> EngineClient | None:
        """Takes a seat for a request: at the home engine if it has room, else on the engine with
        the fewest requests in flight. None once `enough` is set.
        """
        async with self._changed:
            while not enough.is_set():
                free = [client for client in self.fleet.clients if self._has_room(client.name)]
                if free:
                    client = min(
                        free, key=lambda client: (client.name != home.engine, self._loads[client.name].in_flight)
                    )
                    load, home.engine = self._loads[client.name], client.name
                    if not load.in_flight:
                        load.heard_at = time.monotonic()
                    load.in_flight += 1
                    return client
                if time.monotonic() - self.fleet.well_at > self.progress_timeout_s:
                    raise EngineError(f"no engine was healthy for {self.progress_timeout_s:g} s: see the engines' logs")
                # as many as there are free seats are woken at least every LOOK_AGAIN_S
                await self._changed.wait()
            self._changed.notify()  # another one may take the seat for which this was woken
        return None

    def _has_room(self, name: str) -> bool:
        load, now = self._loads[name], time.monotonic()
        silent = load.in_flight > 0 and now - load.heard_at > self.progress_timeout_s
        return load.in_flight < self.in_flight_max and now >= load.rest_until and not silent


async def _group(number: int, rollouts: list[asyncio.Task[Completion]], on_group: OnGroup | None) -> list[Completion]:
    """Waits for all completions of one group and returns them."""
    completions = await asyncio.gather(*rollouts)
    if on_group is not None and all(completion.finished for completion in completions):
        await on_group(number, completions)
    return completions


def _request(group: GroupRequest, params: Sampling, prior: Completion, so_far: Completion) -> SampleRequest:
    """The request for the rest of a rollout's turn, which began with `prior`. A rollout that
    continues on another engine gets another seed.
    """
    left = params.max_new_tokens - len(so_far.tokens)
    assert left > 0, f"{group.prompt_id}: a completion with all its tokens is finished"
    gained = len(so_far.tokens) - len(prior.tokens)
    seed = rollout_seed(params.seed, "rest", gained) if gained else params.seed
    # a random id: the same rollout may still run on an engine that was given up; of equal length,
    # so that none is a prefix of another
    wanted = replace(params, max_new_tokens=left, seed=seed)
    request = SampleRequest(uuid.uuid4().hex, group.prompt_tokens + so_far.tokens.tolist(), wanted)
    if (hear := group.hear) is None:
        return request
    return replace(request, hear=lambda heard: hear(so_far.then(heard.completion("abort", [], ""))))
