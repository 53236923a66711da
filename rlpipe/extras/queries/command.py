"""The command `rlpipe sql`, without the parsing of its arguments."""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.extras.queries.lines import Format, answer_lines
from rlpipe.extras.queries.queries import Queries
from rlpipe.store.backend import Store


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
