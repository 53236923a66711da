"""Data sets as prompts (RL, evaluation) and as conversations (SFT). Every refused row is named by file and row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlpipe.data.functions import Row
from rlpipe.data.generated import generate_prompts
from rlpipe.data.prompt import Message, Prompt, in_part, is_message, plain_json
from rlpipe.data.rows import read_rows
from rlpipe.types import JsonDict, UserError

if TYPE_CHECKING:
    from rlpipe.config import DataConfig

Conversation = list[Message]


def load_prompts(data: DataConfig, seed: int) -> list[Prompt]:
    """The prompts of one set that fall in its part, in the source's order; `seed` makes a generator's or function's items.

    UserError names the config field, or the file and row, at fault.
    """
    if data.source.startswith("reasoning_gym:"):
        prompts = generate_prompts(data, seed)
    else:
        rows = read_rows(data, seed)
        answered = rows[0][1].get(data.answer_field) is not None
        prompts = [_prompt(data, index, row, answered) for index, row in enumerate(rows)]
    prompts = [replace(prompt, messages=_system(data, prompt.messages)) for prompt in prompts]
    kept = [prompt for prompt in prompts if in_part(prompt.messages, data.part, data.heldout_fraction)]
    _check_some(data, len(kept), len(prompts))
    return kept


def load_conversations(data: DataConfig, seed: int) -> list[Conversation]:
    """The SFT conversations of one set that fall in its part, in the source's order.

    A row has `messages`; or a prompt and `completion`; or a prompt and an answer, which `completion_template` turns into the
    completion. UserError names the config field, or the file and row, at fault.
    """
    if data.source.startswith("reasoning_gym:"):
        prompts = [(f"{data.source} item {prompt.prompt_id}", prompt) for prompt in generate_prompts(data, seed)]
        rows = [(where, {data.prompt_field: prompt.messages, data.answer_field: prompt.answer}) for where, prompt in prompts]
    else:
        rows = read_rows(data, seed)
    conversations = [_conversation(data, row) for row in rows]
    kept = [messages for messages in conversations if in_part(messages, data.part, data.heldout_fraction)]
    _check_some(data, len(kept), len(rows))
    return kept


def _check_some(data: DataConfig, num_kept: int, num_rows: int) -> None:
    assert num_kept <= num_rows
    if num_kept == 0:
        raise UserError(
            f"data.{data.name}.part={data.part!r}: none of the {num_rows} rows of {data.source} falls in it; "
            f"add rows, or change heldout_fraction={data.heldout_fraction}"
        )


def _prompt(data: DataConfig, index: int, located: Row, answered: bool) -> Prompt:
    where, row = located
    answer = row.get(data.answer_field)
    if answered and answer is None:
        raise UserError(
            f"{where}: no {data.answer_field!r}, which the first row has; add it (the field's name is data.{data.name}.answer_field)"
        )
    used = {data.prompt_field, data.answer_field}
    return Prompt(
        prompt_id=f"{data.name}/{index}",
        source=data.name,
        messages=_prompt_messages(data, where, row),
        answer=None if answer is None else str(answer),
        metadata={key: plain_json(value) for key, value in row.items() if key not in used},
    )


def _system(data: DataConfig, messages: list[Message]) -> list[Message]:
    if not data.system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _prompt_messages(data: DataConfig, where: str, row: JsonDict) -> list[Message]:
    value = row.get(data.prompt_field)
    if not value or not isinstance(value, (str, list)):
        problem = f"no {data.prompt_field!r}" if value is None else f"{data.prompt_field!r} is {value!r}"
        raise UserError(
            f"{where}: {problem}; it must be text or a list of messages (the row has: {', '.join(row) or 'nothing'}; "
            f"another column is named with data.{data.name}.prompt_field)"
        )
    raw = [{"role": "user", "content": value}] if isinstance(value, str) else value
    messages = _messages(where, data.prompt_field, raw)
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: {data.prompt_field!r} ends with the assistant's message; a prompt ends before it")
    return messages


def _messages(where: str, field: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {field!r} must be a list of messages, and is {value!r}")
    for index, message in enumerate(value, start=1):
        if not is_message(message):
            raise UserError(
                f"{where}: message {index} of {field!r} needs a 'role' and a 'content', both text, and is {message!r}"
            )
    return [{key: plain_json(entry) for key, entry in message.items() if entry is not None} for message in value]


def _conversation(data: DataConfig, located: Row) -> Conversation:
    where, row = located
    if row.get("messages") is not None:
        messages = _messages(where, "messages", row["messages"])
        if all(message["role"] != "assistant" for message in messages):
            raise UserError(f"{where}: 'messages' has no message of the assistant, so there is nothing to learn from it")
        return _system(data, messages)
    prompt = _prompt_messages(data, where, row)
    spoken = [{"role": "assistant", "content": _completion(data, where, row)}]
    return _system(data, [*prompt, *_messages(where, "completion", spoken)])


def _completion(data: DataConfig, where: str, row: JsonDict) -> str:
    completion = row.get("completion")
    if isinstance(completion, str) and completion:
        return completion
    answer = row.get(data.answer_field)
    if answer is None:
        raise UserError(
            f"{where}: SFT needs 'messages', or 'completion', or {data.answer_field!r} (the row has: {', '.join(row)})"
        )
    if "{answer}" not in data.completion_template:
        raise UserError(f"data.{data.name}.completion_template={data.completion_template!r}: it must contain {{answer}}")
    return data.completion_template.replace("{answer}", str(answer))
