"""The endpoint, asked by the openai package as it comes from PyPI: what is
answered, and what is recorded of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from rlpipe.base.errors import UserError
from rlpipe.chat_api.chat import ChatRefused, read_request
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.extras.agents.endpoint import AgentEndpoint
from rlpipe.extras.agents.rollout import AgentRollout, CallKey
from tests.agent_world import ANSWER, CALL, TOOL, SpokenPool, door_of, rollout_of, tokenizer_in

ASKED: list[Any] = [{"role": "user", "content": "Calculate 3*4"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def pool(tokenizer: ChatTokenizer) -> SpokenPool:
    return SpokenPool(tokenizer)


@asynccontextmanager
async def client_of(rollout: AgentRollout) -> AsyncIterator[AsyncOpenAI]:
    async with door_of(rollout) as door, AsyncOpenAI(base_url=door.base_url, api_key=door.api_key) as client:
        yield client


async def use_the_tool(client: AsyncOpenAI, messages: list[Any]) -> tuple[list[Any], str]:
    """One turn with a tool call, one with the answer: the conversation after
    it, and what was said at last."""
    first = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    [call] = first.choices[0].message.tool_calls or []
    messages = [*messages, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "12"}]
    second = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    return [*messages, second.choices[0].message], second.choices[0].message.content or ""


async def test_a_tool_call_and_its_answer_are_one_branch_of_the_tokens_that_were_sampled(
    pool: SpokenPool, tokenizer: ChatTokenizer
) -> None:
    pool.texts = [CALL, ANSWER]
    rollout = rollout_of(pool)
    async with client_of(rollout) as client:
        first = await client.chat.completions.create(model="policy", messages=ASKED, tools=[TOOL])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and message.content is None
        [call] = message.tool_calls or []
        assert call.type == "function" and json.loads(call.function.arguments) == {"expression": "3*4"}
        # the agent's own JSON: other white space, another order
        said = {"role": "assistant", "content": None, "tool_calls": [
            {"id": call.id, "type": "function",
             "function": {"name": "calculator", "arguments": ' { "expression" :"3*4"}'}}]}  # fmt: skip
        news = {"role": "tool", "tool_call_id": call.id, "content": "12"}
        second = await client.chat.completions.create(model="policy", messages=[*ASKED, said, news], tools=[TOOL])  # type: ignore[list-item]
        assert second.choices[0].message.content == ANSWER and second.choices[0].finish_reason == "stop"
        assert second.usage is not None and second.usage.total_tokens == len(pool.groups[1].prompt_tokens) + len(
            rollout.conversation.nodes[-1].completion.tokens
        )
    [node] = rollout.conversation.branches
    between = tokenizer.encode_continuation([{"role": "tool", "content": "12"}])
    sampled = [tokenizer._encoder.encode(f"{CALL}<|end|>"), tokenizer._encoder.encode(f"{ANSWER}<|end|>")]
    assert node.prompt_tokens == tokenizer.encode_prompt(ASKED)
    assert node.completion.tokens.tolist() == [*sampled[0], *between, *sampled[1]]
    assert [*node.policy_mask] == [1] * len(sampled[0]) + [0] * len(between) + [1] * len(sampled[1])
    for logprob, written in zip(node.completion.rollout_logprobs, node.policy_mask, strict=True):
        assert (logprob < 0) == bool(written)
    assert rollout.finish_reason == "stop" and node.num_turns == 2


async def test_a_history_that_is_rewritten_begins_a_branch(pool: SpokenPool, tokenizer: ChatTokenizer) -> None:
    pool.texts = [CALL, ANSWER, "37"]
    rollout = rollout_of(pool)
    async with client_of(rollout) as client:
        conversation, _ = await use_the_tool(client, ASKED)
        rewritten = [
            {"role": "user", "content": "You have used the calculator"},
            *conversation[1:],
            {"role": "user", "content": "more"},
        ]
        await client.chat.completions.create(model="policy", messages=rewritten, tools=[TOOL])
    first, second = rollout.conversation.branches
    assert rollout.conversation.last is second and second.num_turns == 1 and first.num_turns == 2
    text = tokenizer.decode_raw(second.prompt_tokens)
    assert CALL in text and ANSWER in text and text.endswith("<|user|>more<|end|><|assistant|>")
    assert [*second.policy_mask] == [1] * len(second.completion.tokens), (
        "what is encoded anew is its prompt, which is not trained"
    )


async def test_a_stream_says_the_same_as_a_whole_reply(pool: SpokenPool, tokenizer: ChatTokenizer) -> None:
    pool.texts = [CALL, CALL, ANSWER]
    rollout = rollout_of(pool)
    async with client_of(rollout) as client:
        whole = (await client.chat.completions.create(model="policy", messages=ASKED, tools=[TOOL])).choices[0].message
        calls, reasons, usage = [], [], None
        options: Any = {"include_usage": True}
        async for chunk in await client.chat.completions.create(
            model="policy", messages=ASKED, tools=[TOOL], stream=True, stream_options=options
        ):
            usage = chunk.usage or usage
            calls += [call for choice in chunk.choices for call in choice.delta.tool_calls or []]
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        [call], [function] = whole.tool_calls or [], calls
        assert call.type == "function" and function.function is not None
        assert (function.function.name, function.function.arguments) == (call.function.name, call.function.arguments)
        assert (
            reasons == ["tool_calls"]
            and usage is not None
            and usage.completion_tokens == len(tokenizer._encoder.encode(CALL)) + 1
        )
        text = ""
        async for chunk in await client.chat.completions.create(model="policy", messages=ASKED, stream=True):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == ANSWER


async def test_choices_are_branches_and_logprobs_are_those_of_the_engine(
    pool: SpokenPool, tokenizer: ChatTokenizer
) -> None:
    pool.texts = ["12", ANSWER, "37"]
    rollout = rollout_of(pool)
    async with client_of(rollout) as client:
        reply = await client.chat.completions.create(model="policy", messages=ASKED, n=2, logprobs=True)
        assert [choice.message.content for choice in reply.choices] == ["12", ANSWER]
        assert len({params.seed for params in pool.groups[0].params}) == 2
        for choice, node in zip(reply.choices, rollout.conversation.nodes, strict=True):
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [entry.logprob for entry in choice.logprobs.content] == node.completion.rollout_logprobs.tolist()
            assert "".join(entry.token for entry in choice.logprobs.content) == f"{choice.message.content}<|end|>"
        chosen = [*ASKED, reply.choices[1].message, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="policy", messages=chosen)  # type: ignore[arg-type]
    assert len(rollout.conversation.branches) == 2 and rollout.conversation.last is not None
    assert tokenizer.decode(rollout.conversation.last.completion.tokens.tolist()).startswith(ANSWER)


@pytest.mark.parametrize(
    ("limits", "code", "reason"),
    [({"calls": 1}, "turns_max", "turns"), ({"tokens": 32}, "context_length_exceeded", "length"),
     ({"context": 40}, "context_length_exceeded", "length")],
)  # fmt: skip
async def test_a_limit_refuses_the_next_call_and_is_the_finish_reason(
    limits: dict[str, int], code: str, reason: str, pool: SpokenPool, tokenizer: ChatTokenizer
) -> None:
    pool.texts = [CALL]
    rollout = rollout_of(pool, **limits)
    async with client_of(rollout) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await use_the_tool(client, ASKED)
    assert refused.value.code == code and rollout.finish_reason == reason and not pool.texts


async def test_a_reply_that_the_limit_cut_off_ends_the_rollout_for_that(
    pool: SpokenPool, tokenizer: ChatTokenizer
) -> None:
    pool.texts = ["123456789", "123456789"]
    async with client_of(rollout := rollout_of(pool, tokens=8)) as client:
        reply = await client.chat.completions.create(model="policy", messages=ASKED, max_tokens=3)
        assert reply.choices[0].finish_reason == "length" and rollout.finish_reason == "stop", "the agent's own limit"
        reply = await client.chat.completions.create(model="policy", messages=ASKED)
        assert reply.choices[0].finish_reason == "length" and rollout.finish_reason == "length"


async def test_a_call_for_more_choices_than_are_left_leaves_them(pool: SpokenPool) -> None:
    """With two of three left a call for three was refused, and then one for one."""
    pool.texts = ["1", "2", "3"]
    async with client_of(rollout := rollout_of(pool, calls=3)) as client:

        async def ask(num_choices: int) -> int:
            return len((await client.chat.completions.create(model="policy", messages=ASKED, n=num_choices)).choices)

        assert await ask(1) == 1
        with pytest.raises(openai.BadRequestError, match=r"rl\.turns_max=3: .* 2 are left, and 3 are asked for"):
            await ask(3)
        assert rollout.finish_reason == "turns" and await ask(1) == 1 and rollout.finish_reason == "stop", (
            "it has gone on"
        )
        assert await ask(1) == 1
        with pytest.raises(openai.BadRequestError, match="0 are left"):
            await ask(1)
    assert rollout.finish_reason == "turns" and len({group.params[0].seed for group in pool.groups}) == 3


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["a", "b", "1" * 500])), max_size=8),
    calls=st.integers(1, 6),
)
async def test_what_is_answered_is_what_would_be_without_the_calls_that_are_refused(
    asked: list[tuple[int, str]], calls: int, tokenizer: ChatTokenizer
) -> None:
    async def answered(asking: list[tuple[int, str]]) -> tuple[list[int], list[int]]:
        """Which calls are answered, and the seeds of what is sampled for them."""
        pool, places = SpokenPool(tokenizer, ["12"] * 32), []
        rollout = rollout_of(pool, calls=calls)
        for place, (num_choices, text) in enumerate(asking):
            with suppress(ChatRefused):
                await rollout.answer(read_request({"messages": [{"role": "user", "content": text}], "n": num_choices}))
                places.append(place)
        return places, [params.seed for group in pool.groups for params in group.params]

    places, seeds = await answered(asked)
    num_left, expected = calls, []
    for place, (num_choices, text) in enumerate(asked):
        if num_choices <= num_left and len(text) == 1:
            num_left, expected = num_left - num_choices, [*expected, place]
    assert places == expected and len(seeds) == calls - num_left
    assert await answered([asked[place] for place in places]) == ([*range(len(places))], seeds)


async def test_a_reply_that_was_cut_off_is_the_reason_whatever_is_refused_after_it(pool: SpokenPool) -> None:
    pool.texts = ["123456789"]
    async with client_of(rollout := rollout_of(pool, tokens=8, calls=1)) as client:
        await client.chat.completions.create(model="policy", messages=ASKED)
        with pytest.raises(openai.BadRequestError, match=r"rl\.turns_max=1"):
            await client.chat.completions.create(model="policy", messages=ASKED)
    assert rollout.limit == "turns" and rollout.finish_reason == "length"


@pytest.mark.parametrize(
    "asked",
    [{"stop": ["."]}, {"response_format": {"type": "json_object"}}, {"tools": [TOOL], "tool_choice": "required"},
     {"logprobs": True, "top_logprobs": 3}, {"n": 0}, {"logit_bias": {"5": 1}},
     {"messages": [{"role": "robot", "content": "x"}]},
     {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}],
)  # fmt: skip
async def test_what_would_change_the_distribution_is_refused_by_name(
    asked: dict[str, Any], pool: SpokenPool, tokenizer: ChatTokenizer
) -> None:
    async with client_of(rollout_of(pool)) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "policy", "messages": ASKED, **asked})
    assert [*asked][-1].removesuffix("s") in str(refused.value) and not pool.groups


async def test_the_run_says_how_it_is_sampled(pool: SpokenPool, tokenizer: ChatTokenizer) -> None:
    pool.texts = [ANSWER]
    async with client_of(rollout_of(pool)) as client:
        await client.chat.completions.create(model="any", messages=ASKED, temperature=0.0, top_p=0.1, seed=5)
        assert [model.id async for model in client.models.list()] == ["policy"]
    params = pool.groups[0].params[0]
    assert params.temperature == 1.0 and params.top_p == 1.0 and params.seed != 5


async def test_a_key_opens_its_own_rollout_while_that_runs(pool: SpokenPool, tokenizer: ChatTokenizer) -> None:
    endpoint = AgentEndpoint(tokenizer)
    await endpoint.start("127.0.0.1")
    try:
        with endpoint.open(rollout_of(pool)) as door, endpoint.open(rollout_of(pool)) as other:
            for key, url in (
                (other.api_key, door.base_url),
                ("", door.base_url),
                (door.api_key, door.base_url + "/../../9/v1"),
            ):
                async with AsyncOpenAI(base_url=url, api_key=key or "none") as client:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
            assert door.base_url.startswith("http://127.0.0.1:") and door.api_key != other.api_key
        async with AsyncOpenAI(base_url=door.base_url, api_key=door.api_key) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="policy", messages=ASKED)
    finally:
        await endpoint.close()
    assert not pool.groups


async def test_an_agent_that_starts_again_is_answered_with_what_was_kept(
    pool: SpokenPool, tokenizer: ChatTokenizer
) -> None:
    pool.texts = [CALL, ANSWER]
    kept: dict[CallKey, list[Completion]] = {}

    async def keep(call: CallKey, completions: list[Completion]) -> None:
        assert call not in kept, "a call is sampled once"
        kept[call] = completions

    rollout = rollout_of(pool, keep=keep)
    async with client_of(rollout) as client:
        _, said = await use_the_tool(client, ASKED)
    before = rollout.conversation.branches[0]
    for again in (rollout, rollout_of(pool, kept=dict(kept))):  # in the same process, and in another one
        async with again.one_try(), client_of(again) as client:
            assert (await use_the_tool(client, ASKED))[1] == said and len(pool.groups) == 2
            [branch] = again.conversation.branches
            assert branch.completion == before.completion and branch.policy_mask == before.policy_mask
            pool.texts = ["37"]
            await client.chat.completions.create(
                model="policy", messages=ASKED, tools=[TOOL]
            )  # asked once more, it is sampled anew
            assert len(pool.groups) == 3 and pool.groups.pop().params[0].seed != pool.groups[0].params[0].seed


@pytest.mark.parametrize(
    "written", ['{"name": ["t"], "arguments": {}}', r'{"name": "calculator", "arguments": {"a": "\ud800"}}']
)
async def test_a_call_of_no_tool_is_text_and_so_it_is_when_it_is_given_again(written: str, pool: SpokenPool) -> None:
    text = f"<tool_call>{written}</tool_call>"
    pool.texts, kept = [text, ANSWER], dict[CallKey, list[Completion]]()

    async def keep(call: CallKey, completions: list[Completion]) -> None:
        kept[call] = completions

    for again in (rollout_of(pool, keep=keep), rollout_of(pool, kept=kept)):  # the second is a process that takes over
        async with client_of(again) as client:
            first = await client.chat.completions.create(model="policy", messages=ASKED, tools=[TOOL])
            message = first.choices[0].message
            assert message.content == text and not message.tool_calls
            more: list[Any] = [*ASKED, message, {"role": "user", "content": "more"}]
            second = await client.chat.completions.create(model="policy", messages=more, tools=[TOOL])
        assert second.choices[0].message.content == ANSWER and again.failure is None
        [branch] = again.conversation.branches
        assert branch.num_turns == 2
    assert len(pool.groups) == 2


async def test_an_address_that_is_not_here_is_said(tokenizer: ChatTokenizer) -> None:
    endpoint = AgentEndpoint(tokenizer)
    with pytest.raises(UserError, match=r"rl\.agent_address='192\.0\.2\.1'"):
        await endpoint.start("192.0.2.1")
    await endpoint.close()


async def test_a_fault_of_the_run_is_no_fault_of_the_agent(pool: SpokenPool, tokenizer: ChatTokenizer) -> None:
    rollout = rollout_of(pool)  # it has nothing to say, which is an IndexError
    async with client_of(rollout) as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="policy", messages=ASKED)
    assert isinstance(rollout.failure, IndexError) and len(pool.groups) == 1
