"""The server of a policy, asked by the openai package as it comes from PyPI."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from rlpipe.base.errors import EngineError, UserError
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import RequestRefused
from rlpipe.extras.serve.server import serve_key
from rlpipe.extras.serve.talk import talk
from tests.agent_world import ANSWER, CALL, TOOL, tokenizer_in
from tests.deadlines import until_async
from tests.serve_world import TalkingPool, address_of

ASKED: list[Any] = [{"role": "user", "content": "Calculate 3*4"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def pool(tokenizer: ChatTokenizer) -> TalkingPool:
    return TalkingPool(tokenizer)


@asynccontextmanager
async def client_of(pool: TalkingPool, key: str = "") -> AsyncIterator[AsyncOpenAI]:
    async with (
        address_of(pool, key) as url,
        AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0) as client,
    ):
        yield client


async def streamed(client: AsyncOpenAI, **fields: Any) -> tuple[str, list[float], str | None, int, int]:
    """The text of a stream, its logprobs, its finish reason, its number of chunks, its tokens."""
    texts, logprobs, reason, num_tokens = list[str](), list[float](), None, 0
    options: Any = {"include_usage": True}
    async for chunk in await client.chat.completions.create(
        model="talks", messages=ASKED, stream=True, logprobs=True, stream_options=options, **fields
    ):
        num_tokens = chunk.usage.completion_tokens if chunk.usage else 0
        for choice in chunk.choices:
            texts += [choice.delta.content] if choice.delta.content else []
            logprobs += [one.logprob for one in (choice.logprobs and choice.logprobs.content) or []]
            reason = choice.finish_reason or reason
    return "".join(texts), logprobs, reason, len(texts), num_tokens


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [({}, "37 and 12", "stop"), ({"stop": ["nothing", " an"]}, "37", "stop"), ({"max_tokens": 3}, None, "length")],
)
async def test_a_stream_says_the_same_as_a_whole_reply(
    pool: TalkingPool, fields: dict[str, Any], text: str | None, reason: str
) -> None:
    pool.texts = ["37 and 12"] * 2
    async with client_of(pool) as client:
        whole = await client.chat.completions.create(model="talks@3", messages=ASKED, logprobs=True, **fields)
        [choice], usage = whole.choices, whole.usage
        said, logprobs, ended, num_chunks, num_tokens = await streamed(client, **fields)
    assert choice.message.content == said and choice.finish_reason == ended == reason and usage is not None
    assert text is None or said == text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [one.logprob for one in choice.logprobs.content] == logprobs and len(logprobs) == num_tokens
    assert usage.completion_tokens == num_tokens and usage.prompt_tokens == len(pool.groups[0].prompt_tokens)
    assert num_chunks > 1 or said == "37", "it is sent while it is sampled"


async def test_the_helper_of_the_client_joins_the_parts_of_a_stream(pool: TalkingPool) -> None:
    pool.texts = [ANSWER]
    async with client_of(pool) as client, client.chat.completions.stream(model="talks", messages=ASKED) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert (message.role, message.content) == ("assistant", ANSWER)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_is_one_and_its_answer_goes_on(pool: TalkingPool, stream: bool) -> None:
    pool.texts = [CALL, ANSWER]
    async with client_of(pool) as client:
        if stream:
            async with client.chat.completions.stream(model="talks", messages=ASKED, tools=[TOOL]) as parts:
                choice: Any = (await parts.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(model="talks", messages=ASKED, tools=[TOOL])).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert call.function.name == "calculator" and json.loads(call.function.arguments) == {"expression": "3*4"}
        said = {"role": "assistant", "content": None, "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": "calculator", "arguments": "{}"}}]}  # fmt: skip
        told: list[Any] = [*ASKED, said, {"role": "tool", "tool_call_id": call.id, "content": "12"}]
        answered = await client.chat.completions.create(model="policy", messages=told, tools=[TOOL])
    assert answered.choices[0].message.content == ANSWER


async def test_the_settings_of_a_request_reach_the_engine(pool: TalkingPool) -> None:
    pool.texts = ["12"] * 6
    async with client_of(pool) as client:
        settings: Any = {"temperature": 0.5, "top_p": 0.75, "seed": 11, "n": 2, "max_tokens": 9}
        for _ in range(2):
            await client.chat.completions.create(model="talks", messages=ASKED, extra_body={"top_k": 5}, **settings)
        for _ in range(2):
            await client.completions.create(model="talks", prompt="12")
    first, second, again, _, *texts = (group.params[0] for group in pool.groups)
    assert (first.temperature, first.top_p, first.top_k, first.max_new_tokens) == (0.5, 0.75, 5, 9)
    assert first.stop_token_ids == tuple(pool.tokenizer.stop_token_ids)
    assert first.seed != second.seed and first == again
    assert [(one.temperature, one.max_new_tokens) for one in texts] == [(1.0, 16)] * 2
    assert texts[0].seed != texts[1].seed


@pytest.mark.parametrize(
    ("limits", "tokens_max"),
    [
        ({"max_tokens": 9, "max_completion_tokens": None}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
    ],
)
async def test_a_limit_of_tokens_holds_by_either_name(
    pool: TalkingPool, limits: dict[str, Any], tokens_max: int
) -> None:
    pool.texts = ["12"] * 2
    async with client_of(pool) as client:
        await client.post("/chat/completions", body={"messages": ASKED, **limits}, cast_to=object)
        await client.post("/completions", body={"prompt": "12", **limits}, cast_to=object)
    assert [group.params[0].max_new_tokens for group in pool.groups] == [tokens_max] * 2


async def test_a_chat_without_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="stdin is closed: pipe lines in"):
        await talk([], 0.0, None, print)


async def test_completions_take_texts_and_tokens_and_no_template(pool: TalkingPool) -> None:
    pool.texts = ["12", "37", "12", "37"]
    tokens = [pool.tokenizer.encode_text(text) for text in ("1", "2")]
    async with client_of(pool) as client:
        for prompt in (["1", "2"], tokens):
            reply = await client.completions.create(model="talks", prompt=prompt, logprobs=1)
            assert [choice.text for choice in reply.choices] == ["12", "37"]
            assert [choice.index for choice in reply.choices] == [0, 1]
            for choice in reply.choices:
                assert choice.logprobs is not None
                assert "".join(choice.logprobs.tokens or []) == f"{choice.text}<|end|>"
                assert choice.logprobs.text_offset == [0, 1, 2]
        assert [group.prompt_tokens for group in pool.groups] == tokens * 2
        pool.texts = ["37 and 12"]
        parts = [chunk async for chunk in await client.completions.create(model="talks", prompt="1", stream=True)]
    assert "".join(part.choices[0].text for part in parts) == "37 and 12" and len(parts) > 2
    assert [part.choices[0].finish_reason for part in parts][-1] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: 1.0}, name) for name in ("frequency_penalty", "presence_penalty")),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 5}, "stop"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream": "false"}, "stream"),
        ({"logprobs": "false"}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"model": "gpt-5"}, "model"),
        ({"model": 5}, "model"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(
    pool: TalkingPool, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "talks", "messages": ASKED, **fields}
    async with client_of(pool) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.post("/chat/completions", body=body, cast_to=object)
    assert refused.value.status_code == (404 if param == "model" else 400)
    assert isinstance(refused.value.body, dict) and refused.value.body["param"] == param
    assert not pool.groups


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": 5}, {"prompt": [1, "a"]}, {"prompt": [[10**9]]},
        {"prompt": [-1]}, {"prompt": ["1"] * 1025}, {"prompt": ["1"] * 1024, "n": 2}, {"prompt": "1", "echo": True},
        {"prompt": "1", "logprobs": 5}, {"prompt": "1", "best_of": 4}, {"prompt": "1", "suffix": "2"},
        {"prompt": "1 " * 500}, {"prompt": "1" * 200_000}, [], "1", None,
    ],
)  # fmt: skip
async def test_a_malformed_completion_gets_an_error_in_the_form_of_the_api(pool: TalkingPool, body: Any) -> None:
    async with client_of(pool) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/completions", body=body, cast_to=object)
    fault: Any = refused.value.body
    assert fault["type"] == "invalid_request_error" and fault["code"] and fault["message"] and not pool.groups


async def test_a_conversation_that_is_too_long_is_refused_with_the_code_that_clients_know(pool: TalkingPool) -> None:
    async with client_of(pool) as client:
        for content in ("1" * 500, "1" * 300_000):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="talks", messages=[{"role": "user", "content": content}], stream=True
                )
            assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fault", "status"), [(EngineError("all are lost"), 503), (RequestRefused("engine answered 400"), 400)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_the_engines_is_an_error_of_the_server(
    pool: TalkingPool, fault: Exception, status: int, stream: bool
) -> None:
    pool.fault = fault
    async with client_of(pool) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="talks", messages=ASKED, stream=stream, n=2)
    assert refused.value.status_code == status and str(fault) in str(refused.value.body)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_sampled_for_a_client_that_has_hung_up(pool: TalkingPool, stream: bool) -> None:
    pool.silent.set()
    async with address_of(pool) as url, aiohttp.ClientSession() as session:
        body = {"messages": ASKED, "stream": stream, "n": 2}
        asking = asyncio.create_task(session.post(f"{url}/chat/completions", json=body))
        await until_async(lambda: len(pool.groups) == 2, "it is asked")
        asking.cancel()
        await until_async(lambda: pool.num_cancelled == 2, "both choices are given up")


async def test_the_key_is_asked_for_where_there_is_one(pool: TalkingPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(pool, "the key") as client:
        assert [model.id async for model in client.models.list()] == ["talks@3"]
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.with_options(api_key="another").models.list()
        assert isinstance(refused.value.body, dict) and refused.value.body["code"] == "invalid_api_key"
        with pytest.raises(openai.NotFoundError):
            await client.post("/embeddings", body={}, cast_to=object)
    async with address_of(pool) as url, aiohttp.ClientSession() as session:
        for host, status in (("localhost", 200), ("evil.example", 403), ("", 403)):
            async with session.get(f"{url}/models", headers={"Host": host}) as answer:
                assert answer.status == status
        # a page of another site may send a request, though it cannot read the answer
        for origin, status in (("http://localhost:3000", 200), ("https://evil.example", 403), ("null", 403)):
            async with session.get(f"{url}/models", headers={"Origin": origin}) as answer:
                assert answer.status == status
    monkeypatch.delenv("RLPIPE_SERVE_KEY", raising=False)
    assert serve_key("127.0.0.1") == ""
    with pytest.raises(UserError, match=r"--host 0.0.0.0: .* set RLPIPE_SERVE_KEY"):
        serve_key("0.0.0.0")
    monkeypatch.setenv("RLPIPE_SERVE_KEY", "the key")
    assert serve_key("0.0.0.0") == "the key"
