"""Replies in the form of OpenAI's chat completions, whole and as a stream."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.extras.agents.chat import ChatRefused, ChatRequest, json_text, on_the_wire, read_request
from rlpipe.extras.agents.rollout import GivenReplies
from rlpipe.records.prompt import Message

UNKNOWN = -9999.0  # the logprob where there is no number, as OpenAI gives it


class OpenAiFault(TypedDict):
    """The reason of a refusal, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAiError(TypedDict):
    """The body of a refusal."""

    error: OpenAiFault


class OpenAiUsage(TypedDict):
    """The tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(TypedDict):
    """A sampled token. `bytes`: its own, which may not be valid text alone."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[object]


class OpenAiLogprobs(TypedDict):
    """The logprobs of a choice."""

    content: list[TokenLogprob]
    refusal: None


class OpenAiChoice(TypedDict):
    """A choice, whole (`message`) or in part (`delta`)."""

    index: int
    message: NotRequired[Message]
    delta: NotRequired[Message]
    finish_reason: str | None
    logprobs: OpenAiLogprobs | None


class OpenAiHead(TypedDict):
    """The fields at the beginning of a chat completion, and of every chunk of it."""

    id: str
    object: str
    created: int
    model: str


class ChatCompletion(OpenAiHead):
    """A chat completion, or a chunk of one."""

    choices: list[OpenAiChoice]
    usage: NotRequired[OpenAiUsage]


@dataclass(frozen=True)
class OpenAiWire:
    """POST /v1/chat/completions."""

    tokenizer: ChatTokenizer

    def read(self, body: Any) -> ChatRequest:
        return read_request(body)

    def error(self, refused: ChatRefused) -> OpenAiError:
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}

    def whole(self, call: ChatRequest, answer: GivenReplies) -> ChatCompletion:
        choices: list[OpenAiChoice] = [
            {
                "index": index,
                "message": on_the_wire(node.messages[-1]),
                "finish_reason": _finish_reason(sampled, node.messages[-1]),
                "logprobs": self._logprobs(call, sampled),
            }
            for index, (node, sampled) in enumerate(zip(answer.nodes, answer.sampled, strict=True))
        ]
        return {**_head(call, "chat.completion"), "choices": choices, "usage": _usage(answer)}

    def events(self, call: ChatRequest, answer: GivenReplies) -> Iterator[str]:
        """Yields, for each choice, its message and then its `finish_reason`; last the usage, where
        the request wants it.
        """
        head = _head(call, "chat.completion.chunk")
        for index, (node, sampled) in enumerate(zip(answer.nodes, answer.sampled, strict=True)):
            message = on_the_wire(node.messages[-1])
            calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", []))]
            said = {**message, **({"tool_calls": calls} if calls else {})}
            for delta, reason, logprobs in (
                (said, None, self._logprobs(call, sampled)),
                ({}, _finish_reason(sampled, message), None),
            ):
                choice: OpenAiChoice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
                yield _event({**head, "choices": [choice]})
        if call.with_usage:
            yield _event({**head, "choices": [], "usage": _usage(answer)})
        yield "data: [DONE]\n\n"

    def _logprobs(self, call: ChatRequest, sampled: Completion) -> OpenAiLogprobs | None:
        """The logprobs of the sampled tokens; nothing else is known of the distribution."""
        if not call.with_logprobs:
            return None
        pieces = self.tokenizer.token_bytes(sampled.tokens)
        content: list[TokenLogprob] = [
            {
                "token": piece.decode(errors="replace"),
                "logprob": logprob if math.isfinite(logprob) else UNKNOWN,
                "bytes": [*piece],
                "top_logprobs": [],
            }
            for piece, logprob in zip(pieces, sampled.rollout_logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _head(call: ChatRequest, kind: str) -> OpenAiHead:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": call.model}


def _finish_reason(sampled: Completion, message: Message) -> str:
    return "tool_calls" if sampled.finish_reason == "stop" and message.get("tool_calls") else sampled.finish_reason


def _usage(answer: GivenReplies) -> OpenAiUsage:
    context, num_sampled = answer.num_context_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": context, "completion_tokens": num_sampled, "total_tokens": context + num_sampled}


def _event(body: ChatCompletion) -> str:
    return f"data: {json_text(body)}\n\n"
