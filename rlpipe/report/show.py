"""Reports on what is in a store: its runs, the iterations of one, the rollouts of an iteration.
Each is a record, whose `lines` are for people.
"""

from __future__ import annotations

import csv
import io
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import BestReward, IterationRecord, moment_of
from rlpipe.base.printable import printable
from rlpipe.base.values import Metrics
from rlpipe.records.columns import read_table
from rlpipe.records.prompt import Messages, Prompt
from rlpipe.records.rollout import Group, Rollout, grouped
from rlpipe.report.curves import before_after, evaluations
from rlpipe.report.stored_turns import Turns, turns_to_show
from rlpipe.store.approvals import awaited_gate
from rlpipe.store.artifacts import read_cached, read_manifest, read_records
from rlpipe.store.backend import Store
from rlpipe.store.forks import forked_from
from rlpipe.store.lease import held_by
from rlpipe.store.limits import Untrained, reason_to_stop, untrained
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.pruned import pruned_folders
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started, run_names

Row = TypeVar("Row")
NOTHING, UNFINISHED = "-", "unfinished"
READERS = 16  # runs that are read at the same time
REWARD, SHOWN = "rollout/reward_mean", ("rollout/pass_rate", "rollout/groups_kept", "rollout/length_tokens_mean")
TABLE_ROWS, TEXT_CHARS_MAX = 32, 2000
LINE_CHARS_MAX = 240
TABLE_COLUMNS = [
    "prompt_id", "group_index", "rollout_index", "prompt", "completion", "finish_reason", "reward", "reward_parts",
    "advantage",
]  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """The progress of a run, by the config of its last start, which may plan more than it was
    created with. `reward`: the mean of the newest iteration; `ended_at`: when that, or without RL a
    segment of SFT, was committed.
    """

    run: str
    # working, held on HOST, waits for an approval (GATE), complete, trained nothing, stopped by
    # WHAT, unfinished
    state: str
    segments: int
    num_segments: int
    iterations: int
    num_iterations: int
    reward: float | None
    best: BestReward | None
    curve: list[list[float | int]]  # [iteration, mean reward], thinned
    ended_at: datetime | None
    forked_from: str  # empty for a run that is no fork

    @property
    def line(self) -> str:
        return (
            f"SFT segments {self.segments}/{self.num_segments}  RL iterations {self.iterations}/{self.num_iterations} "
            f" reward {NOTHING if self.reward is None else f'{self.reward:.3f}'} "
            f" {f'{self.ended_at:%Y-%m-%d %H:%M}' if self.ended_at else NOTHING}  {self.state}"
            + (f"  forked from {self.forked_from}" if self.forked_from else "")
        )


@dataclass(frozen=True)
class RunsReport:
    """The progress of each run of a store. `unread`: by name, the reason why a run of another
    version, or a damaged one, cannot be read.
    """

    store: str
    runs: list[RunSummary]
    unread: dict[str, str]

    def lines(self) -> list[str]:
        """One line a run."""
        by_name = {summary.run: summary.line for summary in self.runs} | self.unread
        return [f"{name:32s} {by_name[name]}" for name in sorted(by_name)] or [f"no runs in {self.store}"]


def runs_report(store: Store) -> RunsReport:
    """The progress of each run of a store, by name."""

    def summary(name: str) -> RunSummary | str:
        try:
            return run_summary(open_existing(store, name))
        except (UserError, StoreError, OSError) as error:
            return str(error)

    names = run_names(store)
    with ThreadPoolExecutor(READERS, "reading") as threads:
        summaries = dict(zip(names, threads.map(summary, names), strict=True))
    runs = [entry for entry in summaries.values() if isinstance(entry, RunSummary)]
    unread = {name: entry for name, entry in summaries.items() if isinstance(entry, str)}
    return RunsReport(store.url, runs, unread)


def run_summary(run: Run) -> RunSummary:
    """The progress of a run, by a few reads of the store, however long the run is."""
    run = replace(run, config=last_started(run.store, run.name))
    progress = Progress(run)
    segments, complete = progress.num_done("sft"), progress.sft_complete
    num_segments = run.sft_result()[1] if complete else run.config.sft.num_segments
    committed, planned = progress.num_iterations, run.config.rl.num_iterations
    record = run.iteration(committed - 1) if committed else None
    newest = record or (run.committed("sft", segments - 1, "policy")[1] if segments else None)
    ended_at = moment_of(newest.ended_at, f"run {run.name}").astimezone() if newest else None
    has_trained = not untrained(run, record).is_all
    finished = "complete" if has_trained else "trained nothing"
    ended = finished if complete and committed >= planned else _stopped(run, segments, committed)
    gate = awaited_gate(run, ended != UNFINISHED) if run.config.approval and has_trained else None
    state = held_by(run.store, run.root) or (f"waits for an approval ({gate})" if gate else ended)
    reward, best, curve = (record.metrics.get(REWARD), record.best, record.curve) if record else (None, None, [])
    parent = forked_from(run) if run.parent else ""
    return RunSummary(
        run.name, state, segments, num_segments, committed, planned, reward, best, curve, ended_at, parent
    )


