"""The endpoint, asked by the anthropic package as it comes from PyPI:
the same rollout as by OpenAI's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from rlpipe.data.chat import ChatTokenizer
from rlpipe.extras.agents.rollout import AgentRollout
from tests.agent_world import ANSWER, CALL, SpokenPool, door_of, rollout_of, tokenizer_in

TOOL: Any = {"name": "calculator", "description": "a product", "input_schema": {"type": "object", "properties": {}}}
ASKED: list[Any] = [{"role": "user", "content": "Calculate 3*4"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def pool(tokenizer: ChatTokenizer) -> SpokenPool:
    return SpokenPool(tokenizer)


@asynccontextmanager
async def client_of(rollout: AgentRollout) -> AsyncIterator[AsyncAnthropic]:
    async with (
        door_of(rollout) as door,
        AsyncAnthropic(base_url=door.base_url.removesuffix("/v1"), api_key=door.api_key) as client,
    ):
        yield client


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_and_its_result_are_one_branch(streamed: bool, pool: SpokenPool, tokenizer: ChatTokenizer) -> None:
    pool.texts = [CALL, ANSWER]
    rollout = rollout_of(pool)
    async with client_of(rollout) as client:

        async def say(messages: list[Any]) -> Any:
            asked: Any = {
                "model": "policy",
                "max_tokens": 100,
                "system": "be brief",
                "messages": messages,
                "tools": [TOOL],
            }
            if not streamed:
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                return await stream.get_final_message()

        first = await say(ASKED)
        [use] = first.content
        assert first.stop_reason == "tool_use" and (use.name, use.input) == ("calculator", {"expression": "3*4"})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "12"}]}
        second = await say(
            [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        )
        assert second.stop_reason == "end_turn" and second.content[0].text == ANSWER
        assert second.usage.output_tokens == len(tokenizer._encoder.encode(f"{ANSWER}<|end|>"))
    [branch] = rollout.conversation.branches
    assert branch.num_turns == 2
    assert (
        tokenizer.decode_raw(branch.prompt_tokens)
        == "<|system|>be brief<|end|><|user|>Calculate 3*4<|end|><|assistant|>"
    )
    between = tokenizer.encode_continuation([{"role": "tool", "content": "12"}])
    assert branch.completion.tokens.tolist() == [
        *tokenizer._encoder.encode(f"{CALL}<|end|>"), *between, *tokenizer._encoder.encode(f"{ANSWER}<|end|>")
    ]  # fmt: skip


async def test_refusals_have_their_shape(pool: SpokenPool) -> None:
    async with client_of(rollout_of(pool, calls=1)) as client:
        asked: Any = {"model": "policy", "max_tokens": 100, "messages": ASKED}
        for more in ({"stop_sequences": ["."]}, {"tool_choice": {"type": "any"}, "tools": [TOOL]}):
            with pytest.raises(anthropic.BadRequestError, match=next(iter(more))):
                await client.messages.create(**asked, **more)
        pool.texts = [ANSWER]
        await client.messages.create(**asked)
        with pytest.raises(anthropic.BadRequestError, match=r"rl\.turns_max=1"):
            await client.messages.create(**asked)
        async with AsyncAnthropic(base_url=client.base_url, api_key="another") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**asked)
