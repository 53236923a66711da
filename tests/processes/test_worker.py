"""The rule of workers: whatever kills processes, from inside or outside, every request that does
not kill gets its answer, and one that does is blamed after two processes in which it was alone.

The processes are played: they live in this event loop, and die when they are told to. A tick of
their work is a turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import EngineError, UserError
from rlpipe.processes import worker as worker_module
from rlpipe.processes.pool import WorkerPool
from rlpipe.processes.worker import Losses, ProcessEnded, TooManyLost, UserCode, Worker, ask_twice
from tests.deadlines import DEADLINE_S


@dataclass
class World:
    """The processes so far, and what happens in them."""

    is_async: bool
    answers_after: list[int]  # for each request how many ticks it takes
    kills: set[int]  # these requests kill their process then
    hangs: set[int] = field(default_factory=set)  # these never answer, nor does any other beside them
    outside: set[int] = field(default_factory=set)  # the numbers of processes that are killed from outside
    outside_after: int = 1  # ticks after it was first asked
    error: str = ""
    started: list[PlayedProcess] = field(default_factory=list)
    alone: Counter[int] = field(default_factory=Counter)  # how often a request was alone in a process that it killed

    def make(self, *_: Any) -> PlayedProcess:
        self.started.append(PlayedProcess(self, len(self.started) + 1))
        return self.started[-1]


class PlayedProcess:
    fault, has_unread = "its process died", False

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at_work: dict[int, int] = {}  # request by key
        self.num_asked = 0

    async def open(self, on_message: Callable[[Any], None]) -> None:
        self.on_message = on_message

    def later(self, ticks: int, function: Callable[[], object]) -> None:
        if not self.has_ended:
            call = partial(self.later, ticks - 1, function) if ticks > 1 else function
            asyncio.get_running_loop().call_soon(call)

    def write(self, message: Any) -> None:
        if "key" not in message:
            ready = {"error": self.world.error} if self.world.error else {"is_async": self.world.is_async}
            self.later(2, partial(self.on_message, ready))
            return
        key, request = message["key"], message["request"]["index"]
        self.at_work[key] = request
        assert self.world.is_async or len(self.at_work) == 1, "one at a time"
        self.num_asked += 1
        if self.num_asked == 1 and self.number in self.world.outside:
            self.later(self.world.outside_after, self.leave)
        self.later(self.world.answers_after[request], partial(self.finish, key, request))

    def finish(self, key: int, request: int) -> None:
        if self.has_ended or self.world.hangs & {*self.at_work.values()}:
            return
        if request in self.world.kills:
            self.world.alone[request] += len(self.at_work) == 1
            self.leave()
            return
        del self.at_work[key]
        self.on_message({"key": key, "answer": request})

    def leave(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def has_ended(self) -> bool:
        return self.ended.done()

    async def end(self, *, by_itself: bool) -> int:
        self.leave()
        await asyncio.sleep(0)
        return -9


@contextlib.asynccontextmanager
async def asking(world: World, losses: Losses, timeout_s: float = DEADLINE_S) -> AsyncIterator[Callable[[int], Any]]:
    """A function that asks a worker of this world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "ChildProcess", world.make)
        worker = Worker(UserCode("the field", "no.module", {}, {}), losses)
        try:
            yield lambda index: ask_twice(partial(worker.ask, lambda _: ({"index": index}, timeout_s)))
        finally:
            await worker.close()
        with pytest.raises(EngineError):
            await worker.start()


async def outcomes_of(world: World, losses: Losses, timeout_s: float = DEADLINE_S) -> list[Any]:
    """The answer or the error of each request; all are asked at once."""
    async with asking(world, losses, timeout_s) as ask:
        return await asyncio.gather(*map(ask, range(len(world.answers_after))), return_exceptions=True)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(1, 24))
    indices = st.sets(st.integers(0, count - 1))
    return World(
        is_async=draw(st.booleans()),
        answers_after=draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)),
        kills=draw(indices),
    )


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_what_kills_is_blamed_after_two_processes_alone_and_all_others_are_answered(world: World) -> None:
    outcomes = asyncio.run(outcomes_of(world, Losses()))
    for index, outcome in enumerate(outcomes):
        if index in world.kills:
            assert isinstance(outcome, ProcessEnded) and world.alone[index] == 2
        else:
            assert outcome == {"answer": index}
    count = len(world.answers_after)
    assert len(world.started) <= 1 + count + len(world.kills) * (count.bit_length() + 2), "each is found by halves"


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(1, 40), st.integers(1, 5))
def test_kills_from_outside_cost_no_request_its_answer(world: World, process: int, after: int) -> None:
    """As long as no request is alone in two of the processes that are killed."""
    world.outside, world.outside_after = {process}, after
    outcomes = asyncio.run(outcomes_of(world, Losses()))
    for index, outcome in enumerate(outcomes):
        if index in world.kills:
            assert isinstance(outcome, ProcessEnded) and world.alone[index] >= 1
        else:
            assert outcome == {"answer": index}


