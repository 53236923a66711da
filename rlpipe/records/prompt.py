"""Prompts and their messages and tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from rlpipe.base.values import JsonDict
from rlpipe.records.kinds import Json, OptionalText, Text, Tokens

Message = dict[str, Any]
Messages = list[Message]
AS_JSON = ("prompt_id", "source", "messages", "answer", "metadata")


class ToolFunction(TypedDict):
    """A function that the policy may call. `parameters`: the JSON schema of its arguments."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[object]


class Tool(TypedDict):
    """A tool as the template gets it, with all other fields of the data set."""

    type: str
    function: ToolFunction


class CalledFunction(TypedDict):
    """A function's name and the arguments of a call: an object, or its JSON text in HTTP messages
    and for templates that need text.
    """

    name: str
    arguments: Any


class ToolCall(TypedDict):
    """A tool call in a message of the assistant, with all other fields of the data set."""

    id: NotRequired[str]
    type: NotRequired[str]
    function: CalledFunction


class RewardPrompt(TypedDict):
    """The fields of a prompt that a reward or an environment gets."""

    prompt_id: str
    messages: Messages
    answer: str | None
    metadata: JsonDict


@dataclass(frozen=True)
class Prompt:
    """One prompt, with the data that its reward needs.

    Example: Prompt("words/17", "words", [{"role": "user", "content": "Spell this word backward:
    sun"}], "nus", {}).
    """

    prompt_id: Text  # "<set name>/<row>": a row has the same id in every part of the split
    source: Text  # the name of the data set
    messages: Annotated[Messages, Json()]
    answer: OptionalText
    metadata: Annotated[JsonDict, Json()] = field(default_factory=dict)
    # a digest of the messages
    prompt_tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32), compare=False, repr=False)
    # for the template; stored in `metadata`, as in the row
    tools: list[Tool] | None = field(default=None, compare=False)

    def as_json(self) -> JsonDict:
        """The prompt in the form of the data set."""
        return {name: value for name, value in vars(self).items() if name in AS_JSON}

    def for_reward(self) -> RewardPrompt:
        """The fields of the prompt that a reward function or an environment gets."""
        messages = [message if "content" in message else {**message, "content": ""} for message in self.messages]
        return {"prompt_id": self.prompt_id, "messages": messages, "answer": self.answer, "metadata": self.metadata}


class SampledTokens(NamedTuple):
    """The tokens of a conversation as an engine sampled them, the mask of those to train, and the
    digest of the vocabulary that they are numbers in (`vocabulary_sha256`).
    """

    tokens: list[int]
    loss_mask: list[int]
    vocabulary: str


class Talk(NamedTuple):
    """A conversation of SFT, with its place and the assistant's tools. `sampled`: its tokens, where
    they are not to be made of the messages.

    Example: Talk("sums.jsonl:3", [{"role": "user", "content": "2+2?"}, {"role": "assistant",
    "content": "4"}], []).
    """

    where: str
    messages: Messages
    tools: list[Tool]
    sampled: SampledTokens | None = None

    def as_json(self) -> Any:
        """The value to hash: the messages, with the tools or the tokens if there are any."""
        beside = {name: value for name, value in (("tools", self.tools), ("sampled", self.sampled)) if value}
        return {"messages": self.messages, **beside} if beside else self.messages


def is_message(value: Any) -> bool:
    """True when the value has a role and a content, both text."""
    return isinstance(value, dict) and is_text(value.get("role")) and is_text(value.get("content"))


def is_text(value: Any) -> bool:
    """True when the value is text that can be stored."""
    try:
        return isinstance(value, str) and value.encode() is not None
    # JSON can have halves of surrogate pairs, which no tokenizer accepts
    except UnicodeEncodeError:
        return False
