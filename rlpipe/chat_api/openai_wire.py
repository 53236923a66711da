"""Replies in the form of OpenAI's chat completions, whole and as a stream."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from rlpipe.chat_api.chat import ChatRefused, ChatRequest, GivenReplies, json_text, on_the_wire, read_request
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.records.prompt import Message

UNKNOWN = -9999.0  # the logprob where there is no number, as OpenAI gives it
CHUNK = "chat.completion.chunk"
DONE = "data: [DONE]\n\n"  # the end of a stream


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
                "message": on_the_wire(message),
                "finish_reason": finish_reason_of(sampled, message),
                "logprobs": self.logprobs(call, sampled),
            }
            for index, (message, sampled) in enumerate(zip(answer.messages, answer.sampled, strict=True))
        ]
        return {**head(call.model, "chat.completion"), "choices": choices, "usage": usage(answer)}

    def events(self, call: ChatRequest, answer: GivenReplies) -> Iterator[str]:
        """Yields, for each choice, its message and then its `finish_reason`; last the usage, where
        the request wants it.
        """
        first = head(call.model, CHUNK)
        for index, (message, sampled) in enumerate(zip(answer.messages, answer.sampled, strict=True)):
            yield event({**first, "choices": [delta(index, in_parts(message), self.logprobs(call, sampled))]})
            yield event({**first, "choices": [delta(index, {}, None, finish_reason_of(sampled, message))]})
        yield from self.end(call, first, answer)

    def end(self, call: ChatRequest, first: OpenAiHead, answer: GivenReplies) -> Iterator[str]:
        """Yields the usage of a stream, where the request wants it, and its end."""
        if call.with_usage:
            yield event({**first, "choices": [], "usage": usage(answer)})
        yield DONE

    def logprobs(self, call: ChatRequest, sampled: Completion, begin: int = 0) -> OpenAiLogprobs | None:
        """The logprobs of the sampled tokens from `begin` on; nothing else is known of the
        distribution.
        """
        if not call.with_logprobs:
            return None
        pairs = zip(self.tokenizer.token_bytes(sampled.tokens), sampled.rollout_logprobs, strict=True)
        content: list[TokenLogprob] = [
            {
                "token": piece.decode(errors="replace"),
                "logprob": known(logprob),
                "bytes": [*piece],
                "top_logprobs": [],
            }
            for piece, logprob in [*pairs][begin:]
        ]
        return {"content": content, "refusal": None}


def known(logprob: float) -> float:
    """The logprob as JSON can say it."""
    return logprob if math.isfinite(logprob) else UNKNOWN


def head(model: str, kind: str, prefix: str = "chatcmpl") -> OpenAiHead:
    """The fields at the beginning of a new completion."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def delta(index: int, part: Message, logprobs: OpenAiLogprobs | None, reason: str | None = None) -> OpenAiChoice:
    """A part of choice `index` in a stream."""
    return {"index": index, "delta": part, "finish_reason": reason, "logprobs": logprobs}


def event(body: ChatCompletion) -> str:
    """A server-sent event of a stream."""
    return f"data: {json_text(body)}\n\n"


def usage(answer: GivenReplies) -> OpenAiUsage:
    """The tokens of a call and of all its choices."""
    context, num_sampled = answer.num_context_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": context, "completion_tokens": num_sampled, "total_tokens": context + num_sampled}


def in_parts(message: Message) -> Message:
    """A message on the wire with its tool calls numbered, as a stream has them."""
    said = on_the_wire(message)
    calls = [{"index": number, **call} for number, call in enumerate(said.get("tool_calls", []))]
    return {**said, **({"tool_calls": calls} if calls else {})}


def finish_reason_of(sampled: Completion, message: Message) -> str:
    """The reason why a choice ended, as OpenAI names it."""
    return "tool_calls" if sampled.finish_reason == "stop" and message.get("tool_calls") else sampled.finish_reason
