"""Reads data sets as prompts (RL, evaluation) and as conversations (SFT), and splits them.

Errors name the file and row of a refused row.
"""

from __future__ import annotations

import logging
import threading
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rlpipe.base.errors import UserError
from rlpipe.base.seeds import fraction
from rlpipe.base.values import plain_json
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.sections import DataConfig
from rlpipe.data.rows import GENERATOR, Row, read_rows
from rlpipe.records.messages import content_text, read_message, read_tools, without_nulls
from rlpipe.records.prompt import Message, Messages, Prompt, SampledTokens, Talk, Tool, is_text

log = logging.getLogger(__name__)
Entry = TypeVar("Entry", Prompt, Talk)
TOOLS = "tools"  # the column
PromptSets = Callable[[str], list[list[Prompt]]]  # use -> its prompt sets


def once(load: PromptSets) -> PromptSets:
    """Returns `load` with a cache: it loads once per use, also with several threads."""
    lock, loaded = threading.Lock(), cache(load)

    def sets(use: str) -> list[list[Prompt]]:
        with lock:
            return loaded(use)

    return sets


def load_prompts(data: DataConfig, seed: int) -> list[Prompt]:
    """Loads the prompts of one set that are in its part, in the source's order. `seed`: of the
    items of a generator or function.

    UserError names the config field, or the file and row, at fault.
    """
    rows = read_rows(data, seed)
    # items of a generator may have no answer: its own verifier scores them without one
    answered = not data.source.startswith(GENERATOR) and rows[0].values.get(data.answer_field) is not None
    return _of_part(data, [_prompt(data, index, row, answered) for index, row in enumerate(rows)])


def room_for(config: PipelineConfig, use: str) -> int:
    """The largest number of tokens of a prompt of use rl or evaluation, which leaves room for a
    completion: `context_tokens_max - completion_tokens_max`.
    """
    room = config.model.context_tokens_max - config.completion_tokens_max(use)
    assert room > 0, "the config leaves room for a prompt"
    return room


def fitting(data: DataConfig, rows: list[Entry], lengths: Iterable[int], tokens_max: int) -> list[Entry]:
    """The rows of at most `tokens_max` tokens if the set drops longer ones, else all rows; logs the
    number of dropped rows. UserError when none is left.
    """
    if data.on_too_long != "drop":
        return rows
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= tokens_max]
    where = (
        f"data.{data.name}.on_too_long='drop': {len(rows) - len(kept)} of {len(rows)} rows have more than {tokens_max}"
        " tokens"
    )
    assert tokens_max > 0, "no row fits into nothing"
    if not kept:
        raise UserError(f"{where}, and none is left; raise model.context_tokens_max, or add shorter rows")
    if len(kept) < len(rows):
        log.info("%s", where)
    return kept


def load_conversations(data: DataConfig, seed: int) -> list[Talk]:
    """Loads the SFT conversations of one set that are in its part, in the source's order.

    A row has `messages`; or a prompt and `completion`; or a prompt and an answer, which
    `completion_template` turns into the completion; and optionally `tools`; with `sampled`, the
    fields of SampledTokens, its tokens are these. UserError naming the config field, or the file
    and row, at fault.
    """
    rows = read_rows(data, seed)
    return _of_part(data, [Talk(row.where, _conversation(data, row), _tools(row), _sampled(row)) for row in rows])


def _sampled(row: Row) -> SampledTokens | None:
    value = row.values.get("sampled")
    if value is None:
        return None
    try:
        sampled = TypeAdapter(SampledTokens).validate_python(value, strict=True)
    except ValidationError as error:
        raise UserError(f"{row.where}: 'sampled' must have tokens, loss_mask and vocabulary: {error}") from error
    if len(sampled.tokens) != len(sampled.loss_mask) or not {*sampled.loss_mask} <= {0, 1}:
        raise UserError(f"{row.where}: 'sampled' needs a loss_mask of 0 and 1 for each of its tokens")
    return sampled


