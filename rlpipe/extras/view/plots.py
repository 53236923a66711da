"""Curves, as rlpipe/extras/view/static/view.js draws them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.extras.view.library import RunCurves
from rlpipe.report.curves import SFT_LOSS, SFT_VALIDATION
from rlpipe.report.show import REWARD, SHOWN

# what is drawn where nothing is chosen
FIRST = (REWARD, *SHOWN, "train/entropy", "train/proximal_kl", "train/mismatch_abs_mean")
EVALUATION, SFT = "evaluation/", "sft/"
DRAWN_MAX = 12  # of those: an evaluation has many metrics
POINTS_MAX = 1000  # of a curve: an SFT has thousands of steps
Range = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve. A click on a point opens `link` followed by its x; empty: no link."""

    name: str
    x: list[int]
    y: list[float]
    link: str = ""


@dataclass(frozen=True)
class Plot:
    """Curves with the same axes. A range is None where the points themselves give one."""

    title: str
    x_title: str
    series: list[Series]
    x_range: Range | None
    y_range: Range | None


def plot(title: str, x_title: str, series: list[Series]) -> Plot:
    """A plot, with ranges for the axes along which all points are the same: one point, or a flat
    line.
    """
    x, y = {value for curve in series for value in curve.x}, {value for curve in series for value in curve.y}
    return Plot(title, x_title, series, _around(*x) if len(x) == 1 else None, _from_zero(*y) if len(y) == 1 else None)


def _around(x: float) -> Range:
    """The axis range of a single integer."""
    return x - 0.5, x + 0.5


def _from_zero(y: float) -> Range:
    """The axis range of one value, which shows its distance from 0; up to 1 where it is 0."""
    low, high = min(0.0, 1.25 * y), max(0.0, 1.25 * y)
    return (low, high) if y else (-0.05, 1.0)


def metric_names(runs: dict[str, RunCurves]) -> list[str]:
    """All metrics that the runs have."""
    return sorted({name for curves in runs.values() for name in curves})


def chosen(names: list[str], wanted: list[str]) -> list[str]:
    """The wanted metrics that exist; when none does, those that people look at first."""
    if wanted:
        return [name for name in wanted if name in names]
    greedy = [name for name in names if name.startswith(EVALUATION) and name.endswith("_greedy")]
    return [name for name in [*FIRST[:2], *greedy, SFT_LOSS, *FIRST[2:]] if name in names][:DRAWN_MAX]


def curve(name: str, points: Iterable[Sequence[Any]], link: str) -> Series:
    """The curve of points (x, y), at most POINTS_MAX of them and the last; those whose y is None
    are left out.
    """
    known = [(int(x), float(y)) for x, y in points if y is not None]
    known = known[: -1 : -(-len(known) // POINTS_MAX) or 1] + known[-1:]
    return Series(name, [x for x, _ in known], [y for _, y in known], link)


def metric_plots(runs: dict[str, RunCurves], metrics: list[str]) -> list[Plot]:
    """A plot a metric, with a curve a run: evaluations over weight versions, SFT over its steps,
    other metrics over iterations.

    The validation loss is beside the loss of SFT.
    """
    plots = []
    for metric in metrics:
        x_title, page = _axis(metric)
        series = [curve(name, curves.get(metric, []), page and f"/runs/{name}/{page}") for name, curves in runs.items()]
        if metric == SFT_LOSS:
            validated = {name: curves[SFT_VALIDATION] for name, curves in runs.items() if SFT_VALIDATION in curves}
            series += [curve(f"{name}, validation", points, "") for name, points in validated.items()]
        plots.append(plot(metric, x_title, series))
    return plots


def _axis(metric: str) -> tuple[str, str]:
    """The name of the axis that a metric is drawn over, and the page that a click on a point opens,
    below that of the run; empty: none."""
    if metric.startswith(EVALUATION):
        return "weight version", "evaluations?after="
    return ("SFT step", "") if metric.startswith(SFT) else ("iteration", "iterations/")
