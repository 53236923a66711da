"""OpenAI's chat completions on the wire: a request as a record, and the message that a completion
becomes. For the endpoint of agents, and for `rlpipe serve`.

Messages are kept in one form: {"role", "content"} with text, for the assistant perhaps with
"tool_calls" whose arguments are parsed, for a tool with "tool_call_id". So equal messages compare
equal, however their JSON was written.

A tool call is written in a completion as by Hermes and Qwen: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.records import messages as reading
from rlpipe.records.prompt import CalledFunction, Message, Messages, Tool, ToolCall, is_text

MODEL = "policy"
CHOICES_MAX, TOKENS_MAX = 128, 1 << 31
CALL_BEGINS, CALL_ENDS = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\}\s*</tool_call>")
KINDS = {dict: "an object", list: "a list", bool: "true or false"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# fields that change the probabilities of tokens: training would take them for the policy's own
REFUSED = ("stop", "logit_bias", "functions", "function_call", "audio", "prediction")
TRAINED = "it would change the distribution that is trained on"


class ChatRefused(Exception):
    """Raised for a call that is answered with an error. No client tries it again."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True)
class GivenReplies:
    """The replies to one call, a message and its tokens each, and the number of tokens before
    them.
    """

    messages: list[Message]
    sampled: list[Completion]
    num_context_tokens: int

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(sampled.tokens) for sampled in self.sampled)


@dataclass(frozen=True)
class ChatRequest:
    """The request of one call, without its sampling settings (temperature, top_p, seed): for agents
    the run sets them.
    """

    model: str
    messages: Messages
    tools: list[Tool]
    calls_tools: bool  # whether tool calls in the completion are taken for such
    num_choices: int
    tokens_max: int | None
    with_logprobs: bool
    stream: bool
    with_usage: bool  # at the end of a stream


def read_request(body: Any, refused: tuple[str, ...] = REFUSED, why: str = TRAINED) -> ChatRequest:
    """The request in a JSON body; ChatRefused names the field that is not supported: one of
    `refused`, or one that would constrain what is sampled. `why`: it is so.
    """
    body = checked_body(body, {"stream_options": dict, "messages": list, "stream": bool, "logprobs": bool})
    for name in refused:
        if body.get(name):
            raise invalid(name, f"is not supported: {why}")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise invalid("response_format", f"only text is supported: {why}")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("none", "auto"):
        raise invalid("tool_choice", "is 'none' or 'auto': another would constrain what is sampled")
    if body.get("top_logprobs"):
        raise invalid("top_logprobs", "engines give the logprobs of sampled tokens only; leave it out, or 0")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    tools = _read("tools", reading.read_tools, body.get("tools"))
    if not all(map(_is_tool, tools)):
        raise invalid("tools", 'must be a list of {"type": "function", "function": {"name": ...}}')
    return ChatRequest(
        model=body["model"] if is_text(body.get("model")) else MODEL,
        messages=[read_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools=tools,
        calls_tools=bool(tools) and choice == "auto",
        num_choices=whole_number("n", 1 if body.get("n") is None else body["n"], CHOICES_MAX),
        tokens_max=tokens_limit(body),
        with_logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def encoded_prompt(tokenizer: ChatTokenizer, request: ChatRequest, tokens_max: int) -> list[int]:
    """The tokens of a conversation from its beginning, up to the head of the reply. UserError when
    the chat template refuses it; TooLong when it has more than `tokens_max` tokens.
    """
    tokenizer = tokenizer.with_tools(request.tools) if request.tools else tokenizer
    messages = request.messages if tokenizer.knows_tool_calls else [*map(as_text, request.messages)]
    tokens = tokenizer.encode_prompt(messages, tokens_max)
    if not tokens:
        raise UserError("the chat template writes nothing of the conversation, so nothing can follow it")
    return tokens


def checked_body(body: Any, kinds: dict[str, type]) -> JsonDict:
    """The body, an object whose fields are of these types, null, or absent; ChatRefused."""
    if not isinstance(body, dict):
        raise invalid("body", "must be a JSON object")
    _read("body", reading.check_depth, body)
    for name, kind in kinds.items():
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise invalid(name, f"must be {KINDS[kind]}")
    return body


def read_message(message: Any, where: str) -> Message:
    """A message in the one form; ChatRefused when it is not a message, or holds more than text."""
    whole = _read(where, reading.read_message, message)
    if (role := ROLES.get(whole["role"])) is None:
        raise invalid(where, f"needs a role, one of {', '.join(ROLES)}")
    read: Message = {"role": role, "content": reading.content_text(whole)}
    if role == "assistant" and "tool_calls" in whole:
        read["tool_calls"] = [_own_call(call) for call in whole["tool_calls"]]
    if role == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id", ""))
    return read


def assistant_message(text: str, request: ChatRequest, new_id: Callable[[int], str]) -> Message:
    """The assistant's message of a completion, in the one form. Text that calls none of the
    request's tools stays text.
    """
    names = [tool["function"]["name"] for tool in request.tools] if request.calls_tools else []
    calls: list[ToolCall] = []
    for number, written in enumerate(_written_calls(text) if names else ()):
        call = reading.parsed_json(written)
        if (
            not isinstance(call, dict)
            or call.get("name") not in names
            or not isinstance(call.get("arguments", {}), dict)
        ):
            calls = []
            break
        function: CalledFunction = {"name": call["name"], "arguments": call.get("arguments", {})}
        calls.append({"id": new_id(number), "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text[: text.index("<tool_call>")].strip(), "tool_calls": calls}


def on_the_wire(message: Message) -> Message:
    """An assistant's message as OpenAI's clients read it: arguments are text, content is never
    null.
    """
    calls = [
        {**call, "function": {**call["function"], "arguments": json_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {
        "role": "assistant",
        "content": message["content"] or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }


def json_text(value: Any) -> str:
    """The JSON text of a value. ValueError for values that only Python's JSON has, such as NaN."""
    return json.dumps(value, allow_nan=False)


def as_text(message: Message) -> Message:
    """A message for a chat template without tool calls: they are written into its content."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
    return {
        "role": message["role"],
        "content": message["content"] + "".join(f"<tool_call>{call}</tool_call>" for call in calls),
    }


def _own_call(call: ToolCall) -> ToolCall:
    """A call with only the fields of the one form."""
    function = call["function"]
    named: CalledFunction = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _written_calls(text: str) -> Iterator[str]:
    """The texts in <tool_call>{...}</tool_call>, in order. Each character is read once or twice,
    whatever the text.
    """
    end = 0
    while begin := CALL_BEGINS.search(text, end):
        ends = CALL_ENDS.search(text, begin.end())
        if ends is None:
            return
        yield text[begin.end() : ends.start() + 1]
        end = ends.end()


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def whole_number(name: str, value: Any, largest: int) -> int:
    """The value of a field that is a whole number from 1 to `largest`; ChatRefused."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise invalid(name, f"must be a whole number from 1 to {largest}")
    return value


def tokens_limit(body: JsonDict) -> int | None:
    """The largest number of tokens of a reply; None where the body gives none."""
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return whole_number(name, body[name], TOKENS_MAX)
    return None


def _read(name: str, read: Callable[[Any, str], Any], value: Any) -> Any:
    """The value that a reader of messages or tools makes of a field; ChatRefused where the reader
    refuses it.
    """
    try:
        return read(value, name)
    except UserError as error:
        raise ChatRefused(400, str(error), "unsupported", name) from error


def invalid(name: str, what: str) -> ChatRefused:
    """The refusal of a field; `what` is wrong with it."""
    return ChatRefused(400, f"{name}: {what}", "unsupported", name)
