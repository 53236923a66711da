"""The command `rlpipe sql`, without the parsing of its arguments: the answer of a query as lines of
text, a table for a terminal, CSV, or JSON.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import chain, islice
from typing import Any, Literal

from rlpipe.base.printable import printable
from rlpipe.base.values import plain_json
from rlpipe.extras.queries.queries import Answer, Queries
from rlpipe.store.backend import Store

Format = Literal["table", "csv", "json"]
CELL_CHARS_MAX = 60
NOTHING = "-"


def answer(
    store: Store, query: str, runs: list[str], kind: Format, rows_max: int, say: Callable[[str], None]
) -> list[str]:
    """Prints the answer of a query by `say`, line by line; `rows_max` bounds the rows of a table.

    Returns the faults of damaged files in the store, which are not in the answer. UserError for a
    faulty query or the name of a run that does not exist.
    """
    queries = Queries(store, runs)
    for line in answer_lines(queries.ask(query), kind, rows_max):
        say(line)
    return queries.faults


def answer_lines(answer: Answer, kind: Format, rows_max: int) -> Iterator[str]:
    """The lines of an answer.

    A table has at most `rows_max` rows, with long cells cut; CSV and JSON (an object a line) have
    all of it.
    """
    return {"table": lambda: _table(answer, rows_max), "csv": lambda: _csv(answer), "json": lambda: _json(answer)}[
        kind
    ]()


def _table(answer: Answer, rows_max: int) -> Iterator[str]:
    rows, columns = list(islice(answer.rows, rows_max + 1)), [printable(name) for name in answer.columns]
    cells = [[_cell(value) for value in row] for row in rows[:rows_max]]
    right = [
        all(isinstance(row[index], int | float | Decimal | None) for row in rows)
        for index in range(len(answer.columns))
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, ["-" * width for width in widths], *cells):
        yield "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
    if len(rows) > rows_max:
        yield f"the first {rows_max} rows; --rows shows more, --format csv or json all"


def _cell(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else _text(value)
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * CELL_CHARS_MAX]).split())
    return text if len(text) <= CELL_CHARS_MAX else f"{text[: CELL_CHARS_MAX - 1]}…"


def _csv(answer: Answer) -> Iterator[str]:
    """The lines as CSV. None is an empty field; lists, maps and structs are JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="")
    for row in chain([answer.columns], answer.rows):
        text.seek(0)
        text.truncate()
        writer.writerow(
            [value if value is None or isinstance(value, str | int | float) else _text(value) for value in row]
        )
        yield text.getvalue()


def _json(answer: Answer) -> Iterator[str]:
    for row in answer.rows:
        line = json.dumps(values := dict(zip(answer.columns, map(_plain, row), strict=True)), ensure_ascii=False)
        yield line if printable(line) == line else json.dumps(values).replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    """A value as JSON has it: a decimal becomes a number."""
    return float(value) if isinstance(value, Decimal) else plain_json(value)


def _text(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False) if isinstance(value, list | dict | tuple) else str(value)
