"""What a policy or an agent writes is text, or a counted fault of its rollout: nothing of it is an
error of ours, in any template."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.chat_api.chat import (
    ChatRefused,
    ChatRequest,
    as_text,
    assistant_message,
    on_the_wire,
    read_message,
    read_request,
)
from rlpipe.chat_api.openai_wire import OpenAiWire
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.encoding import LONG_CHARS
from rlpipe.extras.agents.anthropic_wire import AnthropicWire
from rlpipe.extras.agents.endpoint import Wire
from rlpipe.extras.agents.worker import last_line, last_words, outcome_of
from rlpipe.records.messages import DEPTH_MAX
from tests.agent_world import TOOL
from tests.tool_templates import KINDS

ASKED = {"role": "user", "content": "How warm is it?"}
REQUEST = read_request({"messages": [ASKED], "tools": [TOOL]})
TEMPLATES = ("qwen2.5", "qwen2.5 marked", "qwen3", "llama3.1", "mistral", "kimi")


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


# texts as JSON has them: with halves of surrogate pairs, and control tokens of the templates
WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from([r"\ud800", r"\udc00\ud800", "<|im_end|>", "[generation 0]", "</tool_call>",
                     "<tool_call>", r"\u0000", "{{ 1 / 0 }}"]),
)  # fmt: skip
NUMBERS = st.sampled_from(["NaN", "-Infinity", "1e999", "-0.0", "9" * 4000, "9" * 5000, "1e-400", "0x1", "01"])
VALUES = st.recursive(
    st.one_of(NUMBERS, st.sampled_from(["null", "true", "", "'a'", nested(99), nested(600), nested(100_000)]),
              WORDS.map(lambda word: f'"{word}"')),
    lambda values: st.one_of(
        st.lists(values, max_size=3).map(lambda entries: f"[{', '.join(entries)}]"),
        st.lists(st.tuples(WORDS, values), max_size=3).map(
            lambda pairs: "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"
        ),
    ),
    max_leaves=6,
)  # fmt: skip
CALLS = st.one_of(
    VALUES,
    VALUES.map(lambda value: f'{{"name": "calculator", "arguments": {{"a": {value}}}}}'),
    VALUES.map(lambda value: f'{{"name": "calculator", "arguments": {value}}}'),
    VALUES.map(lambda value: f'{{"name": {value}, "arguments": {{}}}}'),
    VALUES.map(lambda value: f'{{"name": "x", "name": "calculator", "arguments": {{"a": 1, "a": {value}}}}}'),
)
REPLIES = st.one_of(
    st.lists(st.one_of(CALLS.map(lambda call: f"<tool_call>{call}</tool_call>"), WORDS), max_size=4).map("".join),
    st.binary(max_size=40).map(lambda said: said.decode(errors="replace")),
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("templates")
    return {name: ChatTokenizer.from_folder(KINDS[name].save(folder / name)) for name in TEMPLATES}


def said(text: str, request: ChatRequest = REQUEST) -> dict[str, Any]:
    """The message that a completion becomes, as the tokenizer would decode it:
    without halves of surrogate pairs."""
    return assistant_message(
        text.encode(errors="replace").decode(), request, lambda number: f"functions.calculator:{number}"
    )


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(text=REPLIES)
@example(text='<tool_call>{"name": ["t"], "arguments": {}}</tool_call>')
@example(text='<tool_call>{"name": {}, "arguments": {}}</tool_call>')
@example(text=call_of(r'{"a": "\ud800"}'))
@example(text=call_of(r'{"\udc00": 1}'))
@example(text=call_of('{"a": NaN, "b": 1e999}'))
@example(text=call_of(f'{{"a": {nested(600)}}}'))
@example(text=call_of('{"a": "</tool_call>"}'))
def test_whatever_a_policy_writes_is_a_call_or_text_and_the_conversation_goes_on(
    text: str, chats: dict[str, ChatTokenizer]
) -> None:
    message = said(text)
    wire = json.dumps(on_the_wire(message), allow_nan=False)
    again = read_message(json.loads(wire), "messages[1]")
    assert again == message, "an agent that repeats it goes on from there"
    for call in message.get("tool_calls", []):
        assert call["function"]["name"] == "calculator" and isinstance(call["function"]["arguments"], dict)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message.get("tool_calls", [])]
    conversation = [ASKED, message, *(results or [ASKED])]
    for name, chat in chats.items():
        tools = chat.with_tools(REQUEST.tools)
        for messages in (conversation, [*map(as_text, conversation)]):
            try:
                assert tools.encode_prompt(messages), name
            except UserError:  # the template refuses it: the call is answered with 400
                continue


def test_a_call_is_one_up_to_the_depth_that_is_written_again() -> None:
    assert "tool_calls" in said(call_of(f'{{"a": {nested(DEPTH_MAX - 4)}}}'))
    assert "tool_calls" not in said(call_of(f'{{"a": {nested(DEPTH_MAX)}}}'))
    assert [call["function"]["arguments"]
            for call in said(call_of('{"a": "</tool_call>"}') + call_of("{}"))["tool_calls"]] == [
        {"a": "</tool_call>"}, {}]  # fmt: skip


def test_a_completion_that_opens_calls_and_ends_none_is_read_in_a_moment() -> None:
    """Each `<tool_call>` was looked for to the end of the text: 7 s of a
    processor for 96,000 characters."""
    text = "<tool_call>{}" * 200_000
    assert said(text)["content"] == text


def test_a_tool_that_reads_like_a_mark_of_ours_is_text(chats: dict[str, ChatTokenizer]) -> None:
    tools = json.loads(json.dumps([TOOL]).replace('"parameters"', '"description": "[generation 0]", "parameters"'))
    chat = chats["qwen2.5 marked"].with_tools(tools)
    assert "[generation 0]" in chat.decode_raw(chat.encode_prompt([ASKED]))


@settings(max_examples=200, deadline=None)
@given(
    output=st.one_of(
        VALUES,
        VALUES.map(lambda value: f'{{"reward": {value}}}'),
        VALUES.map(lambda value: f'{{"metrics": {{"a": {value}}}}}'),
    )
)
@example(output='{"reward": 1' + "0" * 400 + "}")
@example(output='{"metrics": {"a": 1' + "0" * 400 + "}}")
@example(output=nested(900))
def test_whatever_a_command_says_at_its_end_is_an_outcome_or_a_fault(output: str) -> None:
    answer = outcome_of(last_line(output.encode(errors="replace").decode()))
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert answer.get("reason") == "agent_invalid" or {*answer} == {"reward", "metrics"}


@pytest.mark.parametrize("reward", [[], "", {}, "1", 10**400, float("nan")])
def test_a_reward_that_is_no_finite_number_is_a_fault(reward: Any) -> None:
    assert outcome_of({"reward": reward})["reason"] == "agent_invalid"
    assert outcome_of({"metrics": {"a": 1}}) == {"reward": None, "metrics": {"a": 1.0}}


def test_other_threads_go_on_while_a_long_text_is_encoded(chats: dict[str, ChatTokenizer]) -> None:
    """One message of an agent, of 16 MB, kept the interpreter's lock for 17 s: no other
    rollout was answered meanwhile."""
    chat, text, tokens, num_turns = chats["qwen2.5"], "12 * 3 is hello " * 60_000, list[int](), 0
    assert len(text) > LONG_CHARS
    encoding = threading.Thread(target=lambda: tokens.extend(chat._encoder.encode(text)))
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 50, "this thread had the lock meanwhile"
    assert tokens == chat._tokenizer.encode(text, add_special_tokens=False).ids


BODIES: dict[Wire, dict[str, Any]] = {
    OpenAiWire(None): {  # type: ignore[arg-type]
        "model": "policy",
        "messages": [ASKED,
                     {"role": "assistant", "content": None,
                      "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                     {"role": "tool", "tool_call_id": "a", "content": "1"}],
        "tools": [TOOL], "tool_choice": "auto", "n": 1, "max_tokens": 5, "stream": True,
        "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "logprobs": True,
    },
    AnthropicWire(): {
        "model": "policy", "system": [{"type": "text", "text": "x"}], "max_tokens": 5, "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto"},
        "messages": [ASKED,
                     {"role": "assistant",
                      "content": [{"type": "text", "text": "a"},
                                  {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}], "stream": False,
    },
}  # fmt: skip
ODD: list[Any] = [None, "x", "auto", 5, -1, 1.5, float("nan"), float("inf"), 10**400, True, [], {}, [[]], [5], {"a": 1},
                  ["a"], [None], [{}], "\ud800", json.loads(nested(150)), json.loads(nested(900))]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds it, its name there) of every value within a value."""
    for name in [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []:
        yield value, name
        yield from places(value[name])


@pytest.mark.parametrize("wire", BODIES, ids=["openai", "anthropic"])
def test_a_body_with_one_thing_wrong_is_read_or_refused_in_the_form_of_the_api(wire: Wire) -> None:
    """48 of 1,406 such bodies were answered with a plain 500."""
    assert isinstance(wire.read(BODIES[wire]), ChatRequest)
    bodies: list[Any] = [*ODD]
    for index in range(len([*places(BODIES[wire])])):
        for odd in ODD:
            body = copy.deepcopy(BODIES[wire])
            holder, name = [*places(body)][index]
            holder[name] = odd
            bodies.append(body)
    answers = [answer_to(wire, body) for body in bodies]
    assert {answer.status for answer in answers if isinstance(answer, ChatRefused)} == {400}
    assert all(json.dumps(wire.error(answer)) for answer in answers if isinstance(answer, ChatRefused))


def answer_to(wire: Wire, body: Any) -> ChatRequest | ChatRefused:
    try:
        return wire.read(body)
    except ChatRefused as refused:
        return refused


def test_a_command_that_reads_nothing_is_not_written_to_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe is ready at any time, with the answer that nobody reads it."""
    writes: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(file) or write(file, data))
    # not `run`: it ends all that this process has started, so the servers of other tests, too
    process = subprocess.Popen(
        ["/bin/sh", "-c", "exec <&-; sleep 0.5; echo '{\"reward\": 1}'"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert last_words(process, b"x" * 1_000_000) == ('{"reward": 1}\n', "")
    assert len(writes) < 50, "of 64 KiB each, until the pipe was full or closed"
