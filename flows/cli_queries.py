"""`rlpipe sql`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flows.cli_services import STORE, StoreUrl, readable_store
from flows.printing import echo
from rlpipe.base.errors import StoreError

Query = Annotated[
    str, typer.Argument(metavar="QUERY", help="one SELECT, in DuckDB's SQL; `describe rollouts` lists the columns")
]
Runs = Annotated[
    list[str] | None, typer.Option("--run", metavar="NAME", help="only this run; may be given several times")
]


def sql(
    query: Query,
    run: Runs = None,
    kind: Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="json: an object a line")] = "table",
    rows: Annotated[int, typer.Option(min=1, help="rows of a table that are shown")] = 100,
    store: StoreUrl = STORE,
) -> None:
    """Ask the runs of a store in SQL. Views: runs, iterations, prompts, rollouts, scores,
    evaluations, evaluation_rollouts, artifacts."""
    from rlpipe.report.queries import Queries  # DuckDB takes a moment to import
    from rlpipe.report.query_lines import answer_lines

    queries = Queries(readable_store(store), run or [])
    for line in answer_lines(queries.ask(query), kind, rows):
        echo(line)
    for fault in queries.faults:
        echo(f"FAULT {fault}", err=True)
    if queries.faults:
        raise StoreError(
            f"the answer is without what is damaged: {len(queries.faults)} faults; --run leaves other runs out"
        )
