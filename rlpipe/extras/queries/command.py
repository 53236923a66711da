"""`rlpipe sql`, behind its arguments."""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.extras.queries.lines import Format, answer_lines
from rlpipe.extras.queries.queries import Queries
from rlpipe.store.backend import Store


def answer(
    store: Store, query: str, runs: list[str], kind: Format, rows_max: int, say: Callable[[str], None]
) -> list[str]:
    """Says the answer of a query, line by line; `rows_max` bounds the rows of a table.

    Returns the faults of what was damaged in the store, and is not in the answer. UserError for a
    query or the name of a run that is wrong.
    """
    queries = Queries(store, runs)
    for line in answer_lines(queries.ask(query), kind, rows_max):
        say(line)
    return queries.faults
