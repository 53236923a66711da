"""Tests with marked calls if a chat template writes tool calls, and which form of their arguments
it takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from rlpipe.base.errors import UserError
from rlpipe.records.prompt import Message, Messages, Tool, ToolCall

# arguments as an object (most templates), as JSON text (DeepSeek's), or no calls at all
ArgumentForm = Literal["object", "text", "none"]
ASKED: Message = {"role": "user", "content": "ask"}
TRIED_TOOLS: list[Tool] = [  # some templates write calls only if there are tools
    {
        "type": "function",
        "function": {"name": "try", "description": "try", "parameters": {"type": "object", "properties": {}}},
    }
]
# Mistral's ids have nine characters, Kimi's contain the name
TRIED_IDS = ("123456789", "functions.{name}:0")
SAID_NOTHING: tuple[Message, ...] = ({"content": ""}, {})


class MarkedCall(NamedTuple):
    """Unique texts that mark one tool call."""

    where: str
    name: str
    key: str
    value: str

    def is_in(self, text: str) -> bool:
        """True when the text has the marked call, but not as a Python dict or as JSON text within
        JSON.
        """
        marks = self.name, self.key, self.value
        return all(mark in text for mark in marks) and f"'{self.key}'" not in text and f'\\"{self.key}' not in text


def argument_form(render: Callable[[Messages], str]) -> ArgumentForm:
    """The form of arguments that a template writes correctly: as JSON, encoded once, or in a syntax
    of its own; "none" when it writes no calls.
    """
    for form in ("object", "text"):
        for call_id in TRIED_IDS:
            for said in SAID_NOTHING:
                call = {"id": call_id.format(name="f"), "type": "function", "function": {"name": "f", "arguments": {}}}
                messages, (mark,) = marked_calls([ASKED, {"role": "assistant", **said, "tool_calls": [call]}])
                try:
                    text = render(messages if form == "object" else with_text_arguments(messages))
                except UserError:
                    continue
                if mark.is_in(text):
                    return form
    return "none"


def calls_of(messages: Messages) -> Iterator[tuple[int, int, ToolCall]]:
    """Yields (index of the message, index of the call in it, call) of every tool call; indices
    count from 1.
    """
    for index, message in enumerate(messages, start=1):
        for number, call in enumerate(message.get("tool_calls", []), start=1):
            yield index, number, call


def with_text_arguments(messages: Messages) -> Messages:
    """The messages with the arguments of tool calls as JSON text."""

    def turned(call: ToolCall) -> ToolCall:
        function, arguments = call["function"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return _with_calls(messages, turned)


def marked_calls(messages: Messages) -> tuple[Messages, list[MarkedCall]]:
    """Returns the messages with marks in place of the content of tool calls, and the marks in
    order.
    """
    marks = [
        MarkedCall(f"message {index}, tool call {number} ({call['function']['name']!r})", *_marks(place))
        for place, (index, number, call) in enumerate(calls_of(messages))
    ]
    rest = iter(marks)

    def turned(call: ToolCall) -> ToolCall:
        mark, function = next(rest), call["function"]
        marked: ToolCall = {**call, "function": {**function, "name": mark.name, "arguments": {mark.key: mark.value}}}
        if "id" in call:
            marked["id"] = str(call["id"]).replace(function["name"], mark.name)
        return marked

    return _with_calls(messages, turned), marks


def _with_calls(messages: Messages, turned: Callable[[ToolCall], ToolCall]) -> Messages:
    return [
        {**message, "tool_calls": [turned(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _marks(place: int) -> tuple[str, str, str]:
    return f"rlpipe_name_{place}_", f"rlpipe_key_{place}_", f"rlpipe_value_{place}_"
