"""The pictures and the summary of a run for a person: its curves as a PNG, the reward so far as a
small SVG, and the changes of the evaluations at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.algorithms.answers import STDERR
from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import Manifest, moment_of
from rlpipe.base.values import Metrics, expanded
from rlpipe.config.sections import DataConfig
from rlpipe.store.audit import by_number, manifests
from rlpipe.store.code_version import code_version
from rlpipe.store.forks import forked_from
from rlpipe.store.outside import is_outside
from rlpipe.store.policy_files import stored_policy
from rlpipe.store.progress import Progress
from rlpipe.store.run import BEFORE_SFT, Run

STAGES = (
    "sample_prompts",
    "generate",
    "score",
    "filter",
    "train",
    "checkpoint",
    "reload_engines",
    "evaluate",
    "orchestration",
)
DOTS_BELOW = 10  # points of a curve
PASS_AT = re.compile(r"(.*)_pass_at_(\d+)")
BEFORE_RL, EVALUATION = "before_rl", "evaluation/"
# what a phase starts from -> what MLflow calls its evaluation
BEFORE = {BEFORE_SFT: "before_sft", 0: BEFORE_RL}
# of a policy that is stored as a difference: the command that makes a folder of it
EXPORT_TAG = "rlpipe.export"
SFT_LOSS, SFT_VALIDATION = "sft/loss", "sft/validation_loss"
Evaluations = list[tuple[int, Metrics]]  # (weight version, metrics)
DRAWN = re.compile(r"_(greedy|maj_at_\d+|format_rate)$")


@dataclass(frozen=True)
class Point:
    """Metrics at one step.

    `time_ms` is the time of their commit, so that a point that is logged twice is the same point.
    """

    step: int
    time_ms: int
    metrics: Metrics


@dataclass(frozen=True)
class DataSet:
    """A data set as MLflow knows it. `digest`: of all its rows, in order."""

    name: str
    digest: str
    source_type: str
    source: str  # JSON that mlflow.data reads
    profile: str

    @classmethod
    def of(cls, data: DataConfig, digest: str, num_rows: int) -> DataSet:
        """A set of the config with the digest and row count that were read; MLflow keeps 36
        characters of a digest.
        """
        is_file, on_s3 = expanded(data.source).exists(), is_outside(data.source)
        uri = data.source if on_s3 else str(expanded(data.source).absolute())
        source = {"uri": uri} if is_file or on_s3 else {"tags": {"source": data.source}}
        profile = {"num_rows": num_rows, "part": data.part, "weight": data.weight}
        return cls(
            data.name,
            digest[:32],
            "s3" if on_s3 else "local" if is_file else "code",
            json.dumps(source),
            json.dumps(profile),
        )


def code_tags(run: Run) -> dict[str, str]:
    """Tags with the code version of a run, the run that it was forked from, and the address where
    it is shown.
    """
    code = code_version()
    # empty where it is none: what a start before said would stay
    tags = {"rlpipe.code_version": code, "mlflow.source.git.commit": code if re.fullmatch("[0-9a-f]{12}", code) else ""}
    if run.parent is not None:
        tags["rlpipe.parent"] = forked_from(run)
    if view := run.config.tracking.view_of(run.name):
        tags["rlpipe.view"] = view
    return tags


def policy_tags(run: Run, version: int) -> dict[str, str]:
    """The inputs of a policy, each as the sha256 of its manifest: the previous policy, the base
    model, SFT's data, the KL term's reference; the prompts of RL as the sha256 of their rows.
    """
    rl, (ref, manifest) = run.config.rl, run.policy(version)
    tags = {"rlpipe.version": str(version), "rlpipe.policy_sha256": ref.sha256}
    if "previous" in manifest.inputs:
        tags["rlpipe.parent_policy_sha256"] = manifest.inputs["previous"]
    if stored_policy(run.store, ref, manifest).is_rebuilt:
        tags[EXPORT_TAG] = f"rlpipe export {run.name} --version {version} --to FOLDER"
    for name, place in (("base", ("base", 0, "policy")), ("data_sft", ("data", 0, "data"))):
        if artifact := run.artifact(*place):
            tags[f"rlpipe.{name}_sha256"] = artifact[0].sha256
    if prompts := run.artifact("rl", version - 1, "prompts/round-0") if version > 0 else None:
        tags["rlpipe.data_rl_sha256"] = prompts[1].metrics.get("data_sha256", "")
    if version > 0 and rl.kl != "none":
        reference = run.committed("base", 0, "reference") if rl.reference else run.policy(0)
        tags |= {"rlpipe.reference": rl.reference or "version 0", "rlpipe.reference_sha256": reference[0].sha256}
    for stage in run.config.teachers if version > 0 else ():
        tag = f"rlpipe.{stage}".replace("-", "_")
        tags |= {tag: run.config.frozen_models[stage].name}
        tags |= {f"{tag}_sha256": run.committed("base", 0, stage)[0].sha256}
    return tags


def fetch_points(run: Run, source: str, unit: int) -> list[Point]:
    """The points of one unit of a source: an SFT segment, an RL iteration, or the evaluation before
    RL."""
    if source == BEFORE_RL:
        return evaluation_points(run, 0)
    return sft_points(run, unit) if source == "sft" else rl_points(run, unit)


def sft_points(run: Run, segment: int) -> list[Point]:
    """The points of one committed SFT segment: the loss of every step, other metrics once."""
    _, manifest = run.committed("sft", segment, "policy")
    first, time_ms = segment * run.config.sft.segment_steps, _milliseconds(manifest.ended_at)
    points = [
        Point(first + offset, time_ms, {SFT_LOSS: loss}) for offset, loss in enumerate(manifest.metrics["losses"])
    ]
    rest = {
        name.replace("train/", "sft/"): value for name, value in manifest.metrics.items() if name.startswith("train/")
    }
    del rest[SFT_LOSS]
    return [*points, Point(points[-1].step, time_ms, rest)]


def rl_points(run: Run, iteration: int) -> list[Point]:
    """The points of one committed iteration: its metrics at the iteration, the evaluation of its
    policy at that weight version.
    """
    record = run.record(iteration)
    time_ms = _milliseconds(record.ended_at)
    rest = {name: value for name, value in record.metrics.items() if not name.startswith(EVALUATION)}
    evaluation = {f"{EVALUATION}{name}": value for name, value in record.evaluation.items()}
    return [Point(iteration, time_ms, rest), Point(record.weight_version, time_ms, evaluation)]


def evaluation_points(run: Run, version: int) -> list[Point]:
    """The evaluation of a weight version whose iteration's record has none: at that version, and,
    for the start of a phase, again under a name of its own.
    """
    manifest = evaluation_of(run, version)
    record = run.iteration(version - 1) if version > 0 else None
    if manifest is None or (record is not None and record.evaluation):
        return []
    start = BEFORE.get(version) if version < 0 or run.config.rl.num_iterations else None
    prefixes = [EVALUATION, *([f"{start}/"] if start else [])]
    metrics = {f"{prefix}{name}": value for name, value in manifest.metrics.items() for prefix in prefixes}
    return [Point(version, _milliseconds(manifest.ended_at), metrics)]


def _milliseconds(moment: str) -> int:
    return int(moment_of(moment, "a manifest or record").timestamp() * 1000)


def evaluations(run: Run, num_iterations: int) -> Evaluations:
    """[(weight version, metrics)] of every evaluation, the one at the start of RL first; without RL
    the base model's, then SFT's.
    """
    starts = [0] if num_iterations or not run.config.sft.num_segments else [BEFORE_SFT, 0]
    evaluated = [(version, manifest.metrics) for version in starts if (manifest := evaluation_of(run, version))]
    return evaluated + [
        (record.weight_version, record.evaluation)
        for record in Progress(run).iterations(num_iterations)
        if record.evaluation
    ]


def evaluated_versions(run: Run) -> Iterator[tuple[int, Manifest]]:
    """(weight version, manifest of its evaluation), in order; also those that `rlpipe evaluate`
    made.
    """
    folders, member = set(manifests(run)), run
    while member.parent is not None:
        member = member.parent
        folders |= set(manifests(member))
    for version in range(
        BEFORE_SFT if run.config.sft.num_segments else 0, Progress(run).num_iterations + 1
    ):  # without SFT the base model is version 0
        try:
            place = run.policy_place(version)
        except StoreError:  # SFT is not complete: there is no version 0 yet
            continue
        if run.folder(*place, "evaluation") in folders:
            yield version, run.committed(*place, "evaluation")[1]


def evaluation_of(run: Run, version: int) -> Manifest | None:
    """The manifest of a weight version's evaluation; None where there is none."""
    if version >= 0 and not Progress(run).sft_complete:
        return None
    artifact = run.artifact(*run.policy_place(version), "evaluation")
    return artifact[1] if artifact else None


