"""Curves, as rlpipe/view/static/view.js draws them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.report.show import REWARD, SHOWN
from rlpipe.types import IterationRecord

FIRST = (
    REWARD,
    *SHOWN,
    "train/entropy",
    "train/proximal_kl",
    "train/mismatch_abs_mean",
)  # what is drawn where nothing is chosen
EVALUATION = "evaluation/"
DRAWN_MAX = 12  # of those: an evaluation has many metrics


@dataclass(frozen=True)
class Series:
    """One curve. A click on a point opens `link` followed by its x; empty: nothing is opened."""

    name: str
    x: list[int]
    y: list[float]
    link: str = ""


@dataclass(frozen=True)
class Plot:
    """Curves with the same axes."""

    title: str
    x_title: str
    series: list[Series]


def metric_names(runs: dict[str, list[IterationRecord]]) -> list[str]:
    """All metrics that the iterations have."""
    return sorted({name for records in runs.values() for record in records for name in record.metrics})


def chosen(names: list[str], wanted: list[str]) -> list[str]:
    """Those of the metrics that are wanted; without a wish those that people look at first."""
    if wanted:
        return [name for name in wanted if name in names]
    greedy = [name for name in names if name.startswith(EVALUATION) and name.endswith("_greedy")]
    return [name for name in [*FIRST[:2], *greedy, *FIRST[2:]] if name in names][:DRAWN_MAX]


def curve(name: str, points: Iterable[Sequence[Any]], link: str) -> Series:
    """The curve of points (x, y); those whose y is None are left out."""
    known = [(int(x), float(y)) for x, y in points if y is not None]
    return Series(name, [x for x, _ in known], [y for _, y in known], link)


def metric_plots(runs: dict[str, list[IterationRecord]], metrics: list[str]) -> list[Plot]:
    """A plot a metric, with a curve a run. What was evaluated stands at its weight version, the rest at its iteration."""
    plots = []
    for metric in metrics:
        evaluated = metric.startswith(EVALUATION)
        series = []
        for name, records in runs.items():
            points = (
                (record.weight_version if evaluated else record.iteration, record.metrics.get(metric)) for record in records
            )
            series.append(curve(name, points, f"/runs/{name}/" + ("evaluations?after=" if evaluated else "iterations/")))
        plots.append(Plot(metric, "weight version" if evaluated else "iteration", series))
    return plots
