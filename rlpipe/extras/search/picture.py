"""The picture of a search: the metric of its candidates over weight versions."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

LABELLED_MAX = 10  # curves with a colour and a name: those that came furthest
Points = list[tuple[int, float]]


def draw_candidates(curves: Mapping[str, Points], rungs: list[int], metric: str) -> bytes:
    """A PNG with a curve a candidate, those first that came furthest, and a line at each rung."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for rung in rungs:
        axes.axvline(rung, linestyle=":", color="#999999", linewidth=1)
    for number, (name, points) in reversed([*enumerate(curves.items())]):
        if not points:
            continue
        x, y = [version for version, _ in points], [value for _, value in points]
        if number < LABELLED_MAX:
            axes.plot(x, y, marker="o", color=f"C{number}", label=name)
        else:
            axes.plot(x, y, marker=".", color="#bbbbbb")
    axes.set_xlabel("weight version")
    axes.set_ylabel(metric)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[::-1], labels[::-1], fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, dpi=100)
    return data.getvalue()