def _stopped(run: Run, segments: int, committed: int) -> str:
    """The reason why no process works on a run that is not complete."""
    phase, done = ("rl", committed) if Progress(run).sft_complete else ("sft", segments)
    limited = committed or any(run.config.budget.model_dump().values())  # else each segment would be read without need
    reason = reason_to_stop(run, phase, done) if limited else ""
    return f"stopped by {reason.split('=')[0]}" if reason else UNFINISHED


@dataclass(frozen=True)
class IterationRow:
    """A committed iteration. `is_pruned`: without the files of its policy."""

    iteration: int
    weight_version: int
    ended_at: str
    is_pruned: bool
    metrics: Metrics

    @property
    def line(self) -> str:
        reward, passed, kept, length = (self.metrics.get(name, math.nan) for name in (REWARD, *SHOWN))
        return (
            f"{self.iteration:9d}  {reward:6.3f} {passed:6.3f}  {kept:6.0f}  {length:6.1f}  {self.weight_version:7d}"
            + ("  pruned" if self.is_pruned else "")
        )


@dataclass(frozen=True)
class IterationsReport:
    """The committed iterations of a run. `sft_segment`: of `sft_segments` the one that RL starts
    from, by its validation loss; both None without validation. `evaluations`: by weight version, -1
    is the model before SFT.
    """

    run: str
    store: str
    untrained: Untrained
    iterations: list[IterationRow]
    sft_segment: int | None
    sft_segments: int | None
    evaluations: dict[int, Metrics]

    def lines(self) -> list[str]:
        """One line an iteration, then the first evaluation and the last."""
        lines = [
            f"run {self.run} in {self.store}: {len(self.iterations)} iterations committed",
            *([str(self.untrained)] if self.untrained.num else []),
            "iteration  reward   pass  groups  length  version",
            *(row.line for row in self.iterations),
        ]
        if self.sft_segments is not None:
            lines.append(
                f"SFT: of {self.sft_segments} segments number {self.sft_segment} has the lowest validation loss, and is"
                " what RL starts from"
            )
        return lines + before_after([*self.evaluations.items()])


def iterations_report(run: Run) -> IterationsReport:
    """The iterations of a run, its evaluations, and the segment of SFT that RL starts from."""
    progress = Progress(run)
    records, pruned = progress.iterations(progress.num_iterations), pruned_folders(run)
    rows = [
        row_of(IterationRow, record, is_pruned=run.folder("rl", record.iteration, "policy") in pruned)
        for record in records
    ]
    validated = run.config.sft.validated and progress.sft_complete
    segment, segments = run.sft_result() if validated else (None, None)
    skipped, evaluated = untrained(run, records[-1] if records else None), dict(evaluations(run, len(records)))
    return IterationsReport(run.name, run.store.url, skipped, rows, segment, segments, evaluated)


@dataclass(frozen=True)
class RolloutRow:
    """A rollout that an iteration trained on."""

    rollout_index: int
    reward: float | None
    reward_parts: dict[str, float]
    reward_fault: str
    advantage: float
    finish_reason: str
    completion: str
    turns: Messages

    def lines(self) -> list[str]:
        """One line, and one for each turn where there are several."""
        text = repr(self.completion) if len(self.turns) == 1 else f"{len(self.turns)} turns"
        turns = [f"{turn['role']:>16s}: {turn['content']!r}" for turn in self.turns if len(self.turns) > 1]
        scored = f"{self.reward:6.3f}  {self.advantage:9.3f}  {self.finish_reason:6s}"
        return [f"{scored}  {text}  ({parts_text(self.reward_parts, self.reward_fault)})", *turns]


@dataclass(frozen=True)
class GroupRow:
    """A group that an iteration trained on. `answer`: the reference; empty without one."""

    group_index: int
    prompt_id: str
    prompt: str
    answer: str
    rollouts: list[RolloutRow]


