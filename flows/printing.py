"""Prints for the commands: the only place where text goes to a terminal. Does not import
Prefect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import typer
from tqdm import tqdm

from rlpipe.base.printable import printable


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
