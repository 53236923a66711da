"""What a person looks at: the curves of a run as a PNG, the reward so far as a small SVG, and the summary at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlpipe.store.run import Run
from rlpipe.types import JsonDict

STAGES = ("sample_prompts", "generate", "score", "filter", "train", "checkpoint", "reload_engines", "evaluate", "orchestration")
PASS_AT = re.compile(r"(.*)_pass_at_(\d+)")
DRAWN = re.compile(r"_(greedy|maj_at_\d+|format_rate)$")


@dataclass(frozen=True)
class Point:
    """Metrics at one step. `time_ms` is when they were committed: logging a point twice is logging the same point."""

    step: int
    time_ms: int
    metrics: JsonDict


def sft_points(run: Run, segment: int) -> list[Point]:
    """One committed SFT segment: the loss of every step, the rest once."""
    _, manifest = run.committed("sft", segment, "policy")
    first, time_ms = segment * run.config.sft.segment_steps, _milliseconds(manifest.ended_at)
    points = [Point(first + offset, time_ms, {"sft/loss": loss}) for offset, loss in enumerate(manifest.metrics["losses"])]
    rest = {name.replace("train/", "sft/"): value for name, value in manifest.metrics.items() if name.startswith("train/")}
    del rest["sft/loss"]
    return [*points, Point(points[-1].step, time_ms, rest)]


def rl_points(run: Run, iteration: int) -> list[Point]:
    """One committed iteration."""
    record = run.iteration_record(iteration)
    assert record is not None, f"iteration {iteration} is not committed"
    return [Point(iteration, _milliseconds(record["ended_at"]), record["metrics"])]


def fetch_points(run: Run, phase: str, unit: int) -> list[Point]:
    return sft_points(run, unit) if phase == "sft" else rl_points(run, unit)


def _milliseconds(moment: str) -> int:
    return int(datetime.fromisoformat(moment).timestamp() * 1000)


def evaluations(run: Run, num_iterations: int) -> list[tuple[int, JsonDict]]:
    """[(weight version, metrics)] of every evaluation, the one at the start of RL first."""
    if not run.sft_complete:
        return []
    segment, _ = run.sft_result()
    start = run.artifact("sft", segment, "evaluation") if segment >= 0 else run.artifact("base", 0, "evaluation")
    found: list[tuple[int, JsonDict]] = [(0, start[1].metrics)] if start else []
    for iteration in range(num_iterations):
        record = run.iteration_record(iteration)
        told = {} if record is None else record["metrics"]
        values = {name.removeprefix("evaluation/"): value for name, value in told.items() if name.startswith("evaluation/")}
        if values:
            found.append((iteration + 1, values))
    return found


def draw_curves(run: Run, num_iterations: int, path: Path) -> None:
    """A PNG of reward, evaluation, length, KL and time per stage over the iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [rl_points(run, iteration)[0].metrics for iteration in range(num_iterations)]
    figure = Figure(figsize=(15, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    _draw_losses(axes[0], run)
    environment = sorted({name for record in records for name in record if name.startswith("rollout/environment_")})
    for axis, title, names in (
        (axes[1], "reward of rollouts", ("rollout/reward_mean", "rollout/pass_rate", *environment)),
        (axes[3], "completion length, tokens", ("rollout/length_tokens_mean",)),
        (axes[4], "KL of the step (and to the reference)", ("train/proximal_kl", "train/kl")),
    ):
        for name in names:
            axis.plot([record.get(name, float("nan")) for record in records], label=name)
        _finish_axis(axis, title, "RL iteration")
    _draw_evaluations(axes[2], evaluations(run, num_iterations))
    seconds = [[record.get(f"time/{verb}_s", 0.0) for record in records] for verb in STAGES]
    axes[5].stackplot(range(num_iterations), seconds, labels=STAGES)
    _finish_axis(axes[5], "seconds per stage", "RL iteration")
    figure.suptitle(f"rlpipe run {run.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _draw_losses(axis: Any, run: Run) -> None:
    chosen, trained = run.sft_result()
    segments = [sft_points(run, segment) for segment in range(trained)]
    points = [point for segment in segments for point in segment[:-1]]
    axis.plot([point.step for point in points], [point.metrics["sft/loss"] for point in points], label="sft/loss")
    name = "sft/validation_loss"
    validated = [(segment[-1].step, segment[-1].metrics[name]) for segment in segments if name in segment[-1].metrics]
    if validated:
        axis.plot(*zip(*validated, strict=True), marker="o", label=name)
        axis.axvline(validated[chosen][0], linestyle=":", label="the result")
    _finish_axis(axis, "SFT loss", "SFT step", legend=bool(validated))


def _draw_evaluations(axis: Any, found: list[tuple[int, JsonDict]]) -> None:
    names = _drawn({name for _, values in found for name in values})
    for name in names:
        told = [(version, values[name]) for version, values in found if name in values]
        axis.plot(*zip(*told, strict=True), marker="o", label=name)
    _finish_axis(axis, "held-out prompts", "weight version", legend=bool(names))


def _drawn(names: set[str]) -> list[str]:
    """What is drawn of the evaluation: of pass@k the first and the last k, so that a set has a few lines and not ten."""
    sets: dict[str, list[int]] = {}
    for name in names:
        if found := PASS_AT.fullmatch(name):
            sets.setdefault(found[1], []).append(int(found[2]))
    passes = {f"{name}_pass_at_{k}" for name, counts in sets.items() for k in (min(counts), max(counts))}
    return sorted((name for name in names if name in passes or DRAWN.search(name)), key=_by_number)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts pass_at_2 before pass_at_16."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _finish_axis(axis: Any, title: str, x_label: str, legend: bool = True) -> None:
    axis.set_title(title)
    axis.set_xlabel(x_label)
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(fontsize=7)


def reward_svg(curve: list[list[float]], width: int = 480, height: int = 120) -> str:
    """The reward so far as an SVG polyline, for the workflow's UI."""
    last = max((point[0] for point in curve), default=0) or 1
    low = min((point[1] for point in curve), default=0.0)
    high = max((point[1] for point in curve), default=1.0)
    span = (high - low) or 1.0
    places = [f"{8 + (width - 16) * x / last:.1f},{height - 8 - (height - 32) * (y - low) / span:.1f}" for x, y in curve]
    dots = " ".join(places + places[-1:])  # twice: one point alone would be no line
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><rect width="100%" height="100%" fill="white"/>'
        f'<polyline points="{dots}" fill="none" stroke="#1f77b4" stroke-width="3" stroke-linecap="round"/>'
        f'<text x="8" y="16" font-size="11">reward {low:.3f} to {high:.3f}</text></svg>'
    )


def before_after(run: Run, num_iterations: int) -> list[str]:
    """One line per evaluation metric: at the start of RL, and at the end."""
    found = evaluations(run, num_iterations)
    if len(found) < 2:
        return []
    (_, before), (_, after) = found[0], found[-1]
    return [f"  {name:32s} {before[name]:.3f} -> {after[name]:.3f}" for name in sorted(before, key=_by_number) if name in after]
