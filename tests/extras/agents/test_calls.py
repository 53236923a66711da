"""A call that a client sends again is given the reply of that call, not
of another that says the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.engines.pool import GroupRequest
from rlpipe.extras.agents.calls import IDEMPOTENCY_KEY, RETRY_COUNT, SentCall, SentCalls, SentRequest
from rlpipe.extras.agents.endpoint import AgentEndpoint, Door
from rlpipe.extras.agents.rollout import AgentRollout
from tests.agent_world import SpokenPool, rollout_of, tokenizer_in
from tests.deadlines import DEADLINE_S, SHORT_S, until_async

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Calculate 3*4"}], "max_tokens": 50}


@dataclass
class HeldPool(SpokenPool):
    """Says nothing until it may."""

    may_speak: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, groups: list[GroupRequest], enough: asyncio.Event) -> list[list[Completion]]:
        said = await super().generate(groups, enough)
        await self.may_speak.wait()
        return said


@dataclass
class World:
    """A rollout that is asked over HTTP, call by call."""

    pool: HeldPool
    rollout: AgentRollout
    endpoint: AgentEndpoint
    door: Door

    @property
    def calls(self) -> list[SentCall]:
        [guest] = self.endpoint._guests.values()
        return [call for alike in guest.calls._calls.values() for call in alike]

    async def send(self, **headers: str) -> asyncio.Task[str]:
        """A request on a connection of its own, once it is known; its result is what was said."""
        sendings = [call.newest for call in self.calls]
        sent = asyncio.create_task(self._said(headers))
        await until_async(lambda: [call.newest for call in self.calls] != sendings, "it comes")
        return sent

    async def hang_up(self, sent: asyncio.Task[str], call: SentCall) -> None:
        sent.cancel()
        with suppress(asyncio.CancelledError):
            await sent
        await until_async(lambda: not call.newest.is_listening, "the end of the connection is seen")

    async def _said(self, headers: dict[str, str]) -> str:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": self.door.api_key, **headers}) as session,
            session.post(f"{self.door.base_url}/chat/completions", json=BODY) as answer,
        ):
            said: str = (await answer.json())["choices"][0]["message"]["content"]
            return said


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def world_of(tokenizer: ChatTokenizer) -> AsyncIterator[World]:
    pool = HeldPool(tokenizer, ["first", "second", "third"])
    rollout, endpoint = rollout_of(pool), AgentEndpoint(tokenizer)
    await endpoint.start("127.0.0.1")
    try:
        with endpoint.open(rollout) as door:
            yield World(pool, rollout, endpoint, door)
    finally:
        pool.may_speak.set()
        await endpoint.close()


def again(count: int, **headers: str) -> dict[str, str]:
    return {RETRY_COUNT: str(count), **headers}


@pytest.mark.parametrize("place", [0, 1])
async def test_a_retry_gets_the_reply_of_the_call_whose_client_has_hung_up(
    place: int, tokenizer: ChatTokenizer
) -> None:
    """The retry of the first of two equal calls got the second's reply."""
    async with world_of(tokenizer) as world:
        sent = [await world.send(**again(0)), await world.send(**again(0))]
        for count in (1, 2):
            await world.hang_up(sent[place], world.calls[place])
            sent[place] = await world.send(**again(count))
        world.pool.may_speak.set()
        assert [await one for one in sent] == ["first", "second"]
        assert len(world.pool.groups) == 2 and len(world.rollout.conversation.nodes) == 2, (
            "it is sampled, and counted, once"
        )


async def test_a_retry_of_the_later_of_two_equal_calls_does_not_get_what_the_first_was_given(
    tokenizer: ChatTokenizer,
) -> None:
    async with world_of(tokenizer) as world:
        world.pool.may_speak.set()
        assert await (await world.send(**again(0))) == "first"
        world.pool.may_speak.clear()
        await world.hang_up(await world.send(**again(0)), world.calls[1])
        retry = await world.send(**again(1))
        world.pool.may_speak.set()
        assert await retry == "second"
        assert await (await world.send(**again(2))) == "second", (
            "it was given, and its client says that it has not heard it"
        )
        assert await (await world.send(**again(0))) == "third", "no retry: asked once more it is sampled anew"


