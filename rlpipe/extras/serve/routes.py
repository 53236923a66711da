"""The two routes of OpenAI's API that sample: chat completions, and completions of a plain text."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from rlpipe.base.errors import UserError
from rlpipe.chat_api.chat import (
    ChatRefused,
    ChatRequest,
    GivenReplies,
    assistant_message,
    checked_body,
    encoded_prompt,
    invalid,
    json_text,
    read_request,
    tokens_limit,
)
from rlpipe.chat_api.openai_wire import (
    CHUNK,
    DONE,
    OpenAiHead,
    OpenAiUsage,
    OpenAiWire,
    delta,
    event,
    finish_reason_of,
    head,
    in_parts,
    known,
    usage,
)
from rlpipe.data.encoding import TooLong
from rlpipe.engines.client import Completion
from rlpipe.extras.serve.policy import ServedPolicy, Spoken
from rlpipe.extras.serve.settings import REFUSED, UNABLE, Settings, check_model, read_settings, too_long
from rlpipe.records.prompt import Message, is_text

PROMPTS_MAX = 1024  # of one request
TEXT_TOKENS_MAX = 16  # of a completion that gives no limit, as at OpenAI


@dataclass(frozen=True)
class Wanted:
    """A request that was read. `chat`: its fields that are common to both routes."""

    prompts: list[list[int]]
    settings: Settings
    chat: ChatRequest

    @property
    def streams_text(self) -> bool:
        """False where the text may turn out to be a tool call, which is sent whole."""
        return not self.chat.calls_tools

    @property
    def streams_logprobs(self) -> bool:
        """True when a token that was sampled stays in the reply."""
        return self.streams_text and not self.settings.stops


@dataclass
class SentPart:
    """What was sent of a choice while it is sampled: its text so far, and the number of tokens
    whose logprobs were.
    """

    index: int
    text: str = ""
    num_tokens: int = 0


@dataclass(frozen=True)
class ChatRoute:
    """POST /v1/chat/completions."""

    policy: ServedPolicy
    wire: OpenAiWire

    def read(self, body: Any) -> Wanted:
        """The request in a body; ChatRefused when it cannot be answered."""
        chat = read_request(body, REFUSED, UNABLE)
        check_model(body, self.policy)
        settings = read_settings(body, chat.tokens_max, self.policy)
        try:
            prompt = encoded_prompt(self.policy.tokenizer, chat, self.policy.config.model.context_tokens_max)
        except TooLong as error:
            raise too_long(self.policy) from error
        except UserError as error:
            raise ChatRefused(400, str(error), "chat_template", "messages") from error
        return Wanted([prompt], settings, chat)

    def head(self) -> OpenAiHead:
        """The fields of every event of a stream."""
        return head(self.policy.name, CHUNK)

    def whole(self, wanted: Wanted, spoken: list[Spoken]) -> object:
        return {**self.wire.whole(wanted.chat, _replies(wanted, spoken)), "model": self.policy.name}

    def part(self, wanted: Wanted, first: OpenAiHead, sent: SentPart, text: str, so_far: Completion) -> str:
        """An event with new text of a choice, and the logprobs of its new tokens."""
        message: Message = {**({} if sent.text else {"role": "assistant"}), "content": text}
        logprobs = self.wire.logprobs(wanted.chat, so_far, sent.num_tokens) if wanted.streams_logprobs else None
        return event({**first, "choices": [delta(sent.index, message, logprobs)]})

    def rest(self, wanted: Wanted, first: OpenAiHead, sent: SentPart, spoken: Spoken) -> Iterator[str]:
        """The events with what is left of a choice."""
        message, sampled = _replies(wanted, [spoken]).messages[0], spoken.completion
        left = in_parts({**message, "content": message["content"][len(sent.text) :]})
        if sent.text:
            del left["role"]  # clients join the parts of a field
        if not sent.text or left["content"] or sent.num_tokens < len(sampled.tokens):
            logprobs = self.wire.logprobs(wanted.chat, sampled, sent.num_tokens)
            yield event({**first, "choices": [delta(sent.index, left, logprobs)]})
        reason = finish_reason_of(sampled, message)
        yield event({**first, "choices": [delta(sent.index, {}, None, reason)]})

    def end(self, wanted: Wanted, first: OpenAiHead, spoken: list[Spoken]) -> Iterator[str]:
        """The last events of a stream."""
        return self.wire.end(wanted.chat, first, _replies(wanted, spoken))


def _replies(wanted: Wanted, spoken: list[Spoken]) -> GivenReplies:
    """The choices of a call with their messages; the context is that of all its prompts."""
    messages = [assistant_message(one.text, wanted.chat, lambda _: f"call_{secrets.token_hex(8)}") for one in spoken]
    return GivenReplies(messages, [one.completion for one in spoken], sum(map(len, wanted.prompts)))


class TextLogprobs(TypedDict):
    """The logprobs of a choice in the form of completions."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class TextChoice(TypedDict):
    """A choice of a completion, whole or in part."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class TextCompletion(OpenAiHead):
    """A completion, or a chunk of one."""

    choices: list[TextChoice]
    usage: NotRequired[OpenAiUsage]


@dataclass(frozen=True)
class TextRoute:
    """POST /v1/completions: prompts are texts or tokens, and no chat template is used."""

    policy: ServedPolicy

    def read(self, body: Any) -> Wanted:
        body = checked_body(body, {"stream_options": dict, "stream": bool})
        for name in REFUSED:
            if body.get(name):
                raise invalid(name, f"is not supported: {UNABLE}")
        if body.get("best_of") not in (None, body.get("n"), 1):
            raise invalid("best_of", "is not supported: ask for n, and choose")
        logprobs = body.get("logprobs")
        if logprobs not in (None, False, 0, 1):
            raise invalid("logprobs", "is at most 1: engines give the logprobs of sampled tokens only")
        check_model(body, self.policy)
        limit = tokens_limit(body) or TEXT_TOKENS_MAX
        settings = read_settings(body, limit, self.policy)
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        has_logprobs = logprobs is not None and logprobs is not False
        chat = ChatRequest(
            self.policy.name, [], [], False, settings.num_choices, limit, has_logprobs, bool(body.get("stream")),
            wants_usage,
        )  # fmt: skip
        return Wanted([self._encoded(prompt) for prompt in _prompts(body.get("prompt"))], settings, chat)

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self.policy.tokenizer
        if isinstance(prompt, str):
            try:
                prompt = tokenizer.encode_text(prompt, self.policy.config.model.context_tokens_max)
            except TooLong as error:
                raise too_long(self.policy) from error
        if not prompt or not 0 <= min(prompt) <= max(prompt) < tokenizer.vocab_size:
            raise invalid("prompt", f"must have a token, and each must be below {tokenizer.vocab_size}")
        return prompt

    def head(self) -> OpenAiHead:
        return head(self.policy.name, "text_completion", "cmpl")

    def whole(self, wanted: Wanted, spoken: list[Spoken]) -> object:
        choices = [
            self._choice(wanted, index, one.text, one.completion, 0, one.completion.finish_reason)
            for index, one in enumerate(spoken)
        ]
        return TextCompletion(**self.head(), choices=choices, usage=usage(_replies(wanted, spoken)))

    def part(self, wanted: Wanted, first: OpenAiHead, sent: SentPart, text: str, so_far: Completion) -> str:
        begin = sent.num_tokens if wanted.streams_logprobs else len(so_far.tokens)
        return _event(first, self._choice(wanted, sent.index, text, so_far, begin, None))

    def rest(self, wanted: Wanted, first: OpenAiHead, sent: SentPart, spoken: Spoken) -> Iterator[str]:
        text, sampled = spoken.text[len(sent.text) :], spoken.completion
        yield _event(first, self._choice(wanted, sent.index, text, sampled, sent.num_tokens, sampled.finish_reason))

    def end(self, wanted: Wanted, first: OpenAiHead, spoken: list[Spoken]) -> Iterator[str]:
        if wanted.chat.with_usage:
            yield _data(TextCompletion(**first, choices=[], usage=usage(_replies(wanted, spoken))))
        yield DONE

    def _choice(
        self, wanted: Wanted, index: int, text: str, sampled: Completion, begin: int, reason: str | None
    ) -> TextChoice:
        """A choice with the logprobs of its tokens from `begin` on."""
        logprobs: TextLogprobs | None = None
        if wanted.chat.with_logprobs:
            pieces = [piece.decode(errors="replace") for piece in self.policy.tokenizer.token_bytes(sampled.tokens)]
            offsets = [*itertools.accumulate(map(len, pieces), initial=0)][:-1]
            numbers = [known(logprob) for logprob in sampled.rollout_logprobs[begin:]]
            logprobs = TextLogprobs(
                tokens=pieces[begin:], token_logprobs=numbers, top_logprobs=None, text_offset=offsets[begin:]
            )
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a body: one or a list of them, each a text or a list of tokens."""
    several = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
    if not isinstance(several, list) or not 0 < len(several) <= PROMPTS_MAX:
        raise invalid("prompt", f"must be a text, a list of tokens, or a list of 1 to {PROMPTS_MAX} of these")
    if not all(is_text(one) or _is_tokens(one) for one in several):
        raise invalid("prompt", "must be text, or whole numbers: tokens")
    return several


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _event(first: OpenAiHead, choice: TextChoice) -> str:
    return _data(TextCompletion(**first, choices=[choice]))


def _data(body: TextCompletion) -> str:
    return f"data: {json_text(body)}\n\n"


Route = ChatRoute | TextRoute
