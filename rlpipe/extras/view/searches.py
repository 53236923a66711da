"""The page of a search (`rlpipe search`): its candidates, the decisions after each rung, the curves
of the metric by which they are compared. It reads the documents of the search in the store.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from starlette.datastructures import QueryParams

from rlpipe.base.errors import UserError
from rlpipe.extras.view.library import Library
from rlpipe.extras.view.pages import COMPARED_MAX, Page, Place
from rlpipe.extras.view.plots import curve, plot
from rlpipe.report.curves import EVALUATION, metric_points
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document
from rlpipe.store.run_record import record_key

DRAWN_MAX = 32  # curves of a search: of the candidates that came furthest


@dataclass(frozen=True)
class StoredSearch:
    """The content of searches/NAME/search.json."""

    name: str
    run: str
    at: int
    vary: dict[str, list[str]]
    rungs: list[int]
    keep: float
    by: str
    strategy: str = "halving"


@dataclass(frozen=True)
class StoredFork:
    """A candidate that a decision made."""

    run: str
    at: int
    settings: list[str]


@dataclass(frozen=True)
class StoredDecision:
    """The content of searches/NAME/rung-0.json, and so on."""

    iterations: int
    scores: dict[str, float | None]
    kept: list[str]
    why: dict[str, str]
    forks: dict[str, StoredFork] = field(default_factory=dict)


@dataclass(frozen=True)
class CandidateLine:
    """A candidate in the table of a search.

    `scores`: rung by rung, empty where it was not in one. `fate`: what was decided last. `rank`:
    who came furthest first, then by the newest score.
    """

    name: str
    values: list[str]
    scores: list[str]
    fate: str
    origin: str
    is_there: bool  # as a run
    rank: tuple[int, float]


def decisions(store: Store, search: StoredSearch) -> list[StoredDecision]:
    """What was decided so far, rung by rung."""
    keys = (f"searches/{search.name}/rung-{number}.json" for number in range(len(search.rungs)))
    return [read_document(store, key, StoredDecision) for key in itertools.takewhile(store.exists, keys)]


def candidate_lines(store: Store, search: StoredSearch, decided: list[StoredDecision]) -> list[CandidateLine]:
    """All candidates so far, who came furthest first."""
    chosen = [*itertools.product(*search.vary.values())]
    width = len(str(len(chosen) - 1))
    first = {f"{search.name}-{number:0{width}d}": [*values] for number, values in enumerate(chosen)}
    forks = {name: fork for decision in decided for name, fork in decision.forks.items()}
    values_of = first | {name: [entry.partition("=")[2] for entry in fork.settings] for name, fork in forks.items()}
    lines = []
    for name, values in values_of.items():
        scores = ["" if name not in one.scores else _text(one.scores[name]) for one in decided]
        came = [(number, one.scores[name]) for number, one in enumerate(decided) if name in one.scores]
        number, score = came[-1] if came else (-1, None)
        rank = -number, math.inf if score is None else -score
        fork = forks.get(name)
        origin = f"{fork.run} at {fork.at}" if fork else f"{search.run} at {'sft' if search.at < 0 else search.at}"
        is_there = store.exists(record_key(name))
        lines.append(CandidateLine(name, values, scores, _fate(name, search, decided), origin, is_there, rank))
    return sorted(lines, key=lambda line: line.rank)


def _text(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _fate(name: str, search: StoredSearch, decided: list[StoredDecision]) -> str:
    if why := next((one.why[name] for one in decided if name in one.why), ""):
        return why
    if not decided:
        return ""
    if name in decided[-1].kept:
        return "the winner" if len(decided) == len(search.rungs) else "goes on"
    return "goes on" if name in decided[-1].forks else "lost"


def candidates_page(library: Library, place: Place, _query: QueryParams) -> Page:
    """A search: its candidates with their scores, and the curves of those that came furthest."""
    store, name = library.store, place["search"]
    if not store.exists(f"searches/{name}/search.json"):
        known = ", ".join(store.folders("searches")) or "none"
        raise UserError(f"no search {name[:80]!r} in {store.url} (searches: {known})")
    search = read_document(store, f"searches/{name}/search.json", StoredSearch)
    decided = decisions(store, search)
    lines = candidate_lines(store, search, decided)
    ends, metric, series = [search.at + 1 + rung for rung in search.rungs], search.by.removeprefix(EVALUATION), []
    for line in [line for line in lines if line.is_there][:DRAWN_MAX]:
        run = library.run(line.name)
        first = run.fork_at + 1
        points = metric_points(run, metric, [first, *(end for end in ends if end > first)])
        series.append(curve(line.name, points, f"/runs/{line.name}/evaluations?after="))
    values = {
        "search": search,
        "lines": lines,
        "decided": decided,
        "compared": [line.name for line in lines if line.is_there][:COMPARED_MAX],
        "num_drawn": len(series),
        "plots": [plot(search.by, "weight version", series)] if series else [],
    }
    return Page("candidates.html", values)
