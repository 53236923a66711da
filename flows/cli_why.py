"""`rlpipe why`."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli_services import STORE, StoreUrl, readable_store
from rlpipe.store.run import open_existing

NOTHING_NAMED = 4  # the exit code where no cause was found
AtIteration = Annotated[
    int | None,
    typer.Option(metavar="K", help="the iteration from which something is different; without: the one where most changes"),
]


def why(run: str, at: AtIteration = None, store: StoreUrl = STORE) -> None:
    """What changed around an iteration, ranked by how much of the reward's change it explains; exit code 4 when no cause is found."""
    from rlpipe.report.around import History
    from rlpipe.report.why import why as judged
    from rlpipe.report.why import why_lines

    verdict = judged(History(open_existing(readable_store(store), run)), at)
    for line in why_lines(verdict):
        typer.echo(line)
    if not verdict.findings:
        raise typer.Exit(NOTHING_NAMED)
