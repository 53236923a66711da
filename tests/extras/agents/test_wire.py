"""What the endpoint writes is strict JSON in the form of its route, whatever the body is and
whatever the policy says."""

from __future__ import annotations

import asyncio
import copy
import gzip
import http.client
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlpipe.chat_api.chat import CHOICES_MAX
from rlpipe.chat_api.openai_wire import UNKNOWN, OpenAiWire
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.extras.agents.endpoint import AgentEndpoint, Door
from tests.agent_world import CALL, TOOL, SpokenPool, rollout_of, tokenizer_in
from tests.deadlines import DEADLINE_S
from tests.extras.agents.test_text import ASKED, BODIES, REPLIES, call_of, places

PATHS = {"openai": "/chat/completions", "anthropic": "/messages"}
BASES: dict[str, Any] = dict(zip(PATHS, BODIES.values(), strict=True))
# the names that mean something, wherever they stand, and any others
NAMES = st.one_of(
    st.sampled_from(sorted({name for body in BODIES.values() for _, name in places(body) if isinstance(name, str)})),
    st.text(max_size=4)
)  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 200),
    st.sampled_from([10**400, 1.5, math.nan, math.inf, "\ud800", "auto", "none", "user", "assistant",
                     "tool", "text", "tool_use", "function"]),
    st.text(max_size=4),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(NAMES, values, max_size=4)),
    max_leaves=8,
)


@dataclass(frozen=True)
class Answer:
    """What came over the wire."""

    status: int
    kind: str
    text: str

    @property
    def values(self) -> list[Any]:
        """Its JSON, of a stream that of each event."""
        if self.kind == "application/json":
            return [strictly_read(self.text)]
        lines = [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]
        return [strictly_read(line) for line in lines if line != "[DONE]"]


