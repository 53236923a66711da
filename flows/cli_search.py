"""The command `rlpipe search`: a search over forks of a run."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_services import STORE, StoreUrl, checked_store
from flows.cli_start import STOPPED, Started, iteration_of, on_server
from flows.early_server import server_beside
from flows.printing import AsJson, beside_json, echo_report
from flows.server import set_defaults
from rlpipe.base.errors import UserError
from rlpipe.config.extras import COMMANDS, opened
from rlpipe.store.forks import way_to_resume
from rlpipe.store.opening import open_existing

if TYPE_CHECKING:
    from flows.search import SearchReport

COMMA = re.compile(r",(?![^\[{]*[\]}])")  # between two values, and not inside of a list or a table
Vary = Annotated[
    list[str],
    typer.Option("--vary", metavar="A.B=C,D", help="a field and the values to try; several: each combination"),
]
Rungs = Annotated[str, typer.Option(metavar="N,M", help="iterations after K at which candidates are compared")]
Keep = Annotated[float, typer.Option(help="the share of candidates that goes on after a comparison")]
By = Annotated[str, typer.Option(metavar="METRIC", help="of evaluations, such as evaluation/words_pass_at_1")]


def search_command(
    run: str,
    at: Annotated[str, typer.Option(metavar="K|sft", help="the newest iteration that all candidates share")],
    vary: Vary,
    by: By,
    rungs: Rungs = "5,10,20",
    keep: Keep = 0.5,
    name: Annotated[str | None, typer.Option(help="of the search, and of its forks; by default RUN-search")] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="those that lost go on as forks of a winner, with its settings disturbed")
    ] = False,
    together: Annotated[int, typer.Option(metavar="N", help="candidates that are trained at once")] = 1,
    as_json: AsJson = False,
    store: StoreUrl = STORE,
) -> None:
    """Find the best settings for a run by successive halving over its forks, or with --explore by
    population-based training.

    All are trained to the first rung, the better half to the second, and so on. The same command
    goes on with a search that was killed. It ends with 3 where the budget of RUN, for all forks
    together, is spent.
    """
    set_defaults()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    parent = open_existing(checked_store(store), run)
    numbers = [_whole(entry) for entry in rungs.split(",")]
    make: Any = opened(COMMANDS["search --explore" if explore else "search"], "search")
    plan = make(f"{run}-search" if name is None else name, run, iteration_of(at), varied(vary), numbers, keep, by)
    plan.check(parent, together)

    def load() -> Started[SearchReport]:
        from flows.search import search

        options = (numbers, keep, by, store, explore, together)
        return lambda: search(plan.name, run, plan.at, plan.vary, *options)

    config = parent.config.model_copy(update={"run": plan.name, "store": store})
    with beside_json(as_json), server_beside(config) as early:
        result, _ = on_server(config, early, load)
    winner = config.model_copy(update={"run": result["winner"]})
    more = f"{way_to_resume(winner)} --set rl.num_iterations=N"
    outcome = plan.outcome(parent.store, result["winner"], result["lineage"], result["stopped"], more)
    echo_report(outcome, as_json=as_json)
    if result["stopped"]:
        raise typer.Exit(STOPPED)


def varied(entries: list[str]) -> dict[str, list[str]]:
    """The fields and their values; UserError where one has none, or stands twice."""
    fields: dict[str, list[str]] = {}
    for entry in entries:
        field, equals, values = map(str.strip, entry.partition("="))
        if not (field and equals and values):
            raise UserError(f"--vary {entry}: write it as rl.learning_rate=1e-4,2e-4")
        if field in fields:
            raise UserError(f"--vary {entry}: {field} stands there twice; name all its values in one --vary")
        fields[field] = [value.strip() for value in COMMA.split(values)]
    return fields


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise UserError(f"--rungs {text!r}: name numbers of iterations, such as 5,10,20")
    return int(text)
