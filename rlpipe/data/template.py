"""Chat templates: renders Jinja as transformers does, without importing transformers, and finds the
spans of `{% generation %}` marks.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.data.encoding import Span
from rlpipe.data.template_text import with_defaults
from rlpipe.data.tool_calls import TRIED_TOOLS, ArgumentForm, argument_form, marked_calls, with_text_arguments
from rlpipe.records.prompt import Message, Messages, Tool

# the errors that a template's expressions may raise
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
OUTSIDE = ("tools", "documents")  # variables whose text is not from the template's author
# the fields of an assistant's message with its own text, in which control tokens are tokens
OWN = ("content", "reasoning_content", "reasoning", "thinking")


class GenerationMarks(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, with which a template marks the assistant's
    text.

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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    # a run that is resumed tomorrow must render the same tokens: "today" is always Llama's default
    # date
    return datetime.datetime(2024, 7, 26).strftime(form)


class ChatTemplate:
    """A compiled chat template, with the special tokens that it may use (bos_token, eos_token, ...)
    and further variables.

    `variables`: the keywords of transformers' apply_chat_template: `tools`, `documents`,
    `enable_thinking`, ...
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
        # a template that renders the same without these variables
        self.text = with_defaults(source, variables or {}, special_tokens)
        self._variables = {"tools": None, "documents": None, **special_tokens, **(variables or {})}
        assert not {"messages", "add_generation_prompt"} & set(self._variables), "the config refuses these"
        self.has_marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        self.knows_tools = re.search(r"\btools\b", source) is not None

    @cached_property
    def argument_form(self) -> ArgumentForm:
        """The form in which the template takes the arguments of tool calls."""
        return argument_form(lambda messages: self._rendered({"messages": messages, "tools": TRIED_TOOLS})[0])

    def check_calls(self, messages: Messages) -> None:
        """Raises UserError when the template leaves out a tool call, its name or its arguments, or
        writes them outside of the loss mask.

        Does nothing for a conversation without calls.
        """
        if not any("tool_calls" in message for message in messages):
            return
        marked, marks = marked_calls(messages)
        try:
            text, spans = self.render_marked(marked)
        except UserError:  # a template that accepts only its own tools
            return
        written = "".join(text[start:end] for start, end in spans) if self.has_marks else text
        lost = next((mark for mark in marks if not mark.is_in(written)), None)
        if lost is not None:
            what = "name" if lost.name not in written else "arguments"
            where = " within {% generation %}" if self.has_marks and lost.is_in(text) else ""
            raise UserError(
                f"{lost.where}: the chat template does not write its {what}{where}, so the policy would learn to call"
                " nothing; set model.chat_template to one that writes every tool call (one that writes only the id, as"
                " Kimi's, needs ids like 'functions.NAME:0')"
            )

    def with_tools(self, tools: list[Tool]) -> ChatTemplate:
        """The same template with these tools, as JSON schemas."""
        known = self.argument_form  # before the copy, so that it is tested once for all tools
        other = copy.copy(self)
        other.argument_form = known
        other._variables = self._variables | {"tools": tools}
        return other

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """Renders the conversation as text. UserError when the template refuses it."""
        return self.render_marked(messages, add_generation_prompt)[0]

    def render_marked(self, messages: Messages, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Renders the conversation; returns the text and the spans inside `{% generation %}`
        marks.
        """
        assert messages
        if any("tool_calls" in message for message in messages) and self.argument_form == "text":
            messages = with_text_arguments(messages)
        return self._rendered({"messages": messages, "add_generation_prompt": add_generation_prompt})

    def _rendered(self, variables: JsonDict) -> tuple[str, list[Span]]:
        messages, variables = variables["messages"], self._variables | variables
        mark = _unused_mark(variables) if self.has_marks else ""
        try:
            text = self._template.render(variables | {"generation_mark": mark})
        except FAULTS as error:
            what = f"{type(error).__name__} {error}".strip()
            raise UserError(
                f"the chat template raises an error for a conversation ({what:.300}): {json.dumps(messages)[:300]}"
            ) from error
        return _split_marks(text, mark) if self.has_marks else (text, [])

    def spans_from_outside(
        self, controls: re.Pattern[str], messages: Messages, text: str, add_generation_prompt: bool = False
    ) -> list[Span]:
        """The spans of `text`, the rendered `messages`, that match `controls` and are from a
        message or a tool, not from the template.

        To find them, the messages are rendered again with a mark in place of each. UserError when
        the template changes a mark. The assistant's own text does not count as outside.
        """
        shared = {name: self._variables[name] for name in OUTSIDE if self._variables.get(name)}
        others = [
            {name: value for name, value in message.items() if not _is_own(message, name)} for message in messages
        ]
        if not any(controls.search(said) for said in _texts([others, shared])):
            return []
        marks = _Marks(controls, repr(messages) + repr(shared) + text)
        template = copy.copy(self)
        template._variables = self._variables | marks.put(shared)
        marked = [message | marks.put(other) for message, other in zip(messages, others, strict=True)]
        pieces = marks.pattern.split(template.render(marked, add_generation_prompt))
        spans, end = [], 0
        for index, piece in enumerate(pieces):
            ways = marks.ways_to_write(piece) if index % 2 else [piece]
            written = next((way for way in ways if text.startswith(way, end)), None)
            if written is None:
                raise _changed(text[end : end + 80])
            if index % 2 and written == ways[0]:
                spans.append((end, end + len(written)))
            end += len(written)
        if end < len(text):
            raise _changed(text[end : end + 80])
        return spans


class _Marks:
    """Meaningless words that replace control tokens while a template is rendered."""

    def __init__(self, controls: re.Pattern[str], taken: str) -> None:
        stem = next(stem for number in itertools.count() if (stem := f"rlpipecontrol{number}n") not in taken)
        self._controls, self._stem = controls, stem
        self._contents: list[str] = []
        self.pattern = re.compile(stem + r"(\d+)x")

    def put(self, value: Any) -> Any:
        """The value with a mark in place of each control token from outside."""
        if isinstance(value, str):
            return self._controls.sub(self._mark, value)
        if isinstance(value, list):
            return [self.put(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        return {self.put(name): self.put(entry) for name, entry in value.items()}

    def _mark(self, control: re.Match[str]) -> str:
        self._contents.append(control[0])
        return f"{self._stem}{len(self._contents) - 1}x"

    def ways_to_write(self, number: str) -> list[str]:
        """The texts that a template may write for a mark's control token: the token itself, or its
        JSON form, which may not be a control token any more.
        """
        content = self._contents[int(number)]
        return [content, *(json.dumps(content, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))]


def _is_own(message: Message, name: str) -> bool:
    """True when a field of a message has the assistant's own text."""
    return message["role"] == "assistant" and name in OWN


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        for entry in entries:
            yield from _texts(entry)


def _changed(where: str) -> UserError:
    return UserError(
        f"a message contains the text of a control token (at {where!r}), and the chat template changes this text, so"
        " rlpipe cannot tell it from the control tokens of the template; remove it from the data, or set"
        " model.control_tokens=as_written to keep it as a control token"
    )


def _unused_mark(variables: JsonDict) -> str:
    text = repr(variables)
    return next(mark for number in itertools.count() if (mark := f"[generation {number}]") not in text)


def _split_marks(text: str, mark: str) -> tuple[str, list[Span]]:
    pieces = text.split(mark)
    assert len(pieces) % 2 == 1, "every mark that opens also closes"
    # spans of the pieces in the text without marks; every second one is a mark
    ends = list(itertools.accumulate(map(len, pieces)))
    return "".join(pieces), list(zip(ends[0::2], ends[1::2], strict=False))
