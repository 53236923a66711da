"""A search over forks of one run: the parent flow, whose subflows are the candidates.

Which forks, how far, and who goes on is the extra's (`rlpipe/extras/search`).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact

from flows.printing import echo, echo_all
from flows.rl import rl
from flows.ui import only_shown
from rlpipe.base.errors import StepRefused
from rlpipe.config.extras import COMMANDS, opened
from rlpipe.store.backend import open_store
from rlpipe.store.opening import fork, open_existing
from rlpipe.store.run import Run


@flow(name="search", flow_run_name="search {name}", persist_result=False)
async def search(
    name: str, run: str, at: int, vary: dict[str, list[str]], rungs: list[int], keep: float, by: str, store: str
) -> str:
    """The winner of successive halving over forks of a run.

    Args:
        name: The name of the search; the same name goes on after its last decision.
        run: The run whose forks are compared.
        at: The iteration up to which they share it.
        vary: Field -> the values to try; each combination is a candidate.
        rungs: Iterations after the shared one, at which candidates are compared.
        keep: The share of them that goes on after a comparison.
        by: The metric of evaluations by which, such as evaluation/words_pass_at_1; more is better.
        store: Where the run is.
    """
    plan: Any = opened(COMMANDS["search"], "search")(name, run, at, vary, rungs, keep, by)
    parent = await asyncio.to_thread(lambda: open_existing(open_store(store), run))
    await asyncio.to_thread(plan.check, parent)
    await asyncio.to_thread(plan.begin, parent.store)
    decided = await asyncio.to_thread(lambda: list(plan.decided(parent.store)))
    for number in range(len(decided), len(rungs)):
        scores, why = dict[str, float | None](), dict[str, str]()
        for candidate in plan.candidates:
            if not decided or candidate in decided[-1].kept:
                scores[candidate] = await _scored(plan, parent, candidate, rungs[number], why)
        decided.append(await asyncio.to_thread(plan.decide, parent.store, number, scores, why))
        await _show(name, f"after {rungs[number]} iterations, by {by}", plan.report(decided))
    return decided[-1].kept[0]


async def _scored(plan: Any, parent: Run, candidate: str, iterations: int, why: dict[str, str]) -> float | None:
    """Trains a candidate so far, and returns its score; None where a step would damage its policy,
    or a rule or budget ended it before, with the reason in `why`.
    """
    config = await asyncio.to_thread(plan.config, parent, candidate, iterations)
    await asyncio.to_thread(fork, parent, plan.at, config)
    try:
        await rl(config=config)
    except StepRefused as error:
        why[candidate] = str(error).splitlines()[0][:200]
        return None
    if reason := await asyncio.to_thread(plan.stopped, parent.store, candidate, iterations):
        why[candidate] = reason
        return None
    return await asyncio.to_thread(plan.score, parent.store, candidate, iterations)


async def _show(name: str, when: str, lines: list[str]) -> None:
    """Prints the table, and puts it on the page of the flow run."""
    echo(f"\nsearch {name}, {when}:")
    echo_all(lines)
    with only_shown():
        key = re.sub("[^a-z0-9]+", "-", f"search-{name}".lower())
        await acreate_markdown_artifact("\n".join([f"# search {name}, {when}", "", *lines]), key=key)
