"""Chat templates: Jinja as transformers renders it, without importing transformers, and where `{% generation %}` marks lie."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlpipe.data.template_text import with_defaults
from rlpipe.data.tool_calls import TRIED_TOOLS, ArgumentForm, argument_form, marked_calls, with_text_arguments
from rlpipe.records.prompt import Messages
from rlpipe.types import JsonDict, UserError

# what a template's expressions may raise
FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
Span = tuple[int, int]  # characters, end exclusive


class GenerationMarks(Extension):
    """`{% generation %}...{% endgeneration %}`: the template itself says what the assistant writes.

    The variable `generation_mark` is written before and after it.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Any) -> nodes.Node:
        line_index = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        before, after = (nodes.Output([nodes.Name("generation_mark", "load")]) for _ in range(2))
        return nodes.Scope([before, *body, after]).set_lineno(line_index)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    # a run that is resumed tomorrow must render the same tokens, so "today" is always Llama's own default day
    return datetime.datetime(2024, 7, 26).strftime(form)


class ChatTemplate:
    """A compiled chat template with the special tokens it may name (bos_token, eos_token, ...) and more variables for it.

    `variables` are what transformers' apply_chat_template takes as keywords: `tools`, `documents`, `enable_thinking`, ...
    """

    def __init__(self, source: str, special_tokens: dict[str, str], variables: Mapping[str, Any] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"model.chat_template: not a Jinja template ({error})") from error
        self.text = with_defaults(source, variables or {}, special_tokens)  # what writes the same without these variables
        self._variables = {"tools": None, "documents": None, **special_tokens, **(variables or {})}
        assert not {"messages", "add_generation_prompt"} & set(self._variables), "the config refuses these"
        self.has_marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        self.knows_tools = re.search(r"\btools\b", source) is not None

    @cached_property
    def argument_form(self) -> ArgumentForm:
        """How the template takes the arguments of tool calls."""
        return argument_form(lambda messages: self._rendered({"messages": messages, "tools": TRIED_TOOLS})[0])

    def check_calls(self, messages: Messages) -> None:
        """UserError where the template leaves out a tool call, its name or its arguments, or writes them where no loss lies.

        A conversation in which nothing is called passes.
        """
        if not any("tool_calls" in message for message in messages):
            return
        marked, marks = marked_calls(messages)
        try:
            text, spans = self.render_marked(marked)
        except UserError:  # a template that knows these tools only
            return
        written = "".join(text[start:end] for start, end in spans) if self.has_marks else text
        lost = next((mark for mark in marks if not mark.is_in(written)), None)
        if lost is not None:
            what = "name" if lost.name not in written else "arguments"
            where = " within {% generation %}" if self.has_marks and lost.is_in(text) else ""
            raise UserError(
                f"{lost.where}: the chat template does not write its {what}{where}, so the policy would learn to call nothing; set "
                "model.chat_template to one that writes every tool call (one that writes only the id, as Kimi's, needs ids like "
                "'functions.NAME:0')"
            )

    def with_tools(self, tools: list[JsonDict]) -> ChatTemplate:
        """The same template with these tools, as JSON schemas."""
        assert self.argument_form, "known before it is copied: once for all tools"
        other = copy.copy(self)
        other._variables = self._variables | {"tools": tools}
        return other

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """The conversation as text; UserError when the template refuses it."""
        return self.render_marked(messages, add_generation_prompt)[0]

    def render_marked(self, messages: Messages, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """The conversation as text and the spans inside `{% generation %}` marks."""
        assert messages
        if any("tool_calls" in message for message in messages) and self.argument_form == "text":
            messages = with_text_arguments(messages)
        return self._rendered({"messages": messages, "add_generation_prompt": add_generation_prompt})

    def _rendered(self, variables: JsonDict) -> tuple[str, list[Span]]:
        messages = variables["messages"]
        mark = _unused_mark(messages) if self.has_marks else ""
        try:
            text = self._template.render(self._variables | variables | {"generation_mark": mark})
        except FAULTS as error:
            what = f"{type(error).__name__} {error}".strip()
            raise UserError(f"the chat template refuses a conversation ({what:.300}): {json.dumps(messages)[:300]}") from error
        return _split_marks(text, mark) if self.has_marks else (text, [])


def _unused_mark(messages: Messages) -> str:
    text = repr(messages)
    return next(mark for number in itertools.count() if (mark := f"[generation {number}]") not in text)


def _split_marks(text: str, mark: str) -> tuple[str, list[Span]]:
    pieces = text.split(mark)
    assert len(pieces) % 2 == 1, "every mark that opens also closes"
    ends = list(itertools.accumulate(map(len, pieces)))  # of the pieces in the text without marks; every second one is marked
    return "".join(pieces), list(zip(ends[0::2], ends[1::2], strict=False))