def metric_points(run: Run, metric: str, versions: list[int]) -> list[tuple[int, float]]:
    """[(weight version, value)] of a metric of evaluations: of these versions, in order, and of
    those between the first and the last that `evaluation.every` makes, where there is one.
    """
    every, points = run.config.evaluation.every, []
    for version in range(versions[0], versions[-1] + 1):
        if version in versions or (every and version % every == 0):
            made = evaluation_of(run, version)
            points += [(version, made.metrics[metric])] if made and metric in made.metrics else []
    return points


def draw_curves(run: Run, num_iterations: int, path: Path) -> None:
    """A PNG of reward, evaluation, length, KL and time per stage over the iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = [record.metrics for record in Progress(run).iterations(num_iterations)]
    figure = Figure(figsize=(15, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    _draw_losses(axes[0], run)
    environment = sorted({name for values in metrics for name in values if name.startswith("rollout/environment_")})
    for axis, title, names in (
        (axes[1], "reward of rollouts", ("rollout/reward_mean", "rollout/pass_rate", *environment)),
        (axes[3], "completion length, tokens", ("rollout/length_tokens_mean",)),
        (axes[4], "KL of the step (and to the reference)", ("train/proximal_kl", "train/kl")),
    ):
        for name in (name for name in names if any(name in values for values in metrics)):
            values_of = [values.get(name, float("nan")) for values in metrics]
            axis.plot(values_of, label=name, marker=_marker(num_iterations))
        _finish_axis(axis, title, "RL iteration")
    points = evaluations(run, num_iterations)
    drawn = _drawn({name for _, values in points for name in values})
    for name in drawn:
        line = [(version, values[name]) for version, values in points if name in values]
        axes[2].plot(*zip(*line, strict=True), marker="o", label=name)
    _finish_axis(axes[2], "held-out prompts", "weight version")
    seconds = [[values.get(f"time/{verb}_s", 0.0) for values in metrics] for verb in STAGES]
    # each iteration as wide as itself: one alone is a bar
    edges = np.arange(num_iterations)[:, None] + [-0.5, 0.5]
    axes[5].stackplot(edges.flatten(), np.repeat(seconds, 2, axis=1), labels=STAGES)
    _finish_axis(axes[5], "seconds per stage", "RL iteration")
    figure.suptitle(f"rlpipe run {run.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _draw_losses(axis: Any, run: Run) -> None:
    chosen, trained = run.sft_result()
    segments = [sft_points(run, segment) for segment in range(trained)]
    points = [point for segment in segments for point in segment[:-1]]
    axis.plot(
        [point.step for point in points],
        [point.metrics[SFT_LOSS] for point in points],
        label=SFT_LOSS,
        marker=_marker(len(points)),
    )
    name = SFT_VALIDATION
    validated = [(segment[-1].step, segment[-1].metrics[name]) for segment in segments if name in segment[-1].metrics]
    if validated:
        axis.plot(*zip(*validated, strict=True), marker="o", label=name)
        axis.axvline(validated[chosen][0], linestyle=":", label="the result")
    _finish_axis(axis, "SFT loss", "SFT step")


def _drawn(names: set[str]) -> list[str]:
    """The metrics of the evaluation that are drawn: of pass@k only the first and the last k, so
    that a set has few lines.
    """
    sets: dict[str, list[int]] = {}
    for name in names:
        if match := PASS_AT.fullmatch(name):
            sets.setdefault(match[1], []).append(int(match[2]))
    passes = {f"{name}_pass_at_{k}" for name, counts in sets.items() for k in (min(counts), max(counts))}
    return sorted((name for name in names if name in passes or DRAWN.search(name)), key=by_number)


def _marker(num_points: int) -> str:
    """Dots where there are few points: a single point would draw no line."""
    return "o" if num_points < DOTS_BELOW else ""


def _finish_axis(axis: Any, title: str, x_label: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(x_label)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def reward_svg(curve: list[list[float]], width: int = 480, height: int = 120) -> str:
    """The reward so far as an SVG polyline, for the UI."""
    last = max((point[0] for point in curve), default=0) or 1
    low = min((point[1] for point in curve), default=0.0)
    high = max((point[1] for point in curve), default=1.0)
    span = (high - low) or 1.0
    places = [
        f"{8 + (width - 16) * x / last:.1f},{height - 8 - (height - 32) * (y - low) / span:.1f}" for x, y in curve
    ]
    dots = " ".join(places + places[-1:])  # twice: one point alone would be no line
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><rect width="100%" height="100%"'
        f' fill="white"/><polyline points="{dots}" fill="none" stroke="#1f77b4" stroke-width="3"'
        f' stroke-linecap="round"/><text x="8" y="16" font-size="11">reward {low:.3f} to {high:.3f}</text></svg>'
    )


def evaluation_changes(points: Evaluations) -> dict[str, str]:
    """The first and the last value of each metric of the evaluations, with their standard errors.
    Example: {"words_greedy": "0.250 ± 0.031 -> 0.500 ± 0.035"}.
    """
    before, after = (with_errors(points[at][1]) if points else {} for at in (0, -1))
    return {name: f"{before[name]} -> {after[name]}" for name in sorted(before, key=by_number) if name in after}


def with_errors(metrics: Metrics) -> dict[str, str]:
    """The metrics of an evaluation, those that have a standard error with it: older runs have none.
    Example: {"words_greedy": "0.934 ± 0.018"}.
    """
    errors = {name: f" ± {metrics[name + STDERR]:.3f}" for name in metrics if name + STDERR in metrics}
    return {name: f"{metrics[name]:.3f}{errors.get(name, '')}" for name in metrics if not name.endswith(STDERR)}


def before_after(points: Evaluations) -> list[str]:
    """One line per evaluation metric: at the start of RL (without
    RL: before SFT), and at the end."""
    return [f"  {name:32s} {change}" for name, change in evaluation_changes(points).items()] if len(points) > 1 else []
