"""Fenced blocks of a completion, by CommonMark's rules, in one pass over its lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

TAB = 4  # columns
# what may stand before a fence on its line: white space, marks of block quotes and of list items
OPENING = re.compile(
    r"(?P<before>(?:[ \t]|>|[-+*](?=[ \t])|\d{1,9}[.)](?=[ \t]))*+)(?P<fence>`{3,}+|~{3,}+)(?P<info>.*)", re.DOTALL
)
CLOSING = re.compile(r"(?P<indent>[ \t]*+)(?P<fence>`{3,}+|~{3,}+)[ \t]*+")
PYTHON = re.compile(r"\{?[ \t]*+\.?(?:python|py)(?:3(?:\.\d++)*+)?(?![^\s{},:;])", re.IGNORECASE)


class Block(NamedTuple):
    """A fenced block: the text after its opening fence on that line, and its content, without the
    indentation of its fence.
    """

    info: str
    text: str

    @property
    def is_python(self) -> bool:
        """True when the first word of `info` is a name of Python 3: `python title="x"`,
        `{.python}`, `py`, `python3.11`, in any case.
        """
        return PYTHON.match(self.info) is not None


class _Fence(NamedTuple):
    mark: str
    info: str
    num_quotes: int  # marks of block quotes before it
    indent: int  # columns after the last of them


def blocks(text: str) -> Iterator[Block]:
    """The closed fenced blocks of a text, in order.

    As in CommonMark: a fence is three or more backticks or tildes, is closed by as many or more of
    the same alone on a line, and may be in list items and block quotes; its indentation is removed
    from each line of the block. Wider: it may be indented by any number of columns, and lines of a
    list item's block may be indented less. A block that is not closed does not count.
    """
    fence: _Fence | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        inside = None if fence is None else _within_quotes(line, fence.num_quotes)
        if fence is None or inside is None:  # a quote that ends, ends its block
            fence, lines = _opened(line), []
        elif _closes(inside, fence):
            yield Block(fence.info, "\n".join(lines) + "\n")
            fence = None
        else:
            lines.append(_dedented(inside, fence.indent))


def _opened(line: str) -> _Fence | None:
    match = OPENING.fullmatch(line)
    if match is None or (match["fence"][0] == "`" and "`" in match["info"]):  # code in a line of text
        return None
    num_quotes = match["before"].count(">")
    inside = match["before"].rpartition(">")[2]
    inside = inside.removeprefix(" ") if num_quotes else inside
    return _Fence(match["fence"], match["info"].strip(), num_quotes, len(inside.expandtabs(TAB)))


def _within_quotes(line: str, num_quotes: int) -> str | None:
    """The line after the marks of `num_quotes` block quotes; None when it has fewer."""
    start = 0
    for _ in range(num_quotes):
        mark = line.find(">", start)
        if mark < 0 or line[start:mark].strip():
            return None
        start = mark + 1
    return line[start:].removeprefix(" ") if num_quotes else line


def _closes(line: str, fence: _Fence) -> bool:
    match = CLOSING.fullmatch(line)
    if match is None or len(match["indent"].expandtabs(TAB)) > fence.indent + 3:
        return False
    return match["fence"].startswith(fence.mark)


def _dedented(line: str, indent: int) -> str:
    """The line without at most `indent` columns of white space at its start."""
    columns = end = 0
    while columns < indent and line[end : end + 1] in (" ", "\t"):
        columns += 1 if line[end] == " " else TAB - columns % TAB
        end += 1
    return " " * (columns - indent) + line[end:]
