"""The pool: spreads rollouts over engines, bounds what is in flight, sends what a lost engine left
to another one.

A request has no deadline but progress: an engine none of whose requests has had a token for
`engines.progress_timeout_s` is given up. So a completion may take hours, and one that waits in the
engine's own queue is no fault. What a killed engine had sampled is kept.
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
FAULTS_MAX = 10  # of a rollout, without a token between them
# an engine that failed gets nothing for so long, doubled with each fault in a row
REST_FIRST_S, REST_MAX_S = 0.2, 30.0
# tokens, of which an engine that repeats prompts gets one at first: its computation takes longer
# than a way there and back
LONG_PROMPT = 512
LOOK_AGAIN_S = 0.5  # how often hosts are asked which engines may sample
GIVEN_UP_S = 30.0  # for a request that has no token for `progress_timeout_s` to be given up


@dataclass(frozen=True)
class GroupRequest:
    """All completions wanted for one prompt: they go to one engine where it has room, and it
    computes the prompt once.

    `prior`: what is there of each completion already, `NOTHING_YET` for nothing; a finished one is
    not sampled again, an unfinished one goes on where it was cut short. Example:
    GroupRequest("words/17", [5, 9, 300], params, [NOTHING_YET] * 8)
    """

    prompt_id: str
    prompt_tokens: list[int]
    params: list[Sampling]  # one per completion; max_new_tokens counts the prior tokens too
    prior: list[Completion]
    home: str = ""  # the engine that has computed the beginning already, where one has

    def __post_init__(self) -> None:
        assert self.prompt_tokens and self.params, f"{self.prompt_id} asks for nothing"
        assert len(self.prior) == len(self.params), (
            f"{self.prompt_id}: {len(self.prior)} priors, {len(self.params)} params"
        )


OnGroup = Callable[[int, list[Completion]], Awaitable[None]]
NextTurn = tuple[Sampling, Completion]  # how a rollout goes on, and what there is of it
OnRollout = Callable[[int, int, Completion], Awaitable[NextTurn | None]]


@dataclass
class Anchor:
    """The engine that computes a rollout's prefix: shared by its group in the first turn, its own
    later.

    `computed`: per engine, set once the first request that it got has a token or has ended. The
    other requests there wait for it, each in its seat, where the engine would compute the prefix
    for each.
    """

    engine: str = ""
    num_tokens: int = 0  # of a prefix that several rollouts share
    computed: dict[str, asyncio.Event] = field(default_factory=dict)


class EnginePool:
    """The engines of all hosts as one place to send rollouts to."""

    def __init__(self, find_hosts: FindHosts, in_flight_max: int, progress_timeout_s: float) -> None:
        self.fleet = Fleet(find_hosts)
        self.in_flight_max = in_flight_max
        self.progress_timeout_s = progress_timeout_s
        self._loads: defaultdict[str, EngineLoad] = defaultdict(EngineLoad)
        self._changed = asyncio.Condition()  # an engine has room, or is back
        self._entrance = asyncio.Lock()  # calls are begun in the order in which they come
        self._num_calls = 0  # of `generate` that have not ended
        self._last_ended = asyncio.Event()

    @property
    def version(self) -> int | None:
        """The weight version that the pool serves; None before the start and after a reload that
        failed.
        """
        return self.fleet.version

    @property
    def heard_at(self) -> float:
        """When a token of any rollout came last."""
        return max((load.heard_at for load in self._loads.values()), default=0.0)

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None = None) -> None:
        """Puts a policy on all hosts.

        StoreError: it was refused and the old one keeps serving. EngineError: no host serves it.

        `nearby`: where its files are beside the store, which may not have them yet.
        """
        await self.fleet.serve(policy, version, probe, nearby)

    async def generate(
        self,
        groups: list[GroupRequest],
        on_group: OnGroup | None = None,
        enough: asyncio.Event | None = None,
        on_rollout: OnRollout | None = None,
    ) -> list[list[Completion]]:
        """The completions of every group, in order; EngineError when a rollout found no engine
        within its bounds.

        `on_rollout` (index of the group, of the rollout, completion) is awaited as each rollout
        finishes; what it returns is the rollout's next turn. `on_group` (index, completions) is
        awaited as each group finishes. Once `enough` is set, what runs is cut short and what waits
        is not started: unfinished completions are answered with `finish_reason` "abort".
        """
        assert self.version is not None, "serve comes first"
        enough = enough or asyncio.Event()
        # engines that are only being started get their time too
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
            # one rollout's fault says it; hundreds of them say no more
            raise failures.exceptions[0] from None
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._last_ended.set()
        return completions

    async def release(self, joined: list[Host]) -> None:
        """The engines of all hosts, and of those that have `joined`, give their memory back;
        nothing is served until the next `serve`.

        Whoever samples still is waited for. EngineError: none of it has had a token for so long
        that it should have been given up.
        """
        since = time.monotonic()
        while self._num_calls:
            left = max(since, self.heard_at) + self.progress_timeout_s + GIVEN_UP_S - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"{self._num_calls} calls that sample do not end, so engines cannot give their memory back"
                )
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
            # thousands may wait: without an end to tell them of, only
            # those are woken that have a seat
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
        """Samples one rollout, turn after turn."""
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
        """Samples what is missing of one rollout, on one engine after another until it is all
        there.
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
                    "a rollout of %s goes elsewhere with %d tokens: %s", group.prompt_id, len(completion.tokens), fault
                )
                # engines that refuse connections use up attempts in no
                # time: both bounds have to be passed
                if num_faults >= FAULTS_MAX and time.monotonic() - since > self.progress_timeout_s:
                    raise EngineError(
                        f"{group.prompt_id} was given up after {num_faults} attempts without a token; last: {fault}"
                    )
        return completion

    async def _ask_in_order(
        self, client: EngineClient, request: SampleRequest, home: Anchor, enough: asyncio.Event
    ) -> tuple[Completion, EngineUnavailable | None]:
        """Returns `_ask`'s result. The request waits for the first one with this prefix, where that
        saves computing the prefix again."""
        computed = home.computed.get(client.name)
        if computed is None:
            computed = home.computed[client.name] = asyncio.Event()
        elif client.repeats_prompts and home.num_tokens >= LONG_PROMPT:
            await computed.wait()  # when there is enough, the first one ends too
            if enough.is_set():
                return NOTHING_YET, None
        try:
            return await self._ask(client, request, enough, computed)
        finally:
            computed.set()

    async def _ask(
        self, client: EngineClient, request: SampleRequest, enough: asyncio.Event, computed: asyncio.Event
    ) -> tuple[Completion, EngineUnavailable | None]:
        """Returns the completion that one engine sampled, and the fault that ended it early. An
        engine that failed gets no more requests for a while."""
        assert self.version is not None
        load = self._loads[client.name]
        sampled, fault = await ask(client, request, self.version, load, self.progress_timeout_s, enough, computed)
        if fault is None:
            load.faults = 0
        elif time.monotonic() >= load.rest_until:
            # all that were in flight fail together: that is one fault
            log.warning("%s gets nothing for a while, its rollouts go elsewhere: %s", client.name, fault)
            load.rest_until = time.monotonic() + min(REST_FIRST_S * 2**load.faults, REST_MAX_S)
            load.faults += 1
        return sampled, fault

    async def _take_seat(self, home: Anchor, enough: asyncio.Event) -> EngineClient | None:
        """Takes a seat, at home where there is one, else on the engine that has the fewest in
        flight; None once `enough` is set.
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
                    raise EngineError(f"no engine was well for {self.progress_timeout_s:g} s: see the engines' logs")
                # those for whom there is a seat are woken at least every LOOK_AGAIN_S
                await self._changed.wait()
            self._changed.notify()  # the seat that this was woken for is another's
        return None

    def _has_room(self, name: str) -> bool:
        load, now = self._loads[name], time.monotonic()
        silent = load.in_flight > 0 and now - load.heard_at > self.progress_timeout_s
        return load.in_flight < self.in_flight_max and now >= load.rest_until and not silent


async def _group(number: int, rollouts: list[asyncio.Task[Completion]], on_group: OnGroup | None) -> list[Completion]:
    """The completions of one group, once all are there."""
    completions = await asyncio.gather(*rollouts)
    if on_group is not None and all(completion.finished for completion in completions):
        await on_group(number, completions)
    return completions


def _request(group: GroupRequest, params: Sampling, prior: Completion, so_far: Completion) -> SampleRequest:
    """The request for the rest of a rollout's turn, which began with `prior`. A rollout that
    continues on another engine does so with other random numbers."""
    left = params.max_new_tokens - len(so_far.tokens)
    assert left > 0, f"{group.prompt_id}: a completion with all its tokens is finished"
    gained = len(so_far.tokens) - len(prior.tokens)
    seed = rollout_seed(params.seed, "rest", gained) if gained else params.seed
    # random: the same rollout may still run on an engine that was given up; equal
    # lengths: no id is a prefix of another
    return SampleRequest(
        uuid.uuid4().hex, group.prompt_tokens + so_far.tokens.tolist(), replace(params, max_new_tokens=left, seed=seed)
    )
