"""The pages over runs: the values of their templates, from the parameters in the address.

Writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from starlette.datastructures import QueryParams

from rlpipe.algorithms.answers import STDERR
from rlpipe.base.errors import UserError
from rlpipe.base.manifests import IterationRecord
from rlpipe.config.pipeline import identity
from rlpipe.extras.view.groups import ShownRollout, evaluation_groups, scored_files
from rlpipe.extras.view.library import Library
from rlpipe.extras.view.plots import chosen, curve, metric_names, metric_plots, plot
from rlpipe.records.prompt import Messages
from rlpipe.report.curves import evaluated_versions
from rlpipe.report.show import NOTHING, flat_settings, run_summary, runs_report
from rlpipe.store.run import BEFORE_SFT

COMPARED_MAX = 8
ROWS = 100  # of a table on one page
DROPPED = "rollout/groups_dropped_"
SHOWS = ("all", "better", "worse", "changed")


@dataclass(frozen=True)
class Page:
    """A template and its values."""

    template: str
    values: Mapping[str, Any]


Place = Mapping[str, Any]  # the parameters of an address: run, kind and number as texts, group, rollout


class TablePart(TypedDict):
    """The rows of one page of a table. `before`, `after`: the first rows of the pages beside it."""

    rows: list[Any]
    total: int
    first: int
    before: int | None
    after: int | None


def number_of(query: QueryParams, name: str, default: int, least: int = 0) -> int:
    """An integer in the address; UserError for other text."""
    text = query.get(name) or str(default)
    if not text.removeprefix("-").isdecimal() or len(text) > 9 or int(text) < least:
        raise UserError(f"{name}={text[:40]!r}: a whole number from {least} on, please")
    return int(text)


def choice(query: QueryParams, name: str, choices: tuple[str, ...]) -> str:
    """One of the choices, by default the first; UserError for another."""
    value = query.get(name) or choices[0]
    if value not in choices:
        raise UserError(f"{name}={value[:40]!r}: choose {', '.join(choices)}")
    return value


def part_of(rows: list[Any], query: QueryParams) -> TablePart:
    """The rows of one page of a table, and the first rows of the previous and the next page."""
    first = min(number_of(query, "first", 0), max(len(rows) - 1, 0))
    before, after = max(first - ROWS, 0) if first else None, first + ROWS if first + ROWS < len(rows) else None
    return {"rows": rows[first : first + ROWS], "total": len(rows), "first": first, "before": before, "after": after}


def runs_page(library: Library, _place: Place, _query: QueryParams) -> Page:
    """All runs, the most recently active first, and all searches.

    The record of a run's newest iteration has its curve, so no other is read.
    """
    report = runs_report(library.store)
    known = sorted(report.runs, key=lambda run: run.ended_at.timestamp() if run.ended_at else 0.0, reverse=True)
    return Page(
        "runs.html", {"summaries": known, "unread": report.unread, "searches": library.store.folders("searches")}
    )


def compare_page(library: Library, _place: Place, query: QueryParams) -> Page:
    """Some runs side by side: curves, final metrics, the settings in which they differ."""
    names = list(dict.fromkeys(query.getlist("run")))
    if not 0 < len(names) <= COMPARED_MAX:
        raise UserError(f"compare: choose 1 to {COMPARED_MAX} runs, not {len(names)}: /compare?run=a&run=b")
    runs = {name: library.run(name) for name in names}
    curves = {name: library.curves(run) for name, run in runs.items()}
    metrics = metric_names(curves)
    shown = chosen(metrics, query.getlist("metric"))
    settings = {name: flat_settings(identity(run.config)) for name, run in runs.items()}
    fields = sorted({field for own in settings.values() for field in own})
    rows = [(field, [str(own.get(field, NOTHING)) for own in settings.values()]) for field in fields]
    values = {
        "names": names,
        "metrics": metrics,
        "chosen": shown,
        "plots": metric_plots(curves, shown),
        "newest": [
            (metric, [own[metric][-1][1] if metric in own else None for own in curves.values()]) for metric in shown
        ],
        "settings": [row for row in rows if len(set(row[1])) > 1],
    }
    return Page("compare.html", values)


def run_page(library: Library, place: Place, query: QueryParams) -> Page:
    """A run: curves and iterations, the newest first."""
    run = library.run(place["run"])
    records = library.records(run)
    curves = {run.name: library.curves(run)}
    metrics = metric_names(curves)
    shown = chosen(metrics, query.getlist("metric"))
    values = {
        "run": run,
        "summary": run_summary(run),
        "metrics": metrics,
        "chosen": shown,
        "plots": metric_plots(curves, shown),
        "table": part_of(records[::-1], query),
        "is_evaluated": any(record.evaluation for record in records) or next(evaluated_versions(run), None) is not None,
        "under_way": len(records) if scored_files(run, len(records)) else None,
        "settings": flat_settings(identity(run.config)),
    }
    return Page("run.html", values)


def dropped_of(record: IterationRecord) -> str:
    """The number of dropped groups for each reason. Example: zero_std 12, surplus 3."""
    counts = {
        name.removeprefix(DROPPED): count
        for name, count in record.metrics.items()
        if name.startswith(DROPPED) and count
    }
    return ", ".join(f"{reason} {count:g}" for reason, count in sorted(counts.items(), key=lambda entry: -entry[1]))


class AnswerPair(NamedTuple):
    """The greedy completions of two weight versions to one prompt."""

    before: ShownRollout
    after: ShownRollout
    turns_before: Messages | None = None  # where there are several
    turns_after: Messages | None = None

    @property
    def changes(self) -> set[str]:
        """better or worse, by the rewards; changed where the texts differ."""
        text = {"changed"} if self.before.completion != self.after.completion else set()
        before, after = self.before.reward or 0.0, self.after.reward or 0.0
        return text | ({"better"} if after > before else {"worse"} if after < before else set())


def evaluations_page(library: Library, place: Place, query: QueryParams) -> Page:
    """The evaluations of a run, and the answers of two of its weight versions to the same
    prompts.
    """
    run = library.run(place["run"])
    evaluated = dict(evaluated_versions(run))
    if not evaluated:
        raise UserError(f"run {run.name} has no evaluation yet; rlpipe evaluate {run.name} makes one")
    versions, show = list(evaluated), choice(query, "show", SHOWS)
    before, after = (number_of(query, name, versions[at], BEFORE_SFT) for name, at in (("before", 0), ("after", -1)))
    files_before, files_after = evaluation_groups(library, run, before), evaluation_groups(library, run, after)
    earlier = {row.prompt_id: row for row in files_before.greedy()}
    pairs = [AnswerPair(earlier[row.prompt_id], row) for row in files_after.greedy() if row.prompt_id in earlier]
    names = sorted({name for made in evaluated.values() for name in made.metrics if not name.endswith(STDERR)})
    curves = {
        name: curve(
            run.name,
            [(version, made.metrics.get(name)) for version, made in evaluated.items()],
            f"{place['path']}?after=",
        )
        for name in names
        if name.endswith("_greedy")
    }
    table = part_of([pair for pair in pairs if show == "all" or show in pair.changes], query)
    table["rows"] = [
        pair._replace(turns_before=files_before.turns_of(pair.before), turns_after=files_after.turns_of(pair.after))
        for pair in table["rows"]
    ]
    values = {
        "run": run,
        "evaluated": evaluated,
        "names": names,
        "before": before,
        "after": after,
        "show": show,
        "counts": {name: sum(name in pair.changes for pair in pairs) for name in SHOWS[1:]},
        "table": table,
        "plots": [plot(name, "weight version", [series]) for name, series in curves.items()],
    }
    return Page("evaluations.html", values)
