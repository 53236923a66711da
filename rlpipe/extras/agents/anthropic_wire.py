"""Anthropic's messages API: a call is read as the equal chat completion request, and its reply is
written in Anthropic's form.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, final

from rlpipe.chat_api.chat import ChatRefused, ChatRequest, GivenReplies, checked_body, invalid, json_text, read_request
from rlpipe.records.prompt import Message

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class AnthropicFault(TypedDict):
    """The reason of a refusal, as Anthropic's clients read it."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """The body of a refusal."""

    type: str
    error: AnthropicFault


class AnthropicUsage(TypedDict):
    """The tokens of a call."""

    input_tokens: int
    output_tokens: int


@final
class TextBlock(TypedDict):
    """The text of a reply."""

    type: Literal["text"]
    text: str


@final
class ToolUseBlock(TypedDict):
    """A tool call of a reply."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: object


class AnthropicEnd(TypedDict):
    """The end of a reply."""

    stop_reason: str | None
    stop_sequence: None


class AnthropicMessage(AnthropicEnd):
    """A reply."""

    id: str
    type: str
    role: str
    model: str
    content: list[TextBlock | ToolUseBlock]
    usage: AnthropicUsage


@dataclass(frozen=True)
class AnthropicWire:
    """POST /v1/messages."""

    def read(self, body: Any) -> ChatRequest:
        """The request; ChatRefused names the field that is not supported."""
        body = checked_body(body, {"thinking": dict, "tool_choice": dict, "tools": list, "messages": list})
        if not all(isinstance(tool, dict) for tool in body.get("tools") or []):
            raise invalid("tools", "must be a list of objects with a name and an input_schema")
        if body.get("stop_sequences") or (body.get("thinking") or {}).get("type", "disabled") != "disabled":
            name = "stop_sequences" if body.get("stop_sequences") else "thinking"
            raise invalid(name, "is not supported: it would change the distribution that is trained on")
        choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.get("name"),
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema"),
                },
            }
            for tool in body.get("tools") or []
        ]
        messages = [turned for message in body.get("messages") or [] for turned in _turned(message)]
        same = {name: body[name] for name in ("model", "max_tokens", "stream") if name in body}
        return read_request({**same, "messages": system + messages, "tools": tools, "tool_choice": choice})

    def error(self, refused: ChatRefused) -> AnthropicError:
        return {"type": "error", "error": {"type": KINDS.get(refused.status, "api_error"), "message": str(refused)}}

    def whole(self, call: ChatRequest, answer: GivenReplies) -> AnthropicMessage:
        return {**self._empty(call, answer), "content": _blocks(answer), **_end(answer), "usage": _usage(answer)}

    def events(self, call: ChatRequest, answer: GivenReplies) -> Iterator[str]:
        yield _event("message_start", message=self._empty(call, answer))
        for index, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json_text(block["input"])}
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_end(answer), usage=_usage(answer))
        yield _event("message_stop")

    def _empty(self, call: ChatRequest, answer: GivenReplies) -> AnthropicMessage:
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(answer), "output_tokens": 0},
        }


def _turned(message: Any) -> list[Message]:
    """A message in the form of chat completions: results of tools are messages of their own, before
    the user's text beside them.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return [message]
    text = [block for block in content if block.get("type") not in ("tool_use", "tool_result")]
    calls = [
        {
            "id": block.get("id"),
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))},
        }
        for block in content
        if block.get("type") == "tool_use"
    ]
    results = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        for block in content
        if block.get("type") == "tool_result"
    ]
    said = [{"role": message.get("role"), "content": text, "tool_calls": calls}] if text or calls or not results else []
    return results + said


def _blocks(answer: GivenReplies) -> list[TextBlock | ToolUseBlock]:
    message = answer.messages[0]
    blocks: list[TextBlock | ToolUseBlock] = []
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _end(answer: GivenReplies) -> AnthropicEnd:
    reason = answer.sampled[0].finish_reason
    calls = reason == "stop" and answer.messages[0].get("tool_calls")
    return {"stop_reason": "tool_use" if calls else STOP_REASONS[reason], "stop_sequence": None}


def _usage(answer: GivenReplies) -> AnthropicUsage:
    return {"input_tokens": answer.num_context_tokens, "output_tokens": answer.num_sampled_tokens}


def _event(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {json_text({'type': name, **fields})}\n\n"