@dataclass(frozen=True)
class IterationReport:
    """The metrics of one iteration, and some of its rollouts."""

    run: str
    iteration: int
    weight_version: int
    ended_at: str
    metrics: Metrics
    groups: list[GroupRow]

    def lines(self) -> list[str]:
        """The metrics, then the rollouts group by group."""
        lines = [f"{name:40s} {value:.6g}" for name, value in sorted(self.metrics.items())]
        lines += ["", "reward  advantage  finish  completion  (reward parts)"]
        for group in self.groups:
            lines.append(f"group {group.group_index}: {group.prompt!r}, answer {group.answer!r}")
            lines += [line for rollout in group.rollouts for line in rollout.lines()]
        return lines


def iteration_report(run: Run, iteration: int, rows_max: int) -> IterationReport:
    """One iteration, with at most `rows_max` rollouts. UserError when it is not committed."""
    record = run.iteration(iteration)
    if record is None:
        raise UserError(
            f"--iteration {iteration}: not committed in run {run.name}; rlpipe show {run.name} lists what is"
        )
    groups, rows_left = list[GroupRow](), rows_max
    for answer, group, turns_of in trained_groups(run, record):
        if rows_left <= 0:
            break
        rows = [row_of(RolloutRow, rollout, turns=turns_of(rollout)) for rollout in group[:rows_left]]
        groups.append(GroupRow(group[0].group_index, group[0].prompt_id, group[0].prompt, answer, rows))
        rows_left -= len(group)
    return IterationReport(run.name, iteration, record.weight_version, record.ended_at, record.metrics, groups)


class TrainedGroup(NamedTuple):
    """A group that an iteration trained on, and the reference answer of its prompt; empty without
    one. `turns_of`: see `turns_to_show`.
    """

    answer: str
    rollouts: Group
    turns_of: Turns


def trained_groups(run: Run, record: IterationRecord) -> list[TrainedGroup]:
    """The groups that a committed iteration trained on."""
    answers: dict[str, str | None] = {}
    for index in range(record.last_round + 1):
        prompts, _ = run.committed("rl", record.iteration, f"prompts/round-{index}")
        answers |= {
            prompt.prompt_id: prompt.answer for prompt in read_records(run.store, prompts, "prompts.parquet", Prompt)
        }
    groups = grouped(read_records(run.store, record.artifact("batch"), "batch.parquet", Rollout))
    turns_of = turns_to_show(run.owner("rl", record.iteration, "rollouts"))
    return [TrainedGroup(answers.get(group[0].prompt_id) or "", group, turns_of) for group in groups]


def rollout_table(run: Run, iteration: int) -> str:
    """Rollouts from all over the batch that a committed iteration trained on, as CSV: at most
    TABLE_ROWS, long texts cut.
    """
    record = run.iteration(iteration)
    assert record is not None, f"iteration {iteration} is not committed"
    batch = record.artifacts["batch"]
    file = read_manifest(run.store, batch.folder, batch.sha256).file("batch.parquet")
    table = read_table(read_cached(run.store, batch.folder, file), TABLE_COLUMNS)
    step = max(1, -(-table.num_rows // TABLE_ROWS))
    rows = table.take(pa.array(range(0, table.num_rows, step), pa.int64())).to_pylist()  # typed: a batch may be empty
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TABLE_COLUMNS)
    writer.writerows([str(row[name])[:TEXT_CHARS_MAX] for name in TABLE_COLUMNS] for row in rows)
    return printable(text.getvalue())


def row_of(kind: type[Row], record: object, **others: Any) -> Row:
    """A row of a report: the fields that it shares with a record, by their names, and others."""
    known: type[Any] = kind
    shared = {field.name: getattr(record, field.name) for field in fields(known) if field.name not in others}
    return kind(**shared, **others)


def parts_text(parts: Metrics, fault: str) -> str:
    """The parts of a rollout's reward, and its fault. Example: exact 1, format 0.5."""
    return ", ".join([*(f"{name} {value:g}" for name, value in parts.items()), *([f"fault {fault}"] if fault else [])])


def text_line(text: str) -> str:
    """A text as one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= LINE_CHARS_MAX else f"{line[: LINE_CHARS_MAX - 1]}…"


def flat_settings(value: Any, name: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, entries of lists by their number.

    Example: {"data.2.rows_max": 600}.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {
        key: setting
        for part, inner in value.items()
        for key, setting in flat_settings(inner, f"{name}.{part}".lstrip(".")).items()
    }


def parameter_text(value: Any) -> str:
    """A setting as text that does not depend on the order of its keys."""
    return printable(str(_by_key(value)))


def _by_key(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_key(value[key]) for key in sorted(value)}
    return [_by_key(entry) for entry in value] if isinstance(value, list) else value