def strictly_read(text: str) -> Any:
    """As a reader of another language has it: no NaN, no infinite
    number, no half of a surrogate pair."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refuse)
    assert json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


@dataclass
class Server:
    """The endpoint on a loop of its own, and what asks it."""

    tokenizer: ChatTokenizer
    endpoint: AgentEndpoint

    def ask(self, path: str, body: bytes, says: str, **headers: str) -> Answer:
        """The answer of a rollout of its own, whose policy says one thing."""
        rollout = rollout_of(SpokenPool(self.tokenizer, [says] * CHOICES_MAX), calls=CHOICES_MAX)
        with self.endpoint.open(rollout) as door:
            answer = self._post(door, path, body, headers)
        assert rollout.failure is None, "a body is no reason to end a run"
        return answer

    def _post(self, door: Door, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        url = urlsplit(door.base_url)
        connection = http.client.HTTPConnection(str(url.hostname), url.port or 0)
        connection.request("POST", url.path + path, body, {"x-api-key": door.api_key, **headers})
        response = connection.getresponse()
        answer = Answer(response.status, response.headers.get_content_type(), response.read().decode())
        connection.close()
        return answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tokenizer, loop = tokenizer_in(tmp_path_factory.mktemp("tokenizer")), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def started() -> AgentEndpoint:
        endpoint = AgentEndpoint(tokenizer)
        await endpoint.start("127.0.0.1")
        return endpoint

    endpoint = asyncio.run_coroutine_threadsafe(started(), loop).result(DEADLINE_S)
    yield Server(tokenizer, endpoint)
    asyncio.run_coroutine_threadsafe(endpoint.close(), loop).result(DEADLINE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(DEADLINE_S)


def check(route: str, answer: Answer) -> None:
    """200 with what the route gives, or 4xx with its error."""
    assert answer.values and (answer.status == 200 or 400 <= answer.status < 500), answer
    if answer.status != 200:
        [error] = answer.values
        names = {"openai": {"message", "type", "param", "code"}, "anthropic": {"type", "message"}}[route]
        assert (
            {*error["error"]} == names and error["error"]["message"] and (route == "openai" or error["type"] == "error")
        )
    for written in arguments_in(answer.values):
        assert isinstance(strictly_read(written), dict)


def arguments_in(value: Any) -> Iterator[str]:
    """The arguments of tool calls that stand in an answer as text."""
    for holder, name in places(value):
        if name in ("arguments", "partial_json"):
            yield holder[name]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("route", PATHS)
def test_a_body_of_any_json_is_answered_or_refused_in_the_form_of_its_route(
    route: str, data: st.DataObject, server: Server
) -> None:
    body: Any = copy.deepcopy(BASES[route])
    for _ in range(data.draw(st.integers(0, 3))):
        if holders := [*places(body)]:
            holder, name = data.draw(st.sampled_from(holders))
            holder[name] = data.draw(VALUES)
    written = data.draw(st.one_of(st.just(body), VALUES))
    check(route, server.ask(PATHS[route], json.dumps(written).encode(), CALL))


def said_by(server: Server, route: str, says: str, stream: bool) -> Answer:
    """How an answer goes onto the wire to a call that has a tool."""
    says = says.encode(errors="replace").decode()
    tools = {"openai": [TOOL], "anthropic": [{"name": "calculator", "input_schema": {"type": "object"}}]}[route]
    body = {"messages": [ASKED], "tools": tools, "stream": stream, "max_tokens": 400, "logprobs": True}
    answer = server.ask(PATHS[route], json.dumps(body).encode(), says)
    assert answer.status == 200
    check(route, answer)
    return answer


@settings(max_examples=100, deadline=None)
@given(says=REPLIES, stream=st.booleans())
@pytest.mark.parametrize("route", PATHS)
def test_what_a_policy_says_goes_onto_the_wire_as_strict_json(
    route: str, says: str, stream: bool, server: Server
) -> None:
    said_by(server, route, says, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", PATHS)
@pytest.mark.parametrize("number", ["NaN", "1e999", "-1e999", "Infinity", "-Infinity", "[[1e400]]", '{"a": NaN}'])
def test_arguments_that_are_json_for_python_alone_are_text(
    number: str, route: str, stream: bool, server: Server
) -> None:
    for written in (call_of(f'{{"x": {number}}}'), call_of('{"x": 1}') + call_of(f'{{"x": {number}}}')):
        answer = said_by(server, route, written, stream)
        texts = [
            holder[name]
            for holder, name in places(answer.values)
            if name in ("content", "text") and isinstance(holder[name], str)
        ]
        assert not [*arguments_in(answer.values)] and written in texts
        assert '"name": "calculator"' not in answer.text
    assert '"name": "calculator"' in said_by(server, route, call_of('{"x": 1e99}'), stream).text


@pytest.mark.parametrize("route", PATHS)
def test_bytes_that_are_no_json_are_refused_in_the_form_of_the_route(route: str, server: Server) -> None:
    def ask(body: bytes, **headers: str) -> Answer:
        answer = server.ask(PATHS[route], body, CALL, **headers)
        check(route, answer)
        return answer

    asked = {"messages": [ASKED], "max_tokens": 5}
    for body in (
        b"",
        b"\xff\xfe\x00",
        b"[",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"9" * 5000,
        json.dumps(asked).encode() + b"x",
    ):
        assert ask(body).status == 400
    assert ask(b"no gzip", **{"Content-Encoding": "gzip"}).status == 400, "it was a plain 500"
    assert ask(gzip.compress(json.dumps(asked).encode()), **{"Content-Encoding": "gzip"}).status == 200
    for model in ("\ud800", 5, None, ["x"], "gpt"):
        [answer] = ask(json.dumps({**asked, "model": model}).encode()).values
        assert answer["model"] == (model if model == "gpt" else "policy")


def test_a_logprob_that_is_no_number_is_that_of_what_is_not_known(server: Server) -> None:
    tokens = server.tokenizer._encoder.encode("12*3")
    sampled = Completion(tokens_of(tokens), logprobs_of([-0.5, -math.inf, None, 0.0]), "stop", [(0, len(tokens))], "e")
    wire = OpenAiWire(server.tokenizer)
    logprobs = wire.logprobs(wire.read({"messages": [ASKED], "logprobs": True}), sampled)
    assert logprobs is not None and [entry["logprob"] for entry in logprobs["content"]] == [-0.5, UNKNOWN, UNKNOWN, 0.0]


@settings(max_examples=50, deadline=None)
@given(says=st.text(max_size=20))
@example(says="🙂 日本 é")
def test_the_bytes_of_logprobs_are_those_of_the_text(says: str, server: Server) -> None:
    """Of a token that is a part of a character they were those of U+FFFD."""
    body = {"messages": [ASKED], "logprobs": True}
    [answer] = server.ask("/chat/completions", json.dumps(body).encode(), says).values
    [choice] = answer["choices"]
    joined = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
    assert joined == server.tokenizer.decode_raw(server.tokenizer._encoder.encode(f"{says}<|end|>")).encode()
    assert "<|" in says or joined.decode() == f"{choice['message']['content']}<|end|>"
