"""The deadline of a request is progress: slow engines are waited for, silent and lost ones are left
with what they sampled."""

from __future__ import annotations

import asyncio
import math
import time
import tracemalloc

import pytest

from rlpipe.config.operational import EnginesConfig
from rlpipe.engines.client import Completion, Heard
from rlpipe.engines.pool import EnginePool
from tests.deadlines import DEADLINE_S, SHORT_S, until_async
from tests.slow_engine import PROMPT, VERSION, SlowEngine, slow_pool, text, wanted

TICK_S = 0.02
TIMEOUT_S = SHORT_S / 3  # short: a test takes several of them
NUM_TICKS = int(TIMEOUT_S / TICK_S)  # of a timeout


def check(completion: Completion, length: int, engine: str) -> None:
    assert completion.tokens.tolist() == text(length)
    assert completion.rollout_logprobs.tolist() == [-float(token) for token in text(length)]
    assert (completion.finish_reason, completion.spans, completion.engine) == ("length", [(VERSION, length)], engine)


async def sampling(engine: SlowEngine, count: int) -> None:
    """Until the engine has sampled so many tokens."""
    await until_async(lambda: engine.num_sampled >= count, look_s=TICK_S / 4)


async def test_a_completion_many_times_longer_than_the_deadline_finishes() -> None:
    engine = SlowEngine("a", TICK_S)
    async with slow_pool(engine, progress_timeout_s=TIMEOUT_S) as pool:
        [[completion]] = await pool.generate(wanted(3 * NUM_TICKS))
        check(completion, 3 * NUM_TICKS, "a")
    assert engine.asked == [PROMPT] and not engine.aborts


async def test_a_killed_engine_s_tokens_go_on_on_another() -> None:
    first, second = SlowEngine("a", TICK_S), SlowEngine("b", TICK_S)
    async with slow_pool(first, second, progress_timeout_s=DEADLINE_S) as pool:
        generating = asyncio.create_task(pool.generate(wanted(60)))
        await sampling(first, 30)
        await first.kill()
        [[completion]] = await generating
        check(completion, 60, "b")
    kept = len(second.asked[0]) - len(PROMPT)
    assert kept >= 29 and kept + second.num_sampled == 60


async def test_a_silent_engine_is_left_and_what_it_had_goes_on_elsewhere() -> None:
    first, second = SlowEngine("a", TICK_S), SlowEngine("b", TICK_S)
    first.silent_after = 10
    async with slow_pool(first, second, progress_timeout_s=TIMEOUT_S) as pool:
        [[completion]] = await pool.generate(wanted(20))
        check(completion, 20, "b")
    assert len(first.aborts) == 1 and second.asked == [PROMPT + text(10)]


async def test_what_waits_in_the_engine_s_own_queue_is_no_fault() -> None:
    engine = SlowEngine("a", TICK_S, seats=1)
    async with slow_pool(engine, progress_timeout_s=TIMEOUT_S) as pool:
        count = NUM_TICKS // 2
        # the last waits for one timeout and a half
        [group] = await pool.generate(wanted(*[count] * 4))
        for completion in group:
            check(completion, count, "a")
    assert engine.asked == [PROMPT] * 4 and not engine.aborts


async def test_attempts_are_counted_without_progress_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.engines.pool.REST_FIRST_S", 0.0)
    engine = SlowEngine("a", TICK_S)
    engine.lost_after = 1
    async with slow_pool(engine, progress_timeout_s=DEADLINE_S) as pool:
        [[completion]] = await pool.generate(wanted(15))  # fourteen faults, a token before each
        check(completion, 15, "a")
    assert [len(tokens) for tokens in engine.asked] == [len(PROMPT) + index for index in range(15)]


async def test_a_slow_rollout_holds_one_seat_and_not_its_group_s() -> None:
    engine = SlowEngine("a", TICK_S)
    async with slow_pool(engine, progress_timeout_s=DEADLINE_S, in_flight_max=4) as pool:
        generating = asyncio.create_task(pool.generate(wanted(2, 2, 2, 60, groups=3)))
        # with a seat a group, the third group would be begun after two long rollouts
        await until_async(lambda: len(engine.asked) == 12)
        assert engine.num_sampled < 2 * 60
        for group in await generating:
            check(group[3], 60, "a")


async def test_a_host_that_brings_its_weights_is_waited_for_as_long_as_it_gets_on() -> None:
    host = SlowEngine("a", 0.0)

    async def bring() -> None:
        clients, host.clients_now = host.clients_now, []
        for _ in range(8):
            await asyncio.sleep(TIMEOUT_S / 2)
            host.progress += 1
        host.clients_now = clients

    async def generate(pool: EnginePool) -> Completion:
        bringing = asyncio.create_task(bring())
        await asyncio.sleep(0)
        [[completion]] = await pool.generate(wanted(5))
        await bringing
        return completion

    async with slow_pool(host, progress_timeout_s=2 * TIMEOUT_S) as pool:
        check(await generate(pool), 5, "a")


@pytest.mark.e2e
@pytest.mark.soak
async def test_a_token_a_second_for_a_quarter_of_an_hour_at_the_default_deadlines_and_a_kill_in_the_middle() -> None:
    first, second = SlowEngine("a", 1.0), SlowEngine("b", 1.0)
    async with slow_pool(first, second, progress_timeout_s=EnginesConfig().progress_timeout_s) as pool:
        started = time.monotonic()
        generating = asyncio.create_task(pool.generate(wanted(900)))
        await asyncio.sleep(450)
        await first.kill()
        [[completion]] = await generating
        check(completion, 900, "b")
        kept = len(second.asked[0]) - len(PROMPT)
        print(
            f"{time.monotonic() - started:.0f} s; {first.num_sampled} tokens before the kill, {kept} kept, "
            f"{second.num_sampled} after"
        )
    assert kept >= first.num_sampled - 1 and kept + second.num_sampled == 900


def test_what_is_in_flight_is_packed_and_what_is_said_after_the_end_is_not_in_it() -> None:
    heard, events = Heard(), [([70_000 + place, 5], [-0.1, None]) for place in range(2000)]
    tracemalloc.start()
    for tokens, logprobs in events:
        heard.add(tokens, [*logprobs])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    completion = heard.completion("abort", [(VERSION, 4000)], "a")
    heard.add([9], [-1.0])
    assert held < 12 * 4000  # as lists 41 bytes a token and more
    assert completion.tokens.tolist() == [token for tokens, _ in events for token in tokens]
    assert completion.rollout_logprobs[:1].tolist() == [pytest.approx(-0.1)] and math.isnan(
        completion.rollout_logprobs[1]
    )
    assert completion.rollout_logprobs.typecode == "f" and len(completion.rollout_logprobs) == 4000
