"""Runs, iterations and rollouts of a store as lines of text; two runs side by side."""

from __future__ import annotations

import csv
import io
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import IterationRecord, moment_of
from rlpipe.base.printable import printable
from rlpipe.config.pipeline import identity
from rlpipe.records.columns import read_table
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Group, Rollout, grouped
from rlpipe.report.curves import before_after, evaluation_changes, evaluations
from rlpipe.report.stored_turns import Turns, turns_to_show
from rlpipe.store.approvals import awaited_gate
from rlpipe.store.artifacts import read_cached, read_manifest, read_records
from rlpipe.store.backend import Store
from rlpipe.store.forks import forked_from
from rlpipe.store.lease import held_by
from rlpipe.store.limits import reason_to_stop, untrained
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.pruned import pruned_folders
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started, run_names

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
    """The progress of a run. `newest`: the record of its newest iteration; `ended_at`: when that,
    or without RL a segment of SFT, was committed.
    """

    run: Run  # with the config of its last start, which may plan more than it was created with
    segments: int
    num_segments: int
    committed: int
    newest: IterationRecord | None
    ended_at: datetime | None
    # working, held on HOST, waits for an approval (GATE), complete, trained nothing, stopped by
    # WHAT, unfinished
    state: str

    @property
    def reward(self) -> float | None:
        """The mean reward of the newest iteration."""
        return self.newest.metrics.get(REWARD) if self.newest else None


def run_lines(store: Store) -> list[str]:
    """One line a run: its progress, its newest reward and commit, its state, and the run that it
    was forked from.
    """
    summaries = run_summaries(store).items()
    lines = [
        f"{name:32s} {_run_line(summary) if isinstance(summary, RunSummary) else summary}"
        for name, summary in summaries
    ]
    return lines or [f"no runs in {store.url}"]


def run_summaries(store: Store) -> dict[str, RunSummary | str]:
    """The progress of each run of a store, by name; for a run of another version, or a damaged one,
    the reason why it cannot be read.
    """

    def summary(name: str) -> RunSummary | str:
        try:
            return run_summary(open_existing(store, name))
        except (UserError, StoreError, OSError) as error:
            return str(error)

    names = run_names(store)
    with ThreadPoolExecutor(READERS, "reading") as threads:
        return dict(zip(names, threads.map(summary, names), strict=True))


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
    return RunSummary(run, segments, num_segments, committed, record, ended_at, state)


def _run_line(summary: RunSummary) -> str:
    run, reward, ended_at = summary.run, summary.reward, summary.ended_at
    number = math.nan if reward is None else reward
    shown = f"{number:.3f}" if summary.newest else NOTHING
    return (
        f"SFT segments {summary.segments}/{summary.num_segments}  RL iterations"
        f" {summary.committed}/{run.config.rl.num_iterations}  reward {shown} "
        f" {f'{ended_at:%Y-%m-%d %H:%M}' if ended_at else NOTHING}  {summary.state}"
        + (f"  forked from {forked_from(run)}" if run.parent else "")
    )


def _stopped(run: Run, segments: int, committed: int) -> str:
    """The reason why no process works on a run that is not complete."""
    phase, done = ("rl", committed) if Progress(run).sft_complete else ("sft", segments)
    limited = committed or any(run.config.budget.model_dump().values())  # else each segment would be read without need
    reason = reason_to_stop(run, phase, done) if limited else ""
    return f"stopped by {reason.split('=')[0]}" if reason else UNFINISHED


def show_lines(run: Run) -> list[str]:
    """The iterations of a run, one line each (`pruned`: without the files of its policy), and
    before/after.
    """
    progress = Progress(run)
    records, pruned = progress.iterations(progress.num_iterations), pruned_folders(run)
    lines = [
        f"run {run.name} in {run.store.url}: {len(records)} iterations committed",
        *([str(skipped)] if (skipped := untrained(run, records[-1] if records else None)).num else []),
        "iteration  reward   pass  groups  length  version",
    ]
    for record in records:
        reward, passed, kept, length = (record.metrics.get(name, math.nan) for name in (REWARD, *SHOWN))
        lines.append(
            f"{record.iteration:9d}  {reward:6.3f} {passed:6.3f}  {kept:6.0f}  {length:6.1f} "
            f" {record.weight_version:7d}"
            + ("  pruned" if run.folder("rl", record.iteration, "policy") in pruned else "")
        )
    if run.config.sft.validated and progress.sft_complete:
        segment, trained = run.sft_result()
        lines.append(
            f"SFT: of {trained} segments number {segment} has the lowest validation loss, and is what RL starts from"
        )
    return lines + before_after(run, len(records))


