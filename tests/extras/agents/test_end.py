"""An agent that ends while calls of its own are in flight: they end with it, on the engine too, and
nothing shows that they ever were."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.chat_api.chat import ChatRefused, ChatRequest, GivenReplies, read_request
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import NOTHING_YET, Completion, Sampling, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest
from rlpipe.extras.agents.log import CallLog
from rlpipe.extras.agents.rollout import AgentRollout, CallKey, Replies
from rlpipe.store.backend import open_store
from tests.agents_in_flight import FOR_EVER, check_idle, keep_nothing, reached, rollout_in_flight
from tests.agents_in_flight import engine as engine
from tests.agents_in_flight import tokenizer as tokenizer
from tests.deadlines import DEADLINE_S, until_async
from tests.slow_engine import SlowEngine, slow_pool


def asked(text: str, num_choices: int = 1) -> ChatRequest:
    return read_request({"messages": [{"role": "user", "content": text}], "n": num_choices})


async def test_calls_end_with_their_agent_on_the_engine_too(engine: SlowEngine, tokenizer: ChatTokenizer) -> None:
    kept = dict[CallKey, list[Completion]]()
    async with slow_pool(engine, progress_timeout_s=DEADLINE_S) as pool:

        async def keep(call: CallKey, completions: list[Completion]) -> None:
            raise AssertionError("nothing was answered")

        rollout = rollout_in_flight(pool, tokenizer, kept, keep, FOR_EVER)
        async with rollout.one_try():
            calls = [rollout.answer(asked("one", 3)), rollout.answer(asked("two"))]
            hung_up = rollout.answer(asked("three"))
            await reached(engine, 5)
            hung_up.cancel()
        for call in calls:
            assert call.done()
            with pytest.raises(ChatRefused, match="has ended"):
                await call
        with pytest.raises(ChatRefused, match="has ended"):  # what was read only then
            await rollout.answer(asked("four"))
        await check_idle(engine, pool, 5)
    assert not rollout.conversation.nodes and rollout.failure is None and not kept


async def test_a_second_try_asks_the_same_call_anew(engine: SlowEngine, tokenizer: ChatTokenizer) -> None:
    async with slow_pool(engine, progress_timeout_s=DEADLINE_S) as pool:
        kept: Replies = {}

        async def keep(call: CallKey, completions: list[Completion]) -> None:
            assert call not in stored
            stored[call] = completions

        stored: Replies = {}
        rollout = rollout_in_flight(pool, tokenizer, kept, keep)
        async with rollout.one_try():
            first = rollout.answer(asked("one", 2))
            await reached(engine, 2)
        assert first.done() and not stored and len({*engine.aborts}) == 2
        async with rollout.one_try():
            given = await rollout.answer(asked("one", 2))
        undisturbed = rollout_in_flight(pool, tokenizer, {}, keep_nothing)
        async with undisturbed.one_try():
            other = await undisturbed.answer(asked("one", 2))
        assert given.sampled == other.sampled
        assert [*stored.values()] == [given.sampled] and len(rollout.conversation.nodes) == 2
        num_asked = len(engine.asked)
        async with rollout.one_try():  # what was given is given again
            assert (await rollout.answer(asked("one", 2))).sampled == given.sampled
        assert len(engine.asked) == num_asked == 6


async def test_what_was_kept_and_not_given_is_forgotten_by_the_log_too(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """The agent ends while its reply is on its way to the store: a process that
    takes over would give it at once."""
    store, place, pool, written = open_store(f"file://{tmp_path}"), (0, 1), GatedPool(is_open=True), asyncio.Event()
    log = CallLog(store, "shard")

    async def keep(call: CallKey, completions: list[Completion]) -> None:
        await log.keep(place, call, completions)
        if not written.is_set():
            written.set()
            await rollout._over.wait()

    rollout = rollout_in_flight(pool, tokenizer, log.replies[place], keep)
    async with rollout.one_try():
        rollout.answer(asked("one"))
        await written.wait()
        assert len(CallLog(store, "shard").replies[place]) == 1
    assert not rollout.conversation.nodes and not CallLog(store, "shard").replies[place]
    async with rollout.one_try():  # the next try samples it again, and is given it
        given = await rollout.answer(asked("one"))
    [(call, sampled)] = CallLog(store, "shard").replies[place].items()
    assert sampled == given.sampled and len(pool.groups) == 2
    await CallLog(store, "shard").keep(place, call, [])  # a process that took over has not given it
    assert not CallLog(store, "shard").replies[place]


@dataclass
class GatedPool:
    """Answers a call when it is let, with tokens that depend on its seed;
    all at once when the agent ends."""

    is_open: bool = False
    groups: list[GroupRequest] = field(default_factory=list)
    waiting: list[asyncio.Event] = field(default_factory=list)
    num_open: int = 0

    async def generate(self, groups: list[GroupRequest], enough: asyncio.Event) -> list[list[Completion]]:
        [group] = groups
        gate = asyncio.Event()
        self.groups.append(group)
        self.waiting.append(gate)
        self.num_open += 1
        if self.is_open:
            gate.set()
        waits = [asyncio.create_task(event.wait()) for event in (gate, enough)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.num_open -= 1
        if not gate.is_set():  # some choices are whole by then
            return [[self._say(params, prior) if index else NOTHING_YET for index, (params, prior) in enumerate(
                zip(group.params, group.prior, strict=True))]]  # fmt: skip
        return [[self._say(params, prior) for params, prior in zip(group.params, group.prior, strict=True)]]

    def _say(self, params: Sampling, prior: Completion) -> Completion:
        tokens = tokens_of([5 + params.seed % 90, 5 + params.seed // 90 % 90])
        return prior.then(Completion(tokens, logprobs_of([-0.5] * 2), "length", [(0, 2)], "e"))


@dataclass
class Store:
    """What is kept, each when it is let; all at once when `is_open`."""

    kept: Replies = field(default_factory=dict)
    waiting: list[asyncio.Event] = field(default_factory=list)
    is_open: bool = False

    async def keep(self, call: CallKey, completions: list[Completion]) -> None:
        if completions:
            assert call not in self.kept, "a call is kept once"
            self.kept[call] = completions  # it is in the store before who writes it hears of it
            gate = asyncio.Event()
            self.waiting.append(gate)
            while not (gate.is_set() or self.is_open):
                await asyncio.sleep(0.001)
        else:
            del self.kept[call]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 3), st.booleans()),
        st.tuples(st.sampled_from(["sampled", "kept"]), st.integers(0, 5)),
    ),
    max_size=12,
)


async def run_try(
    rollout: AgentRollout, pool: GatedPool, store: Store, steps: list[Any]
) -> tuple[list[ChatRequest], int]:
    """One try that ends after these steps, wherever its calls are then: what was asked, in order,
    and how many choices were given."""
    requests, num_given = list[ChatRequest](), 0
    store.is_open, pool.waiting, store.waiting = False, [], []
    calls = list[asyncio.Task[GivenReplies]]()

    async def hear(request: ChatRequest, call: asyncio.Task[GivenReplies]) -> None:
        nonlocal num_given
        if not isinstance((await asyncio.gather(call, return_exceptions=True))[0], BaseException):
            num_given += request.num_choices

    async def let_write() -> None:
        await rollout._over.wait()
        await asyncio.sleep(0.002)
        store.is_open = True

    async with rollout.one_try():
        writing = asyncio.create_task(let_write())
        hearing = []
        for kind, which, *more in steps:
            if kind == "ask":
                request = asked(f"text {which}", more[0])
                requests.append(request)
                calls.append(rollout.answer(request))
                hearing.append(asyncio.create_task(hear(request, calls[-1])))
                num_asked = len(pool.groups)
                for _ in range(20 if more[1] else 0):  # it reaches the pool, where it was not kept
                    if len(pool.groups) > num_asked or calls[-1].done():
                        break
                    await asyncio.sleep(0.001)
            else:
                waiting = pool.waiting if kind == "sampled" else store.waiting
                for gate in waiting[which : which + 1]:
                    gate.set()
                await asyncio.sleep(0.003)
    await writing
    await asyncio.gather(*hearing)
    assert all(call.done() for call in calls) and pool.num_open == 0
    return requests, num_given


@settings(max_examples=40)
@given(tries=st.lists(STEPS, min_size=1, max_size=3))
def test_wherever_calls_are_when_their_agent_ends_only_what_was_answered_was_ever_sampled(
    tries: list[list[Any]], tokenizer: ChatTokenizer
) -> None:
    async def check() -> None:
        store, given_ever = Store(), set[CallKey]()
        rollout = rollout_in_flight(pool := GatedPool(), tokenizer, {}, store.keep)
        requests, num_given = list[ChatRequest](), 0
        for steps in tries:
            requests, num_given = await run_try(rollout, pool, store, steps)
            given = rollout._answered
            given_ever |= given
            assert given <= {*store.kept} <= given_ever
            assert len(rollout.conversation.nodes) == num_given
        if len(tries) == 1:
            assert {*store.kept} == given_ever
        # a process that takes over, and an agent that asks the same: what was answered is answered
        # as it was, and no engine is asked for it
        kept = {call: store.kept[call] for call in rollout._answered}
        again = rollout_in_flight(nobody := GatedPool(), tokenizer, dict(kept), keep_nothing)
        async with again.one_try():
            calls = [again.answer(request) for request in requests]
            await until_async(lambda: sum(call.done() for call in calls) >= len(kept), "what was answered is answered")
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(nobody.groups) <= len(requests) - len(kept)
        tokens = [[node.completion.tokens for node in of.conversation.nodes] for of in (rollout, again)]
        assert sorted(tokens[0]) == sorted(tokens[1])

    asyncio.run(check())