def split_point(messages: Messages, salt: str = "") -> float:
    """A number in [0, 1) from the text of the last user message, so that the same text is always on
    the same side of a split.

    Splits with different salts are independent.
    """
    texts = [content_text(message) for message in messages if message["role"] == "user"]
    return fraction(salt + normalised(texts[-1] if texts else content_text(messages[-1])))


def normalised(text: str) -> str:
    """The text without surrounding white space, in one Unicode form: texts that look alike are the
    same prompt.
    """
    return unicodedata.normalize("NFC", text.strip())


def question(messages: Messages) -> tuple[str, ...]:
    """The question of a prompt, or of a conversation before its last answer. Prompts with the same
    question are the same prompt.
    """
    asked_last = max((index for index, message in enumerate(messages) if message["role"] != "assistant"), default=0)
    return tuple(normalised(content_text(message)) for message in messages[: asked_last + 1])


def in_part(messages: Messages, part: str, heldout_fraction: float) -> bool:
    """True when a prompt belongs to `part` ("all", "train" or "heldout")."""
    assert part in ("all", "train", "heldout"), part
    return part == "all" or (split_point(messages) < heldout_fraction) == (part == "heldout")


def split_validation(sets: dict[str, list[Talk]], share: float) -> tuple[list[list[Talk]], list[Talk]]:
    """Returns (the training rows of each set, the validation rows of all sets), in order. UserError
    when either would be empty.

    The side of a conversation depends only on its last user message, not on the order or on the
    split by `part`.
    """
    if share == 0:
        return list(sets.values()), []
    where = f"sft.validation_fraction={share:g}"
    training: list[list[Talk]] = []
    validation: list[Talk] = []
    for name, conversations in sets.items():
        points = [split_point(talk.messages, "validation/") for talk in conversations]
        pairs = list(zip(conversations, points, strict=True))
        training.append([talk for talk, point in pairs if point >= share])
        validation += [talk for talk, point in pairs if point < share]
        if not training[-1]:
            raise UserError(f"{where}: it takes every conversation of data set {name}; lower it, or add conversations")
    if not validation:
        raise UserError(
            f"{where}: it takes none of the {sum(map(len, training))} conversations; raise it, or add conversations"
        )
    return training, validation


def _of_part(data: DataConfig, entries: list[Entry]) -> list[Entry]:
    """The entries in the data set's part of the split. UserError when there is none."""
    kept = [entry for entry in entries if in_part(entry.messages, data.part, data.heldout_fraction)]
    if not kept:
        raise UserError(
            f"data.{data.name}.part={data.part!r}: none of the {len(entries)} rows of {data.source} falls in it; "
            f"add rows, or change heldout_fraction={data.heldout_fraction}"
        )
    return kept


def _prompt(data: DataConfig, index: int, row: Row, answered: bool) -> Prompt:
    answer = row.values.get(data.answer_field)
    if answered and answer is None:
        raise UserError(
            f"{row.where}: no {data.answer_field!r}, which the first row has; add it "
            f"(the field's name is data.{data.name}.answer_field)"
        )
    if not is_text("" if answer is None else str(answer)):
        raise UserError(f"{row.where}: {data.answer_field!r} holds half a surrogate pair, which is no text")
    used = {data.prompt_field, data.answer_field}
    return Prompt(
        prompt_id=f"{data.name}/{index}",
        source=data.name,
        messages=_with_system(data, _prompt_messages(data, row)),
        answer=None if answer is None else str(answer),
        metadata={key: plain_json(value) for key, value in row.values.items() if key not in used},
        tools=_tools(row) if _has_schemas(row.values.get(TOOLS)) else None,
    )


