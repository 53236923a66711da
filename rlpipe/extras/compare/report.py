"""The report of `rlpipe compare`: two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import identity
from rlpipe.report.curves import evaluation_changes, evaluations
from rlpipe.report.show import NOTHING, flat_settings
from rlpipe.store.forks import forked_from
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run


@dataclass(frozen=True)
class CompareReport:
    """Two runs side by side: lists have an entry for each, None where that run has nothing.
    `settings`: those that differ; `metrics`: of the newest iteration, without those of evaluations
    and times; `evaluations`: by weight version.
    """

    runs: list[str]
    forked_from: list[str | None]
    iterations: list[int]
    settings: dict[str, list[Any]]
    metrics: dict[str, list[float | None]]
    evaluations: list[dict[int, Metrics]]

    def lines(self) -> list[str]:
        """A table with a column a run."""
        changes = [evaluation_changes([*evaluated.items()]) for evaluated in self.evaluations]
        numbers = {
            name: [None if value is None else f"{value:.6g}" for value in values]
            for name, values in self.metrics.items()
        }
        rows = [
            ["", *self.runs],
            *_rows("", {"forked from": self.forked_from, "iterations committed": self.iterations}),
            [],
            ["settings that differ"],
            *_rows("  ", self.settings),
            [],
            ["metrics of the newest iteration"],
            *_rows("  ", numbers),
            [],
            ["evaluation, before -> after RL"],
            *_rows("  ", _side_by_side(changes)),
        ]
        widths = [max(len(row[column]) for row in rows if len(row) > 1) for column in range(3)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def compare_report(first: Run, second: Run) -> CompareReport:
    """Two runs side by side."""
    runs = [first, second]
    settings = _side_by_side([flat_settings(identity(run.config)) for run in runs])
    counts = [Progress(run).num_iterations for run in runs]
    return CompareReport(
        runs=[run.name for run in runs],
        forked_from=[forked_from(run) if run.parent else None for run in runs],
        iterations=counts,
        settings={name: values for name, values in settings.items() if values[0] != values[1]},
        metrics=_side_by_side([_newest_metrics(run, count) for run, count in zip(runs, counts, strict=True)]),
        evaluations=[dict(evaluations(run, count)) for run, count in zip(runs, counts, strict=True)],
    )


def _rows(indent: str, values: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    return [
        [f"{indent}{name}", *(NOTHING if cell is None else str(cell) for cell in cells)]
        for name, cells in values.items()
    ]


def _side_by_side(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each name, a side each; None where a side has none."""
    return {name: [side.get(name) for side in sides] for name in sorted({name for side in sides for name in side})}


def _newest_metrics(run: Run, count: int) -> Metrics:
    """The newest metrics without the evaluation, which not every iteration has, and without
    times.
    """
    metrics = run.record(count - 1).metrics if count else {}
    return {name: value for name, value in metrics.items() if name.startswith(("rollout/", "train/", "spent/"))}
