"""Tests a tokenizer and its chat template in a process of their own (`python -m rlpipe.data.trial`)
before a run depends on them.

They are untrusted: a template may never end or use all memory, and a damaged tokenizer.json may
crash the process that reads it.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from rlpipe.base.errors import UserError
from rlpipe.config.model import ModelConfig
from rlpipe.data.chat import ChatTokenizer, ControlTokens
from rlpipe.data.conversations import encode_asked, encode_talk
from rlpipe.processes.pool import WorkerPool
from rlpipe.processes.user_code import CodeRaised, Loaded, Record, cause_of, serve, user_code
from rlpipe.processes.worker import ProcessEnded
from rlpipe.records.prompt import Messages, Prompt, Talk, Tool

MEMORY_BYTES = 4 << 30  # the limit of the process, far more than any tokenizer needs
BATCH, BATCH_TIMEOUT_S = 64, 60.0
# a template that never ends mostly does so with any prompt: one is enough to see it, in less time
# than a batch
Row = TypeVar("Row")
FIRST, FIRST_TIMEOUT_S = [{"role": "user", "content": "hi"}], 5.0


class TrialHello(TypedDict):
    """The first request: the folder of a tokenizer, and the settings of its template."""

    folder: str
    chat_template: str
    variables: dict[str, Any]
    control_tokens: ControlTokens


class TrialRequest(TypedDict, total=False):
    """The texts to test, of one kind."""

    first: Messages
    prompts: list[tuple[str, Messages, list[Tool] | None]]
    conversations: list[Talk]
    said: list[str]
    continuations: list[Messages]


class TrialAnswer(TypedDict):
    """The texts that rewards get for `said`, and the number of tokens of each conversation and
    prompt.
    """

    heard: list[str]
    lengths: list[int]


class TokenizerTrial:
    """The tokenizer of a folder with its template in a process that runs until `close`.

    UserError for a text that they cannot handle.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._where = "model.chat_template" if model.chat_template else f"model.path={folder}: its chat template"
        hello: TrialHello = {
            "folder": str(folder),
            "chat_template": model.chat_template,
            "variables": model.chat_template_args,
            "control_tokens": model.control_tokens,
        }
        self._pool = WorkerPool(f"the tokenizer of {folder}", "rlpipe.data.trial", hello)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            (ready,) = self._pool.start()
            self.vocab_size: int = ready["vocab_size"]
            self.knows_tools: bool = ready["knows_tools"]
            assert self.vocab_size > 0, "a tokenizer without tokens"
            self._ask({"first": FIRST}, FIRST_TIMEOUT_S)
            undo.pop_all()  # it is good: its process stays

    def close(self) -> None:
        self._pool.close()

    def prompt_lengths(self, prompts: Iterable[Prompt]) -> Iterator[int]:
        """The number of tokens of each prompt, with the head of the assistant's turn."""
        for part in _batched(prompts):
            lengths = self._ask({"prompts": [(row.prompt_id, row.messages, row.tools) for row in part]})["lengths"]
            assert len(lengths) == len(part), "a prompt was lost"
            yield from lengths

    def conversation_lengths(self, conversations: Iterable[Talk]) -> Iterator[int]:
        """The number of tokens of each conversation; checks that the assistant's turns can be found
        in it.
        """
        for part in _batched(conversations):
            yield from self._ask({"conversations": part})["lengths"]

    def heard(self, completions: Iterable[str]) -> dict[str, str]:
        """Returns, for each text, what rewards get if a policy writes it: the text after encoding
        and decoding.
        """
        texts = list(dict.fromkeys(completions))
        return {
            text: heard
            for part in _batched(texts)
            for text, heard in zip(part, self._ask({"said": part})["heard"], strict=True)
        }

    def try_continuations(self, messages: Iterable[Messages]) -> None:
        """Checks that the template can continue a conversation with each of these messages."""
        self._ask({"continuations": list(messages)})

    def _ask(self, request: TrialRequest, timeout_s: float | None = None) -> TrialAnswer:
        timeout_s = timeout_s or BATCH_TIMEOUT_S
        try:
            answer = self._pool.ask(request, timeout_s)
        except TimeoutError as error:
            raise UserError(
                f"{self._where} took more than {timeout_s:g} s for"
                f" {'a prompt' if 'first' in request else f'{BATCH} conversations'}"
            ) from error
        except ProcessEnded as error:
            raise UserError(f"{self._where} ended the process that tried it; what it said is above") from error
        if "error" in answer:
            raise UserError(answer["error"])
        return answer


def _batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rest = iter(rows)
    while part := list(islice(rest, BATCH)):
        yield part


def load(hello: TrialHello) -> Loaded:
    """Runs in the process: limits its memory and loads the tokenizer."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    where = f"model.path={hello['folder']}"
    try:
        with user_code():
            tokenizer = ChatTokenizer.from_folder(
                hello["folder"], hello["chat_template"], hello["variables"], hello["control_tokens"]
            )
    except CodeRaised as error:
        message = cause_of(error, "its tokenizer does not load")
        raise UserError(message if hello["folder"] in message else f"{where}: {message}") from error

    def answer(request: TrialRequest) -> Record:
        try:
            with user_code():
                return _answer(tokenizer, request)
        except CodeRaised as error:
            return {
                "error": f"{'model.chat_template' if hello['chat_template'] else where}: {cause_of(error, 'it fails')}"
            }

    return {"vocab_size": tokenizer.vocab_size, "knows_tools": tokenizer.knows_tools}, answer


def _answer(tokenizer: ChatTokenizer, request: TrialRequest) -> TrialAnswer:
    if "first" in request:
        with suppress(UserError):  # the template does not accept this conversation
            tokenizer.encode_prompt(request["first"])
    lengths = [len(encode_talk(tokenizer, Talk(*fields))[0]) for fields in request.get("conversations", [])]
    for messages in request.get("continuations", []):
        tokenizer.encode_continuation(messages)
    heard = [tokenizer.heard(text) for text in request.get("said", [])]
    asked_lengths = [len(encode_asked(tokenizer, *fields)) for fields in request.get("prompts", [])]
    return {"heard": heard, "lengths": lengths + asked_lengths}


if __name__ == "__main__":
    serve(load)
