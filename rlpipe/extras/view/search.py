"""Searches through the iterations of runs, the newest first and for a bounded time: for a text, and
for a prompt.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

import pyarrow.compute as pc

from rlpipe.base.errors import StoreError
from rlpipe.extras.view.groups import ShownRollout, evaluation_groups, scored_files
from rlpipe.extras.view.library import READERS, AskedInGroup, Library, rows_with
from rlpipe.records.kinds import Int32, OptionalFloat, Text
from rlpipe.report.curves import evaluated_versions
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run

SECONDS_MAX = 4.0
HITS_MAX = 100
SEARCHED = ("completion", "prompt", "prompt_id")
CONTEXT = 80  # characters before and after a match
Result = TypeVar("Result")


@dataclass(frozen=True)
class SearchedRollout:
    """The columns of a rollout that are searched."""

    prompt_id: Text
    group_index: Int32
    rollout_index: Int32
    prompt: Text
    completion: Text
    reward: OptionalFloat = None


class Hit(NamedTuple):
    """A rollout with the text: the column that has it, and the text before the match, the match,
    and the text after it.
    """

    run: str
    iteration: int
    rollout: SearchedRollout
    column: str
    parts: tuple[str, str, str]


@dataclass
class Looked(Generic[Result]):
    """The results of a search. `rest`: the place to go on; None when all was searched. `faults`:
    errors of files that could not be read.
    """

    results: list[Result] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_iterations: int = 0
    rest: tuple[str, int] | None = None


def newest_first(run: Run, start: int | None = None) -> list[tuple[Run, int]]:
    """The iterations of a run from `start` down to 0; without `start`, from the one in progress."""
    newest = Progress(run).num_iterations
    return [(run, iteration) for iteration in range(newest if start is None else min(start, newest), -1, -1)]


def look_through(places: list[tuple[Run, int]], visit: Callable[[Run, int], list[Result]]) -> Looked[Result]:
    """The results of `visit` for runs' iterations in turn, until there are HITS_MAX or SECONDS_MAX
    are over."""
    looked, deadline = Looked[Result](), time.monotonic() + SECONDS_MAX

    def guarded(place: tuple[Run, int]) -> list[Result]:
        try:
            return visit(*place)
        except StoreError as error:
            looked.faults.append(str(error))
            return []

    with ThreadPoolExecutor(READERS, "looking") as threads:
        for first in range(0, len(places), READERS):
            some = places[first : first + READERS]
            for (run, iteration), results in zip(some, threads.map(guarded, some), strict=True):
                if len(looked.results) >= HITS_MAX or (first and time.monotonic() > deadline):
                    looked.rest = run.name, iteration
                    return looked
                looked.results += results
                looked.num_iterations += 1
    return looked


def search(library: Library, places: list[tuple[Run, int]], text: str) -> Looked[Hit]:
    """The rollouts of scored iterations whose completion, prompt or prompt id has the text,
    ignoring case.
    """
    pattern, options = re.compile(re.escape(text), re.IGNORECASE), pc.MatchSubstringOptions(text, ignore_case=True)

    def visit(run: Run, iteration: int) -> list[Hit]:
        hits = []
        for file in scored_files(run, iteration):
            table = library.read(file, SearchedRollout)
            matches = (pc.call_function("match_substring", [table[column]], options) for column in SEARCHED)
            selected = reduce(lambda first, second: pc.call_function("or", [first, second]), matches)
            rows = library.parsed(file, table.filter(selected).slice(0, HITS_MAX), SearchedRollout)
            hits += [_hit(run.name, iteration, rollout, pattern) for rollout in rows]
        return hits

    return look_through(places, visit)


def _hit(run: str, iteration: int, rollout: SearchedRollout, pattern: re.Pattern[str]) -> Hit:
    found_in = (
        (column, text, match.span())
        for column in SEARCHED
        if (match := pattern.search(text := getattr(rollout, column)))
    )
    # none: capitals that only one of the two knows
    column, text, (start, end) = next(found_in, ("completion", rollout.completion, (0, 0)))
    return Hit(
        run,
        iteration,
        rollout,
        column,
        (text[max(start - CONTEXT, 0) : start], text[start:end], text[end : end + CONTEXT]),
    )


class Answers(NamedTuple):
    """The rollouts of a prompt in one iteration, or in the evaluation of one weight version."""

    number: int
    rollouts: list[ShownRollout]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def best(self) -> ShownRollout:
        """The rollout with the highest reward, the first of several."""
        return max(self.rollouts, key=lambda rollout: -math.inf if rollout.reward is None else rollout.reward)


def prompt_in_iterations(library: Library, places: list[tuple[Run, int]], prompt_id: str) -> Looked[Answers]:
    """The rollouts of a prompt, iteration by iteration."""

    def visit(run: Run, iteration: int) -> list[Answers]:
        rollouts = list[ShownRollout]()
        for file in scored_files(run, iteration):
            table = library.table(file, AskedInGroup)
            for group in rows_with(table, "prompt_id", prompt_id)["group_index"].unique().to_pylist():
                rollouts += library.rows(file, ShownRollout, group)
        return [Answers(iteration, rollouts)] if rollouts else []

    return look_through(places, visit)


def prompt_in_evaluations(library: Library, run: Run, prompt_id: str) -> list[Answers]:
    """The rollouts of a prompt of an evaluation set, by weight version, the newest first."""
    answers = []
    for version, _ in evaluated_versions(run):
        rows = (
            row for file in evaluation_groups(library, run, version).scores for row in library.rows(file, ShownRollout)
        )
        if rollouts := sorted((row for row in rows if row.prompt_id == prompt_id), key=lambda row: row.rollout_index):
            answers.append(Answers(version, rollouts))
    return answers[::-1]