async def test_a_key_says_which_call_it_is_where_nothing_else_does(tokenizer: ChatTokenizer) -> None:
    async with world_of(tokenizer) as world:
        sent = [await world.send(**again(0, **{IDEMPOTENCY_KEY: key})) for key in "abc"]
        retries = [await world.send(**again(1, **{IDEMPOTENCY_KEY: key})) for key in "cab"]  # nobody has hung up
        world.pool.may_speak.set()
        assert [await one for one in sent] == ["first", "second", "third"]
        assert [await one for one in retries] == ["third", "first", "second"] and len(world.pool.groups) == 3


async def test_a_retry_of_a_call_that_never_came_is_a_call(tokenizer: ChatTokenizer) -> None:
    async with world_of(tokenizer) as world:
        world.pool.may_speak.set()
        assert await (await world.send(**again(1))) == "first"
        for count in ("-1", "x", "9" * 5000, "\u0663", ""):
            assert not world.pool.texts or await (await world.send(**{RETRY_COUNT: count}))


async def test_a_call_that_was_refused_is_forgotten_whoever_sends_it_again(tokenizer: ChatTokenizer) -> None:
    async with (
        world_of(tokenizer) as world,
        aiohttp.ClientSession(headers={"x-api-key": world.door.api_key}) as session,
    ):
        for count in (0, 1, 1):
            body = {**BODY, "n": 11}
            async with session.post(
                f"{world.door.base_url}/chat/completions", json=body, headers=again(count)
            ) as answer:
                assert answer.status == 400 and not world.calls
        assert world.rollout._num_completions == 0


@pytest.mark.slow
@pytest.mark.parametrize("api", [AsyncOpenAI, AsyncAnthropic])
async def test_the_clients_of_openai_and_anthropic_that_hang_up_get_the_reply_of_their_own_call(
    api: Any, tokenizer: ChatTokenizer
) -> None:
    async with world_of(tokenizer) as world:
        url = world.door.base_url
        settings: dict[str, Any] = {
            "api_key": world.door.api_key,
            "base_url": url if api is AsyncOpenAI else url.removesuffix("/v1"),
        }
        asked: dict[str, Any] = {"model": "policy", **BODY}

        async def say(**settings_of_one: Any) -> str:
            async with api(**settings, **settings_of_one) as client:
                if isinstance(client, AsyncOpenAI):
                    return str((await client.chat.completions.create(**asked)).choices[0].message.content)
                [block] = (await client.messages.create(**asked)).content
                return str(block.text)  # type: ignore[union-attr]

        hasty = asyncio.create_task(
            say(timeout=SHORT_S, max_retries=20)
        )  # a client waits up to 8 s before each: it ends
        await until_async(lambda: world.calls, "the first call")
        patient = asyncio.create_task(say(timeout=DEADLINE_S))
        await until_async(
            lambda: len(world.calls) == 2 and world.calls[0].newest.num_before >= 2, "its second repetition"
        )
        world.pool.may_speak.set()
        assert (await hasty, await patient) == ("first", "second") and len(world.pool.groups) == 2


class Line:
    """A connection of which the server sees when it ends."""

    is_open = True

    def is_closing(self) -> bool:
        return not self.is_open


@given(events=st.lists(st.tuples(st.sampled_from(["call", "hang up", "answer"]), st.integers(0, 5)), max_size=30))
async def test_no_two_clients_hear_the_same_reply_and_no_call_is_made_twice(events: list[tuple[str, int]]) -> None:
    """Of any number of equal calls, where each request comes, and
    each end of a connection is seen."""
    sent, clients, heard = SentCalls(), list[tuple[SentCall, SentRequest]](), list[SentCall]()

    async def answer() -> Any:
        await asyncio.Event().wait()

    def send(count: int) -> tuple[SentCall, SentRequest]:
        line: Any = Line()
        sending = SentRequest(b"same", count, "", line)
        return sent.call(sending, lambda: asyncio.create_task(answer())), sending

    num_calls = 0
    for event, place in events:
        if event == "call":
            clients.append(send(0))
            num_calls += 1
        elif clients:
            call, sending = clients[place % len(clients)]
            if event == "answer":
                call.given_to(sending)
                heard.append(call)
                del clients[place % len(clients)]
            else:
                line: Any = sending.transport
                line.is_open = False
                clients[place % len(clients)] = send(sending.num_before + 1)
    everyone = [*heard, *(call for call, _ in clients)]
    assert len({id(call) for call in everyone}) == len(everyone) == num_calls
    for call in everyone:
        call.answering.cancel()
