"""Reads messages and tools of any common format into one form.

The only reader for rows of data sets and for the requests of agents.

In this form a content is text or missing, the arguments of a tool call are an object, and every
value can be stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlpipe.base.errors import UserError
from rlpipe.base.values import plain_json
from rlpipe.records.prompt import Message, Tool, ToolCall, is_text

# levels of nested lists and objects in a message or a tool: JSON writers and templates have limits
DEPTH_MAX = 100
HOLDERS = (Mapping, list, tuple)
AS_TEXT = json.JSONEncoder(ensure_ascii=False)  # json.dumps would make one at each call
REASONING = ("reasoning_content", "thinking", "reasoning")  # three names of one field


def read_message(message: Any, where: str) -> Message:
    """A message in the common form, with all its other fields; nulls and an empty list of calls are
    left out.

    UserError when it is not a message, or has content other than text.
    """
    check_depth(message, where)
    if not isinstance(message, Mapping) or not is_text(message.get("role")):
        raise UserError(f"{where}: needs a 'role' and a 'content', both text, and is {message!r:.200}")
    read: Message = {str(name): plain_json(value) for name, value in message.items() if value is not None}
    if "content" in read:
        read["content"] = _content(read["content"], f"{where}: its 'content'")
    if calls := read.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise UserError(f"{where}: 'tool_calls' must be a list of calls, and is {calls!r:.200}")
        read["tool_calls"] = [_call(call, f"{where}: tool call {index}") for index, call in enumerate(calls, start=1)]
    reasoning = next((read[name] for name in REASONING if name in read), None)
    if reasoning is not None:  # templates use two of the names
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    return check_text(read, where)


def read_tools(value: Any, where: str) -> list[Tool]:
    """Tools as JSON schemas, from a list or from JSON text; empty for none.

    UserError for any other value.
    """
    if value is None:
        return []
    check_depth(value, where)
    if isinstance(value, str):
        value = None if value.strip() in ("", "null") else _parsed(value) or value
    tools = [] if value is None else value
    if not isinstance(tools, list):
        raise UserError(f"{where} must be a list of tools as JSON schemas, or JSON text of one, and is {value!r:.200}")
    read = [_tool(tool, f"{where}: tool {index}") for index, tool in enumerate(plain_json(tools), start=1)]
    return check_text(read, where)


def content_text(message: Message) -> str:
    """The text of a message; empty if it only calls tools."""
    return message.get("content", "")


def parsed_json(text: str) -> Any:
    """Parses untrusted JSON text. None for invalid text, and for values that could not be written
    again: NaN, a number out of the range of float, half a surrogate pair, more than DEPTH_MAX
    levels.
    """
    try:
        return check_text(_parsed(text), "JSON text")
    except UserError:
        return None


def strict_json(text: str | bytes) -> Any:
    """Parses JSON text strictly.

    ValueError or RecursionError for invalid text. NaN and numbers out of the range of float are
    invalid, though Python reads and writes them.
    """
    return json.loads(text, parse_constant=_refused, parse_float=_finite)


def without_nulls(value: Any) -> Any:
    """`value` without keys that are null, at any depth: Arrow gives every record of a column the
    keys of all records.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def check_depth(value: Any, where: str) -> None:
    """Raises UserError when lists and objects are nested deeper than DEPTH_MAX."""
    level = [value]
    for _ in range(DEPTH_MAX):
        held = [
            outer.values() if isinstance(outer, Mapping) else outer for outer in level if isinstance(outer, HOLDERS)
        ]
        level = [entry for entries in held for entry in entries]
        if not level:
            return
    raise UserError(f"{where}: its lists and objects are more than {DEPTH_MAX} levels deep")


def check_text(value: Any, where: str) -> Any:
    """Returns the JSON `value`. UserError when a text in it, at any depth, cannot be stored."""
    try:
        AS_TEXT.encode(value).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: holds half a surrogate pair, which is no text") from error
    return value


def _content(content: Any, where: str) -> str:
    """The text of a content, which is text or a list of text parts."""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise UserError(f"{where} has parts, and only parts of type text are supported")
        content = "".join(str(part.get("text") or "") for part in content)
    if not is_text(content):
        raise UserError(f"{where} must be text that can be stored, and is {content!r:.200}")
    return content


def _call(call: Any, where: str) -> ToolCall:
    """A tool call, whose arguments are parsed to an object if possible.

    Some data sets have the function itself in place of a call.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise UserError(
            f'{where} must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}, and is {call!r:.200}'
        )
    arguments = function.get("arguments")
    parsed = _parsed(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    # anything but a JSON object stays as it is, for the reader of the message to decide
    function = {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}
    read: Any = {**call, "function": function} if "function" in call else {"type": "function", "function": function}
    return read


def _tool(tool: Any, where: str) -> Any:
    """A tool, or its function, with JSON text in it parsed."""
    tool = _parsed(tool) if isinstance(tool, str) else tool
    if not isinstance(tool, dict) or not tool:
        raise UserError(
            f'{where} must be a JSON schema, {{"type": "function", "function": {{"name", ...}}}}, and is {tool!r:.200}'
        )
    if isinstance(function := tool.get("function"), (dict, str)):
        return {**tool, "function": _tool(function, where)}
    if not isinstance(parameters := tool.get("parameters"), str):
        return tool
    parsed = _parsed(parameters)
    if not isinstance(parsed, dict):
        raise UserError(
            f"{where}: its 'parameters' must be an object, or JSON text of one, and are {parameters!r:.200}"
        )
    return {**tool, "parameters": parsed}


def _parsed(text: str) -> Any:
    """As `parsed_json`, but a text may have half a surrogate pair."""
    try:
        value = strict_json(text)
        check_depth(value, "JSON text")
        return value
    except (ValueError, RecursionError):
        return None


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refused(number)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