def _conversation(data: DataConfig, row: Row) -> Messages:
    if row.values.get("messages") is not None:
        messages = _messages(row, "messages", row.values["messages"])
        if all(message["role"] != "assistant" for message in messages):
            raise UserError(
                f"{row.where}: 'messages' has no message of the assistant, so there is nothing to learn from it"
            )
    else:
        prompt = _prompt_messages(data, row)
        turn = {"role": "assistant", "content": _completion(data, row)}
        messages = prompt + _messages(row, "completion", [turn])
    return _with_system(data, messages)


def _prompt_messages(data: DataConfig, row: Row) -> Messages:
    value = row.values.get(data.prompt_field)
    if not value or not isinstance(value, (str, list)):
        problem = f"no {data.prompt_field!r}" if value is None else f"{data.prompt_field!r} is {value!r:.200}"
        raise UserError(
            f"{row.where}: {problem}; it must be text or a list of messages (the row has: {_listed(row)}; "
            f"another column is named with data.{data.name}.prompt_field)"
        )
    messages = _messages(
        row, data.prompt_field, [{"role": "user", "content": value}] if isinstance(value, str) else value
    )
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{row.where}: {data.prompt_field!r} ends with the assistant's message; a prompt ends before it"
        )
    return messages


def _messages(row: Row, field: str, value: Any) -> Messages:
    """The messages of one field of a row, in the common form. UserError when they are no
    conversation.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{row.where}: {field!r} must be a list of messages, and is {value!r:.200}")
    messages: Messages = []
    for index, message in enumerate(value, start=1):
        where = f"{row.where}: message {index} of {field!r}"
        messages.append(read_message(_own_calls(message) if row.is_arrow else message, where))
        _check_turn(messages[-1], where)
    return messages


def _own_calls(message: Any) -> Any:
    """A message from Arrow, whose tool calls have only the keys that they were written with."""
    if not isinstance(message, Mapping) or "tool_calls" not in message:
        return message
    return {**message, "tool_calls": without_nulls(message["tool_calls"])}


def _check_turn(message: Message, where: str) -> None:
    """Raises UserError for a message without text and calls, or with a call whose arguments are not
    an object.
    """
    calls = message.get("tool_calls", [])
    if "content" not in message and not (calls and message["role"] == "assistant"):
        raise UserError(
            f"{where}: needs a 'role' and a 'content', both text, and has the content null, which only an assistant's"
            " message with 'tool_calls' may have; write its text"
        )
    for index, call in enumerate(calls, start=1):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict):
            raise UserError(
                f"{where}: tool call {index} ({call['function']['name']!r}): its 'arguments' must be a JSON object, or"
                f" JSON text of one, and are {arguments!r:.200}"
            )


def _tools(row: Row) -> list[Tool]:
    """The tools of a row, for the chat template."""
    value = row.values.get(TOOLS)
    return read_tools(without_nulls(value) if row.is_arrow else value, f"{row.where}: {TOOLS!r}")


def _has_schemas(tools: Any) -> bool:
    """True when a prompt's tools may be for the template; mere names of tools are for an
    environment or a reward.
    """
    if isinstance(tools, str):
        return "{" in tools
    return isinstance(tools, list) and any(
        isinstance(tool, Mapping) or str(tool).lstrip().startswith("{") for tool in tools
    )


def _with_system(data: DataConfig, messages: Messages) -> Messages:
    if not data.system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _listed(row: Row) -> str:
    """The names of a row's columns, as one line."""
    return " ".join(", ".join(row.values).split())[:200] or "nothing"


def _completion(data: DataConfig, row: Row) -> str:
    completion = row.values.get("completion")
    if isinstance(completion, str) and completion:
        return completion
    answer = row.values.get(data.answer_field)
    if answer is None:
        raise UserError(
            f"{row.where}: SFT needs 'messages', or 'completion', or {data.answer_field!r} (the row has:"
            f" {_listed(row)})"
        )
    if "{answer}" not in data.completion_template:
        raise UserError(
            f"data.{data.name}.completion_template={data.completion_template!r}: it must contain {{answer}}"
        )
    return data.completion_template.replace("{answer}", str(answer))
