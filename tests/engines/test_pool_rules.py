"""The pool's rules, with engines that are played: who is asked, for how long, and what ends a wait.

Real ones: engines/test_pool.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rlpipe.base.errors import EngineError, StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.engines.asking import cut_short
from rlpipe.engines.client import (
    NOTHING_YET,
    Completion,
    EngineClient,
    EngineUnavailable,
    Heard,
    RequestRefused,
    SampleRequest,
    Sampling,
    ScoredTokens,
    logprobs_of,
    tokens_of,
)
from rlpipe.engines.fleet import Host
from rlpipe.engines.pool import EnginePool, GroupRequest, NextTurn
from rlpipe.engines.weights import Probe
from rlpipe.store.nearby import Nearby
from tests.deadlines import DEADLINE_S, SHORT_S, until_async

REF, PROBE = ArtifactRef("policy", "sha"), Probe([1, 2], [-1.0])


class Played(EngineClient):
    """Answers after `seconds`; while `down`, refuses at once."""

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name, self.url, self.seconds = name, name, seconds
        self.exact = True
        self.down = False
        self.most, self.now = 0, 0

    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        if self.down:
            raise EngineUnavailable(f"{self.name} refuses")
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return Completion(tokens_of([7]), logprobs_of([-0.5]), "length", [(1, 1)], self.name)

    async def score_top(self, tokens: list[int], num_scored: int, top_k: int) -> ScoredTokens:
        raise NotImplementedError

    async def load(self, model_path: str, version: int) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def weight_version(self) -> int:
        raise NotImplementedError

    async def abort(self, request_ids: list[str]) -> None:
        """Nothing: on a machine that stood still for SHORT_S, a pool rightly asks for it."""

    async def healthy(self) -> bool:
        return not self.down


@dataclass(eq=False)
class PlayedHost:
    engines: list[Any] = field(default_factory=list)
    name: str = "played"
    files_url: str = ""
    fault: Exception | None = None
    served: list[int] = field(default_factory=list)
    progress: int = 0
    refuses: int = 0  # so often

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None:
        if self.refuses:
            self.refuses -= 1
            raise EngineError("out of memory")
        self.served.append(version)

    async def clients(self, version: int) -> list[EngineClient]:
        if self.fault:
            raise self.fault
        return [*self.engines]

    async def release(self) -> None: ...

    async def close(self) -> None: ...


async def pool_of(*hosts: PlayedHost, in_flight_max: int = 4, timeout_s: float = DEADLINE_S) -> EnginePool:
    return await pool_over([*hosts], in_flight_max, timeout_s)


async def pool_over(hosts: list[Host], in_flight_max: int = 4, timeout_s: float = DEADLINE_S) -> EnginePool:
    """A pool over a list that may change; an error in it is raised by the search."""

    async def find_hosts() -> list[Host]:
        if isinstance(hosts[-1], Exception):
            raise hosts[-1]
        return [*hosts]

    pool = EnginePool(find_hosts, in_flight_max, timeout_s)
    await pool.serve(REF, 1, PROBE)
    return pool


def groups(count: int, size: int = 2, tokens_max: int = 1) -> list[GroupRequest]:
    params, prior = [Sampling(tokens_max)] * size, [NOTHING_YET] * size
    return [GroupRequest(f"p/{index}", [1], params, prior) for index in range(count)]


async def test_a_queue_longer_than_one_timeout_is_no_fault() -> None:
    engine = Played("a", seconds=SHORT_S / 4)
    pool = await pool_of(PlayedHost([engine]), in_flight_max=4, timeout_s=SHORT_S)
    done = await pool.generate(groups(10))  # five waves
    assert all(completion.finished for group in done for completion in group) and engine.most == 4


async def test_what_on_rollout_returns_is_the_rollout_s_next_turn_where_it_was() -> None:
    """Of each group the first rollout takes two turns more, and none
    waits for another of its group."""
    engines = [Played(name, 0.01) for name in "abc"]
    pool, wanted = await pool_of(PlayedHost([*engines]), in_flight_max=2), groups(6, tokens_max=9)
    turns: list[tuple[int, int]] = []

    async def on_rollout(number: int, index: int, completion: Completion) -> NextTurn | None:
        turns.append((number, index))
        if index or turns.count((number, index)) == 3:
            return None
        said = Completion(tokens_of([5, 6]), logprobs_of([0.0, 0.0]), "abort", [(1, 2)], completion.engine)
        return wanted[number].params[index], replace(completion, finish_reason="abort").then(said)

    done = await pool.generate(wanted, on_rollout=on_rollout)
    assert Counter(turns) == {(number, index): 1 if index else 3 for number in range(6) for index in (0, 1)}
    for first, second in done:
        assert first.tokens.tolist() == [7, 5, 6, 7, 5, 6, 7] and first.spans == [(1, 7)]
        assert second.tokens.tolist() == [7]


async def test_an_engine_that_refuses_to_abort_is_asked_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    engine, enough, aborts = Played("a"), asyncio.Event(), []

    async def refuse(request_ids: list[str]) -> None:
        aborts.append(request_ids)
        raise RequestRefused("wrong key")

    engine.abort = refuse
    enough.set()
    await asyncio.wait_for(cut_short(engine, "a", enough), DEADLINE_S)
    assert aborts == [["a"]] and "wrong key" in caplog.text


async def test_calls_side_by_side_share_the_seats() -> None:
    engines = [Played("a", 0.05), Played("b", 0.05)]
    pool = await pool_of(PlayedHost(engines), in_flight_max=4)
    await asyncio.gather(*(pool.generate(groups(8)) for _ in range(3)))
    assert [engine.most for engine in engines] == [4, 4]
    assert all(load.in_flight == 0 for load in pool._loads.values())


async def test_engines_that_all_refuse_for_a_moment_are_waited_for() -> None:
    engines = [Played(name) for name in "abcdefgh"]
    for engine in engines:
        engine.down = True
    pool = await pool_of(PlayedHost(engines))
    pending = asyncio.create_task(pool.generate(groups(4)))
    await asyncio.sleep(0.5)  # some tries
    for engine in engines:
        engine.down = False
    assert all(completion.finished for group in await pending for completion in group)


async def test_engines_that_refuse_for_good_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.engines.pool.REST_MAX_S", 0.1)
    engine = Played("a")
    engine.down = True
    pool = await pool_of(PlayedHost([engine]), timeout_s=SHORT_S)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match="given up after"):
            await pool.generate(groups(1))


async def test_the_fault_of_one_host_is_its_own_and_of_all_is_told() -> None:
    bad, good = PlayedHost(fault=UserError("engines.port=1: the port is taken")), PlayedHost([Played("a")])
    pool = await pool_of(bad, good)
    assert len(await pool.generate(groups(2))) == 2
    good.fault = UserError("engines.port=2: the port is taken")
    with pytest.raises(UserError, match="port is taken"):
        await pool.generate(groups(2))


async def test_a_fault_that_comes_while_groups_wait_ends_the_wait() -> None:
    host = PlayedHost([])
    pool = await pool_of(host)
    pending = asyncio.create_task(pool.generate(groups(2)))
    await asyncio.sleep(0.1)
    host.fault = EngineError("all engines ended; their log says why")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match="log says why"):
            await pending


async def test_without_any_engine_the_wait_has_an_end() -> None:
    pool = await pool_of(PlayedHost([]), timeout_s=SHORT_S)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match="no engine was healthy"):
            await pool.generate(groups(1))


@pytest.fixture
def _found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.engines.fleet.FIND_AGAIN_S", 0.05)


async def sampling(pool: EnginePool, count: int = 64) -> asyncio.Task[list[list[Completion]]]:
    """A call that takes a while, and is under way."""
    pending = asyncio.create_task(pool.generate(groups(count)))
    await asyncio.sleep(0.1)
    assert not pending.done()
    return pending


def names(done: list[list[Completion]]) -> set[str]:
    return {completion.engine for group in done for completion in group}


@pytest.mark.usefixtures("_found_soon")
async def test_a_host_that_joins_while_it_samples_is_given_the_weights_once_and_takes_part() -> None:
    first, second = PlayedHost([Played("a", 0.05)], "first"), PlayedHost([Played("b", 0.05)], "second")
    hosts: list[Host] = [first]
    pool = await pool_over(hosts)
    pending = await sampling(pool)
    hosts.append(second)
    assert names(await pending) == {"a", "b"}
    assert (first.served, second.served) == ([1], [1])
    assert names(await pool.generate(groups(64))) == {"a", "b"} and second.served == [1]
    await pool.serve(REF, 2, PROBE)
    assert (first.served, second.served) == ([1, 2], [1, 2])


@pytest.mark.usefixtures("_found_soon")
async def test_a_host_that_leaves_while_it_samples_gets_nothing_more() -> None:
    first, second = PlayedHost([Played("a", 0.05)], "first"), PlayedHost([Played("b", 0.05)], "second")
    hosts: list[Host] = [first, second]
    pool = await pool_over(hosts)
    pending = await sampling(pool)
    hosts.remove(second)
    second.engines[0].down = True
    done = await pending
    assert all(completion.finished for group in done for completion in group)
    assert names(await pool.generate(groups(2))) == {"a"}


@pytest.mark.usefixtures("_found_soon")
async def test_a_joining_host_that_refuses_harms_nobody_and_is_asked_again() -> None:
    refusing = PlayedHost([], "refusing", refuses=3)
    hosts: list[Host] = [PlayedHost([Played("a", 0.05)], "first")]
    pool = await pool_over(hosts)
    pending = await sampling(pool)
    hosts.append(refusing)
    assert names(await pending) == {"a"} and refusing.served == [1] and refusing.refuses == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_found_soon")
@pytest.mark.parametrize(
    "fault", [OSError("the store is away"), StoreError("damaged"), EngineError("no host answered")]
)
async def test_hosts_that_cannot_be_looked_for_end_nothing_while_engines_sample(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    hosts: list[Host] = [PlayedHost([Played("a", 0.05)])]
    pool = await pool_over(hosts)
    pending = await sampling(pool)
    hosts.append(fault)  # type: ignore[arg-type]
    assert names(await pending) == {"a"} and str(fault) in caplog.text


@pytest.mark.usefixtures("_found_soon")
async def test_without_engines_a_fault_of_the_search_ends_the_wait() -> None:
    hosts: list[Host] = [PlayedHost([])]
    pool = await pool_over(hosts)
    pending = await sampling(pool)
    hosts.append(EngineError("no host answered"))  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match="no host answered"):
            await pending


class Repeating(Played):
    """Computes a prompt for each request that comes before one with the same prompt has a token.

    `begun`: prompts, in the order in which they came.
    """

    def __init__(self, name: str, repeats: bool = True) -> None:
        super().__init__(name)
        self.exact = False
        self.repeats = repeats
        self.begun: list[int] = []
        self.computed: set[int] = set()
        self.repeated = 0
        self.failing = 0  # so many requests are lost before they have a token
        self.go_on = asyncio.Event()
        self.go_on.set()

    @property
    def repeats_prompts(self) -> bool:
        return self.repeats

    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        prompt = request.tokens[0]
        self.begun.append(prompt)
        self.repeated += self.begun.count(prompt) > 1 and prompt not in self.computed
        await asyncio.sleep(0.01)
        if self.failing:
            self.failing -= 1
            raise EngineUnavailable(f"{self.name} lost it")
        self.computed.add(prompt)
        heard.add([7], [-0.5])
        await self.go_on.wait()
        heard.add([8], [-0.5])
        return heard.completion("length", [(1, 2)], self.name)

    async def abort(self, request_ids: list[str]) -> None:
        self.go_on.set()


def of_tokens(prompt_tokens: int, count: int = 6, size: int = 4) -> list[GroupRequest]:
    params, prior = [Sampling(2)] * size, [NOTHING_YET] * size
    return [GroupRequest(f"p/{index}", [index] * prompt_tokens, params, prior) for index in range(count)]


@pytest.mark.parametrize(
    ("repeats", "prompt_tokens", "waits"), [(True, 512, True), (True, 511, False), (False, 6000, False)]
)  # a short prompt is computed sooner than it is waited for; other engines compute a long one once as it is
async def test_the_first_request_of_a_group_computes_its_long_prompt(
    repeats: bool, prompt_tokens: int, waits: bool
) -> None:
    engines = [Repeating("a", repeats), Repeating("b", repeats)]
    pool = await pool_of(PlayedHost([*engines]), in_flight_max=6)  # more than a group: some are split over both engines
    done = await pool.generate(of_tokens(prompt_tokens))
    assert [[completion.tokens.tolist() for completion in group] for group in done] == [[[7, 8]] * 4] * 6
    assert sum(len(engine.begun) for engine in engines) == 24
    assert (sum(engine.repeated for engine in engines) == 0) is waits


async def test_a_first_request_that_is_lost_keeps_nobody_waiting() -> None:
    engines = [Repeating("a"), Repeating("b")]
    engines[0].failing = 3
    pool = await pool_of(PlayedHost([*engines]), in_flight_max=6)
    done = await pool.generate(of_tokens(600))
    assert all(completion.tokens.tolist() == [7, 8] for group in done for completion in group)


async def test_those_that_wait_for_a_first_request_end_when_there_is_enough() -> None:
    engine, enough = Repeating("a"), asyncio.Event()
    engine.go_on.clear()
    pool = await pool_of(PlayedHost([engine]), in_flight_max=6)
    pending = asyncio.create_task(pool.generate(of_tokens(600), enough=enough))
    await until_async(lambda: len(engine.begun) > 0, look_s=0)
    enough.set()  # the first request has no token yet, the others of its group wait for one
    done = await asyncio.wait_for(pending, DEADLINE_S)
    assert [len(group) for group in done] == [4] * 6
    assert len(engine.begun) <= 2, "nothing was begun after there was enough"
    assert not any(load.in_flight for load in pool._loads.values())
