"""The pool's rules, with engines that are played: who is asked, for how long, and what ends a wait. Real ones: test_engine_pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rlpipe.engines.client import (
    NOTHING_YET,
    Completion,
    EngineClient,
    EngineUnavailable,
    RequestRefused,
    SampleRequest,
    SamplingParams,
)
from rlpipe.engines.pool import EnginePool, GroupRequest, Host, _cut_short
from rlpipe.types import ArtifactRef, EngineError, UserError
from rlpipe.weights import Probe

REF, PROBE = ArtifactRef("policy", "sha"), Probe([1, 2], [-1.0])
TIMEOUT_S = 1.0


class Played(EngineClient):
    """Answers after `seconds`; while `down`, refuses at once."""

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name, self.url, self.seconds = name, name, seconds
        self.down = False
        self.most, self.now = 0, 0

    async def sample(self, requests: list[SampleRequest], timeout_s: float) -> list[Completion | EngineUnavailable]:
        if self.down:
            return [EngineUnavailable(f"{self.name} refuses")] * len(requests)
        self.now += len(requests)
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= len(requests)
        return [Completion([7], [-0.5], "length", [(1, 1)], self.name) for _ in requests]

    async def score(self, tokens: list[int], num_scored: int) -> list[float]:
        raise NotImplementedError

    async def load(self, model_path: str, version: int) -> None:
        raise NotImplementedError

    async def weight_version(self) -> int:
        raise NotImplementedError

    async def abort(self, request_ids: list[str]) -> None:
        raise NotImplementedError

    async def healthy(self) -> bool:
        return not self.down


@dataclass
class PlayedHost:
    engines: list[Any] = field(default_factory=list)
    name: str = "played"
    fault: Exception | None = None
    served: list[int] = field(default_factory=list)

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe) -> None:
        self.served.append(version)

    async def clients(self, version: int) -> list[EngineClient]:
        if self.fault:
            raise self.fault
        return [*self.engines]

    async def close(self) -> None: ...


async def pool_of(*hosts: PlayedHost, in_flight_max: int = 4) -> EnginePool:
    async def find_hosts() -> list[Host]:
        return [*hosts]

    pool = EnginePool(find_hosts, in_flight_max, TIMEOUT_S)
    await pool.serve(REF, 1, PROBE)
    return pool


def groups(count: int) -> list[GroupRequest]:
    return [GroupRequest(f"p/{index}", [1], [SamplingParams(1)] * 2, [NOTHING_YET] * 2) for index in range(count)]


async def test_a_queue_longer_than_one_timeout_is_no_fault() -> None:
    engine = Played("a", seconds=0.2)
    pool = await pool_of(PlayedHost([engine]), in_flight_max=4)
    done = await pool.generate(groups(16))  # eight waves of 0.2 s
    assert all(completion.finished for group in done for completion in group) and engine.most == 4


async def test_what_on_group_returns_is_the_group_s_next_turn() -> None:
    """Group 1 takes a turn more than group 0; of each, the second rollout is over after the first turn."""
    pool, wanted = (
        await pool_of(PlayedHost([Played("a")])),
        [GroupRequest(f"p/{i}", [1], [SamplingParams(9)] * 2, [NOTHING_YET] * 2) for i in (0, 1)],
    )
    turns: list[int] = []

    async def on_group(index: int, group: list[Completion]) -> GroupRequest | None:
        turns.append(index)
        if turns.count(index) > index:
            return None
        said = Completion([5, 6], [0.0, 0.0], "abort", [(1, 2)], "")
        return replace(wanted[index], prior=[group[0].then(said), group[1]])

    one, two = await pool.generate(wanted, on_group)
    assert sorted(turns) == [0, 1, 1]
    assert one == [Completion([7], [-0.5], "length", [(1, 1)], "a")] * 2
    assert two == [Completion([7, 5, 6, 7], [-0.5, 0.0, 0.0, -0.5], "length", [(1, 4)], "a"), one[1]]


async def test_an_engine_that_refuses_to_abort_is_asked_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    engine, enough, asked = Played("a"), asyncio.Event(), []

    async def refuse(request_ids: list[str]) -> None:
        asked.append(request_ids)
        raise RequestRefused("wrong key")

    engine.abort = refuse
    enough.set()
    await asyncio.wait_for(_cut_short(engine, [], enough), 10)
    assert asked == [[]] and "wrong key" in caplog.text


async def test_calls_side_by_side_share_the_seats() -> None:
    engines = [Played("a", 0.05), Played("b", 0.05)]
    pool = await pool_of(PlayedHost(engines), in_flight_max=4)
    await asyncio.gather(*(pool.generate(groups(8)) for _ in range(3)))
    assert [engine.most for engine in engines] == [4, 4]
    assert all(seat.in_flight == 0 for seat in pool._seats.values())


async def test_engines_that_all_refuse_for_a_moment_are_waited_for() -> None:
    engines = [Played(name) for name in "abcdefgh"]
    for engine in engines:
        engine.down = True
    pool = await pool_of(PlayedHost(engines))
    pending = asyncio.create_task(pool.generate(groups(4)))
    await asyncio.sleep(TIMEOUT_S / 2)
    for engine in engines:
        engine.down = False
    assert all(completion.finished for group in await pending for completion in group)


async def test_engines_that_refuse_for_good_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.engines.pool.REST_MAX_S", 0.1)
    engine = Played("a")
    engine.down = True
    pool = await pool_of(PlayedHost([engine]))
    async with asyncio.timeout(30):
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
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="log says why"):
            await pending


async def test_without_any_engine_the_wait_has_an_end() -> None:
    pool = await pool_of(PlayedHost([]))
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="no engine was well"):
            await pool.generate(groups(1))
