"""A search for a person to read: the table of its candidates, their order, what one was forked
from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlpipe.extras.search.halving import Decision, Search


def ranked(search: Search, decided: Sequence[Decision]) -> list[str]:
    """All candidates so far: who came furthest first, then by the newest score."""

    def place(name: str) -> tuple[int, float]:
        came = [(number, one.scores[name]) for number, one in enumerate(decided) if name in one.scores]
        number, score = came[-1] if came else (-1, None)
        return -number, math.inf if score is None else -score

    return sorted(search.tried(decided), key=place)


def table(search: Search, decided: Sequence[Decision]) -> list[str]:
    """A table in Markdown: a line a candidate, a column a rung; who came furthest first. Below it
    what the winner was forked from.
    """
    rungs, tried = [f"after {rung}" for rung in search.rungs], search.tried(decided)
    lines = [f"| candidate | {' | '.join([*search.vary, *rungs])} | |"]
    lines.append("|---" * (len(search.vary) + len(rungs) + 2) + "|")
    for name in ranked(search, decided):
        values = [entry.partition("=")[2] for entry in tried[name].settings]
        scores = [_cell(name, decided, number) for number in range(len(rungs))]
        lines.append(f"| {name} | {' | '.join([*values, *scores])} | {_fate(search, name, decided)} |")
    is_over = len(decided) == len(search.rungs)
    return [*lines, "", f"The winner: {lineage(search, decided[-1].kept[0], decided)}"] if is_over else lines


def _cell(name: str, decided: Sequence[Decision], number: int) -> str:
    if number >= len(decided) or name not in decided[number].scores:
        return ""
    score = decided[number].scores[name]
    return "-" if score is None else f"{score:.3f}"


def _fate(search: Search, name: str, decided: Sequence[Decision]) -> str:
    if why := next((one.why[name] for one in decided if name in one.why), ""):
        return why
    if decided and name in decided[-1].kept:
        return "the winner" if len(decided) == len(search.rungs) else "goes on"
    made = decided[-1].forks.get(name) if decided else None
    return f"goes on, {made.origin}" if made else ""


def lineage(search: Search, name: str, decided: Sequence[Decision]) -> str:
    """A candidate with its settings, and the runs that it was forked from."""
    tried, steps = search.tried(decided), list[str]()
    while one := tried.get(name):
        steps.append(f"{name} ({', '.join(one.settings)}), {one.origin}")
        name = one.run
    return "; ".join(steps)