@settings(max_examples=30, deadline=None)
@given(worlds(), st.integers(1, 5))
def test_many_at_once_survive_several_kills_from_outside(world: World, num_kills: int) -> None:
    """At most one of the processes is killed while a request is alone in it."""
    world.is_async, world.kills = True, set()
    world.outside = {number for number in range(1, num_kills + 1) if len(world.answers_after) >> (number - 1)}
    outcomes = asyncio.run(outcomes_of(world, Losses()))
    assert outcomes == [{"answer": index} for index in range(len(world.answers_after))]


async def test_one_that_kills_late_is_found_while_others_are_asked_all_the_time() -> None:
    world = World(is_async=True, answers_after=[50, 1, 2, 3, 4], kills={0})
    async with asking(world, Losses()) as ask:
        killer, num_answers = asyncio.create_task(ask(0)), Counter[int]()

        async def ask_on(index: int) -> None:
            while not killer.done() and num_answers[index] < 1000:
                assert await ask(index) == {"answer": index}
                num_answers[index] += 1

        await asyncio.gather(*map(ask_on, range(1, 5)))
        with pytest.raises(ProcessEnded):
            await killer
    assert world.alone[0] == 2 and max(num_answers.values()) < 1000 and min(num_answers.values()) > 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_one_that_takes_too_long_alone_is_at_fault_at_once(is_async: bool) -> None:
    world = World(is_async, answers_after=[1] * 8, kills=set(), hangs={3})
    outcomes = await outcomes_of(world, Losses(), timeout_s=0.05)  # short: it is given up
    assert isinstance(outcomes[3], TimeoutError)
    assert [outcome for index, outcome in enumerate(outcomes) if index != 3] == [
        {"answer": index} for index in range(8) if index != 3
    ]
    assert len(world.started) <= 2 + 6 * is_async


async def test_too_many_lost_in_a_row_end_all_that_wait_and_an_answer_between_forgives() -> None:
    losses = Losses(4)
    outcomes = await outcomes_of(World(False, [1] * 5, kills={0, 1, 2, 3, 4}), losses)
    assert [type(outcome) for outcome in outcomes] == [ProcessEnded] + [TooManyLost] * 4
    assert "the field: 4 processes in a row were lost (its process died)" in str(outcomes[1])
    losses.answered()
    outcomes = await outcomes_of(World(False, [1] * 6, kills={0, 2, 4}), losses)
    assert [type(outcome) for outcome in outcomes] == [ProcessEnded, dict] * 3


async def test_code_that_does_not_load_is_the_error_of_all() -> None:
    outcomes = await outcomes_of(World(True, [1] * 3, kills=set(), error="no such function"), Losses())
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(UserError, "no such function")] * 3


@pytest.mark.parametrize("name", ["has_unread", "open"])
async def test_an_error_of_this_process_reaches_all_calls_and_leaves_no_process(name: str) -> None:
    """No descriptor is left, for example: what is asked later gets a process that is watched."""
    world = World(is_async=False, answers_after=[3, 2], kills=set())
    broken = [True]

    class Broken(PlayedProcess):
        @property
        def has_unread(self) -> bool:  # type: ignore[override]
            if name == "has_unread" and broken:
                raise OSError(24, broken.pop())
            return False

        async def open(self, on_message: Callable[[Any], None]) -> None:
            if name == "open" and broken:
                raise OSError(24, broken.pop())
            await super().open(on_message)

    def make(*_: Any) -> PlayedProcess:
        world.started.append(Broken(world, len(world.started) + 1))
        return world.started[-1]

    world.make = make  # type: ignore[method-assign]
    async with asking(world, Losses()) as ask, asyncio.timeout(DEADLINE_S):
        with pytest.raises(OSError, match="24"):
            await ask(0)
        assert world.started[0].has_ended
        assert (await ask(1))["answer"] == 1 and len(world.started) == 2


def test_a_pool_whose_loop_cannot_be_made_says_so_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> asyncio.AbstractEventLoop:
        raise OSError(24, "Too many open files")

    pool = WorkerPool("the field", "no.module", {})
    monkeypatch.setattr(asyncio, "new_event_loop", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        pool.start()
    pool.close()
