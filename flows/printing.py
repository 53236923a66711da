"""Prints for the commands: the only place where text goes to a terminal. Does not import
Prefect.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, NoReturn, Protocol

import typer
from tqdm import tqdm

from rlpipe.base.printable import printable
from rlpipe.base.values import plain_json

AsJson = Annotated[bool, typer.Option("--json", help="the report as one JSON document")]


class Report(Protocol):
    """What a command reports: a dataclass, whose fields are its JSON document."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def lines(self) -> Iterable[str]:
        """The report for people."""
        ...


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines; with `err` on stderr."""
    for line in lines:
        typer.echo(printable(line), err=err)


def echo_part(text: str, *, end: str = "\n") -> None:
    """Prints a text and `end`, at once."""
    typer.echo(printable(text) + end, nl=False)


def echo_all(lines: Iterable[str]) -> None:
    """Prints lines as they come."""
    for line in lines:
        echo(line)


def echo_report(report: Report, *, as_json: bool) -> None:
    """Prints a report: its lines, or its fields as one JSON document in ASCII, in which a number
    that JSON does not have (nan, an infinity) is null.
    """
    if as_json:
        echo(json.dumps(plain_json(asdict(report))).replace("\x7f", r"\u007f"))
    else:
        echo_all(report.lines())


def beside_json(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Sends what is printed inside to stderr, where a JSON document is to be all of stdout."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def echo_above(line: str) -> None:
    """Prints a line above the bars that are there."""
    tqdm.write(printable(line))


def first_text(error: BaseException) -> str:
    """The type and text of an error in one line, at most 300 characters; of a group, those of its
    first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def fail(error: Exception, code: int) -> NoReturn:
    """Prints the error and ends with `code`: 2 for the user's fault, 1 for other failures."""
    echo(f"rlpipe: {error}", err=True)
    raise typer.Exit(code)
