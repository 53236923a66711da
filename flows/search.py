"""A search over forks of one run: the parent flow, whose subflows are the candidates.

Which forks, how far, and who goes on is the extra's (`rlpipe/extras/search`).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypedDict

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.states import Completed

from flows.printing import echo, echo_all
from flows.rl import rl
from flows.terminal import named_lines
from flows.ui import image, only_shown
from rlpipe.base.errors import StepRefused
from rlpipe.config.extras import COMMANDS, opened
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing


class SearchReport(TypedDict):
    """The result of a search: the run that won, or that is the best so far; its settings and what
    it was forked from; the budget that ended the search, or an empty text.
    """

    winner: str
    lineage: str
    stopped: str


@flow(name="search", flow_run_name="search {name}", persist_result=False)
async def search(
    name: str, run: str, at: int, vary: dict[str, list[str]], rungs: list[int], keep: float, by: str, store: str,
    explore: bool = False, together: int = 1,
) -> SearchReport:  # fmt: skip
    """The winner of a search over forks of a run.

    Args:
        name: The name of the search; the same name goes on after its last decision.
        run: The run whose forks are compared.
        at: The iteration up to which they share it.
        vary: Field -> the values to try; each combination is a candidate.
        rungs: Iterations after the shared one, at which candidates are compared.
        keep: The share of them that goes on after a comparison.
        by: The metric of evaluations by which, such as evaluation/words_pass_at_1; more is better.
        store: Where the run is.
        explore: True: those that lost go on as forks of a winner, with its settings disturbed.
        together: The number of candidates that are trained at once.
    """
    plan: Any = opened(COMMANDS["search --explore" if explore else "search"], "search")(
        name, run, at, vary, rungs, keep, by
    )
    parent = await asyncio.to_thread(lambda: open_existing(open_store(store), run))
    await asyncio.to_thread(plan.check, parent, together)
    course = await asyncio.to_thread(opened(COMMANDS["search in progress"], "search").begun, plan, parent)
    while not course.is_done:
        iterations = course.iterations
        await _train(course, together)
        await asyncio.to_thread(course.decide)
        await _show(course, f"search {name}, after {iterations} iterations, by {by}")
    winner, lineage = course.winner()
    report = SearchReport(winner=winner, lineage=lineage, stopped=course.over)
    if not course.over:
        return report
    return Completed(name="Stopped", message=course.over, data=report)  # pyright: ignore[reportReturnType]


async def _train(course: Any, together: int) -> None:
    """Trains the candidates of a rung, so many at once; the first fault of one ends the others."""
    free = asyncio.Semaphore(together)

    async def begin(name: str) -> None:
        async with free:
            with named_lines(name if together > 1 else ""):
                await _try(course, name)

    fault: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for name in course.entrants():
                group.create_task(begin(name))
    except BaseExceptionGroup as faults:
        fault = faults.exceptions[0]  # raised with its own cause, outside of the group
    if fault is not None:
        raise fault


async def _try(course: Any, name: str) -> None:
    """Trains a candidate up to the rung, and judges it."""
    config = await asyncio.to_thread(course.begin, name)
    if config is None:
        return
    try:
        await rl(config=config)
    except StepRefused as error:
        await asyncio.to_thread(course.refuse, name, error)
    else:
        await asyncio.to_thread(course.judge, name)


async def _show(course: Any, title: str) -> None:
    """Prints the table, and puts it on the page of the flow run, with curves."""
    lines = course.report()
    echo(f"\n{title}:")
    echo_all(lines)
    with only_shown():
        curves = await asyncio.to_thread(course.picture)
        key = re.sub("[^a-z0-9]+", "-", f"search-{course.search.name}".lower())
        markdown = [f"# {title}", "", *lines, "", image("png", curves)]
        if course.over:
            markdown[1:1] = ["", course.over]
        await acreate_markdown_artifact("\n".join(markdown), key=key)