def iteration_lines(run: Run, iteration: int, rows_max: int) -> list[str]:
    """The metrics of one iteration, and its rollouts group by group; a line for each turn where
    there are several.
    """
    record = run.iteration(iteration)
    if record is None:
        raise UserError(
            f"--iteration {iteration}: not committed in run {run.name}; rlpipe show {run.name} lists what is"
        )
    lines = [f"{name:40s} {value:.6g}" for name, value in sorted(record.metrics.items())]
    lines += ["", "reward  advantage  finish  completion  (reward parts)"]
    rows_left = rows_max
    for answer, group, turns_of in trained_groups(run, record):
        if rows_left <= 0:
            break
        lines.append(f"group {group[0].group_index}: {group[0].prompt!r}, answer {answer!r}")
        for rollout in group[:rows_left]:
            scored = f"{rollout.reward:6.3f}  {rollout.advantage:9.3f}  {rollout.finish_reason:6s}"
            turns = turns_of(rollout)
            text = repr(rollout.completion) if len(turns) == 1 else f"{len(turns)} turns"
            lines.append(f"{scored}  {text}  ({parts_text(rollout)})")
            lines += [f"{turn['role']:>16s}: {turn['content']!r}" for turn in turns if len(turns) > 1]
        rows_left -= len(group)
    return lines


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


def parts_text(rollout: Rollout) -> str:
    """The parts of a rollout's reward. Example: exact 1, format 0.5."""
    parts = [f"{name} {value:g}" for name, value in rollout.reward_parts.items()]
    return ", ".join(parts + ([f"fault {rollout.reward_fault}"] if rollout.reward_fault else []))


def text_line(text: str) -> str:
    """A text as one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= LINE_CHARS_MAX else f"{line[: LINE_CHARS_MAX - 1]}…"


def compare_lines(first: Run, second: Run) -> list[str]:
    """A table with a column a run: settings that differ, metrics of the newest iterations,
    evaluations before and after RL.
    """
    runs = [first, second]
    settings = _rows([flat_settings(identity(run.config)) for run in runs])
    rows = [
        ["", first.name, second.name],
        ["forked from", *(forked_from(run) if run.parent else NOTHING for run in runs)],
        ["iterations committed", *(str(Progress(run).num_iterations) for run in runs)],
        [],
        ["settings that differ"],
        *(row for row in settings if row[1] != row[2]),
        [],
        ["metrics of the newest iteration"],
        *_rows([_newest_metrics(run) for run in runs]),
        [],
        ["evaluation, before -> after RL"],
        *_rows([evaluation_changes(evaluations(run, Progress(run).num_iterations)) for run in runs]),
    ]
    widths = [max(len(row[column]) for row in rows if len(row) > 1) for column in range(3)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def _rows(sides: list[dict[str, str]]) -> list[list[str]]:
    return [[f"  {name}", *(side.get(name, NOTHING) for side in sides)] for name in sorted({*sides[0], *sides[1]})]


def _newest_metrics(run: Run) -> dict[str, str]:
    """The newest metrics without the evaluation, which not every iteration has, and without
    times.
    """
    count = Progress(run).num_iterations
    record = run.iteration(count - 1) if count else None
    metrics = record.metrics if record else {}
    return {
        name: f"{value:.6g}" for name, value in metrics.items() if name.startswith(("rollout/", "train/", "spent/"))
    }


def flat_settings(value: Any, name: str = "") -> dict[str, str]:
    """Nested settings by their dotted names, entries of lists by their number.

    Example: {"data.2.rows_max": "600"}.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {name: str(value)}
    return {
        key: text
        for part, inner in value.items()
        for key, text in flat_settings(inner, f"{name}.{part}".lstrip(".")).items()
    }


def parameter_text(value: Any) -> str:
    """A setting as text that does not depend on the order of its keys."""
    return printable(str(_by_key(value)))


def _by_key(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_key(value[key]) for key in sorted(value)}
    return [_by_key(entry) for entry in value] if isinstance(value, list) else value
