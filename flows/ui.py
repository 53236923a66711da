"""The view of a run in Prefect: artifacts of its flow runs, their final states, and the report. A
fault in it never ends the run.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypedDict
from uuid import UUID

import httpx
import prefect.states
from prefect import get_client
from prefect.artifacts import acreate_link_artifact, acreate_markdown_artifact
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.events import Facts, tell, tell_iteration
from flows.terminal import bar, iteration_line, say
from rlpipe.base.manifests import IterationRecord
from rlpipe.base.printable import printable
from rlpipe.loop.session import Session
from rlpipe.records.turns import transcript
from rlpipe.report.curves import (
    BEFORE_RL,
    EXPORT_TAG,
    before_after,
    draw_curves,
    evaluations,
    policy_tags,
    reward_svg,
    with_errors,
)  # fmt: skip
from rlpipe.report.show import TrainedGroup, parts_text, trained_groups
from rlpipe.report.tracking import ROLLOUTS
from rlpipe.store.artifacts import is_pruned
from rlpipe.store.limits import Untrained, untrained
from rlpipe.store.patience import hurrying
from rlpipe.store.run import Run
from rlpipe.stored.remaking import restore_policy

NOTHING_TRAINED = (
    "{skipped}: the policy is the one that RL started from, and is not registered. rlpipe show says which groups were"
    " dropped; other rewards, filters or data need another run, or a fork"
)
ROLLOUTS_SHOWN = 16
TEXT_MAX = 2000  # characters of a prompt or completion; the whole is in the store
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")  # all that a backslash before it makes literal
CONTROL = {code: chr(0x2400 + code) for code in range(32)} | {ord("\n"): " ⏎ "}  # NUL, which Postgres refuses, reads ␀


format_exception = prefect.states.format_exception


def printable_exception(error: BaseException, traceback: Any = None) -> str:
    """The message of a failed run's state, printable. With a lone surrogate in it no state could be
    set: the run would be shown as running."""
    return printable(format_exception(error, traceback))


prefect.states.format_exception = printable_exception


@contextlib.contextmanager
def only_shown() -> Iterator[None]:
    """Marks the body's calls to the Prefect server as for display only: a call that fails, or takes
    longer than seconds, costs a warning.
    """
    try:
        with hurrying():
            yield
    except (PrefectException, httpx.HTTPError, OSError) as error:
        get_run_logger().warning(
            "Prefect's UI does not show everything of this run: %s: %s", type(error).__name__, error
        )


async def publish_iteration(session: Session, record: IterationRecord) -> None:
    """Publishes artifacts of the iteration's flow run: the reward so far and all metrics, and some
    of its rollouts.
    """
    name, title = f"{_key(session)}-{record.iteration:05d}", f"# {session.run.name}, iteration {record.iteration}"
    metrics = [f"| {metric} | {value:.6g} |" for metric, value in sorted(record.metrics.items())]
    line = _preformatted([iteration_line(record)])
    lines = [title, "", _curve(record), "", *line, "| metric | value |", "|---|---|", *metrics]
    rollouts = await asyncio.to_thread(_rollout_tables, session, record)
    await asyncio.gather(
        _show(f"{name}-metrics", lines, "Reward so far, metrics of the iteration"),
        _show(f"{name}-rollouts", rollouts, "Some of the rollouts that were trained on"),
        _link(f"{name}-view", session.config.tracking.view_of(session.run.name, f"/iterations/{record.iteration}")),
    )


async def _link(key: str, address: str) -> None:
    """An artifact with a link to all groups and rollouts of the iteration, where the config names
    the address at which they are shown.
    """
    if address:
        with only_shown():
            await acreate_link_artifact(
                address, "All groups and rollouts: rlpipe view", key=key, description="In rlpipe view"
            )


def track_data(session: Session, use: str) -> None:
    """Lets the tracker have the data sets of a use, where it has any."""
    if session.config.sets(use):
        session.tracker.reads(use, partial(session.data.described, use))


@contextlib.contextmanager
def watch(session: Session, num_committed: int) -> Iterator[Callable[[IterationRecord], Awaitable[None]]]:
    """Shows iterations as they are committed: a bar, a line each, the curve; and sends the
    tracker's metrics.

    Yields the function to call with the record of every further iteration. The curve is one
    artifact on the page of the RL phase.
    """
    run, total, artifact = session.run, session.config.rl.num_iterations, None
    session.tracker.committed(BEFORE_RL, 1)
    for use in ("rl", "evaluation"):
        track_data(session, use)
    for source in ("rl", ROLLOUTS):
        session.tracker.committed(source, num_committed)
    with bar("RL", total, num_committed, "iteration") as progress:

        async def committed(record: IterationRecord) -> None:
            nonlocal artifact
            for source in ("rl", ROLLOUTS):
                session.tracker.committed(source, record.iteration + 1)
            tell_iteration(record)
            say(iteration_line(record))
            progress.update()
            lines = [f"# {run.name}, {record.iteration + 1} of {total} iterations", "", _curve(record)]
            artifact = await _show(f"{_key(session)}-reward", lines, "Reward so far", artifact)

        yield committed


async def _show(key: str, markdown: list[str], description: str, before: UUID | None = None) -> UUID | None:
    """The id of an artifact of the flow run: `before`, updated, or a new one; None where the server
    did not accept it.
    """
    text = printable("\n".join(markdown))
    with only_shown():
        if before is None:
            return await acreate_markdown_artifact(text, key=key, description=description)
        async with get_client() as client:
            await client.update_artifact(before, ArtifactUpdate(data=text))
        return before
    return None


def _curve(record: IterationRecord) -> str:
    return image("svg+xml", reward_svg(record.curve).encode())


def _rollout_tables(session: Session, record: IterationRecord) -> list[str]:
    """Groups spread over the batch, each with its prompt, its reference answer and a table of its
    rollouts.

    As markdown: one of Prefect's two UIs reads the cells of a table artifact as markdown and hides
    tags, the other does not.
    """
    groups = trained_groups(session.run, record)
    count = max(1, ROLLOUTS_SHOWN // len(groups[0].rollouts)) if groups else 1
    shown = groups[:: max(1, len(groups) // count)][:count]
    title = f"# {session.run.name}, iteration {record.iteration}: {len(shown)} of {len(groups)} groups"
    return [title, *(line for group in shown for line in _group_table(group))]


def _group_table(group: TrainedGroup) -> list[str]:
    first = group.rollouts[0]
    lines = ["", f"### group {first.group_index}", ""]
    lines += [f"prompt: {_literal(first.prompt)}", "", f"answer: {_literal(group.answer)}", ""]
    lines += ["| reward | advantage | reward parts | finish | completion |", "|---|---|---|---|---|"]
    for rollout in group.rollouts[:ROLLOUTS_SHOWN]:
        turns = group.turns_of(rollout)
        said = transcript(turns) if len(turns) > 1 else rollout.completion
        parts = parts_text(rollout.reward_parts, rollout.reward_fault)
        texts = " | ".join(_literal(text) for text in (parts, rollout.finish_reason, said))
        lines.append(f"| {rollout.reward:.4g} | {rollout.advantage:.4g} | {texts} |")
    return lines


def _literal(text: str) -> str:
    """Markdown that shows a text as it is, tags and stars included, on one line; of a long text the
    beginning and the end.
    """
    if len(text) > TEXT_MAX:
        text = f"{text[: TEXT_MAX // 2]} ... {text[-TEXT_MAX // 2 :]}"
    return PUNCTUATION.sub(r"\\\g<0>", text.translate(CONTROL))


class RunReport(TypedDict, total=False):
    """The result of `post-train`: the addresses of everything, the reason why the run was stopped
    (where it was), the number of iterations in which nothing was trained (where there were any),
    and the verdict of a gate that failed. A run that was stopped in SFT has no policy.
    """

    run: str
    policy: str
    curves: str
    before_after: list[str]
    stopped: str
    untrained: str
    trained_nothing: bool
    gate_failed: str


async def publish_report(session: Session, total: int, gate_failed: str | None = None) -> RunReport:
    """Draws the curves of `total` committed iterations, tracks and registers their policy; returns
    the addresses of everything.

    A policy that RL has not changed is not registered. `gate_failed`: what its gate says of
    one that failed; empty when it passed, None without a gate.
    """
    run = session.run
    skipped = await asyncio.to_thread(untrained_so_far, run, total)
    curve = Path.cwd() / f"{run.name}-curves.png"
    await asyncio.to_thread(draw_curves, run, total, curve)
    ref, _ = await asyncio.to_thread(run.policy, total)
    if await asyncio.to_thread(is_pruned, run.store, ref.folder):  # the plan is shorter than the committed run
        await restore_policy(session, version=total)
    folder, facts = await asyncio.to_thread(_of_policy, run, total)
    evaluated = await asyncio.to_thread(evaluations, run, total)
    compared = before_after(evaluated)
    lineage = await asyncio.to_thread(policy_tags, run, total)
    here = contextvars.copy_context()  # of the flow run, for the tracker's thread
    said = partial(tell, run.name, "policy.registered", f"{folder} is registered", facts)
    if not skipped.is_all:
        session.tracker.publish(
            folder, total, evaluated[-1][1] if evaluated else {}, curve, lineage, lambda: here.run(said)
        )
    if gate_failed is not None:
        passed = partial(tell, run.name, "gate.passed", f"{folder} passed its gate, and is the champion", facts)
        if gate_failed:
            session.tracker.judged(folder, "failed", lambda: None)
        else:
            session.tracker.judged(folder, "passed", lambda: here.run(passed))
    export = f", a difference: `{lineage[EXPORT_TAG]}` makes a model folder of it" if EXPORT_TAG in lineage else ""
    lines = [
        f"# {run.name}, {total} iterations",
        "",
        *([f"{skipped}.", ""] if skipped.num else []),
        f"The policy: `{folder}`{export}",
        "",
        *_preformatted(compared),
    ]
    await _show(f"{_key(session)}-report", [*lines, image("png", curve.read_bytes())], "Before and after RL, curves")
    report: RunReport = {"run": run.name, "policy": folder, "curves": str(curve), "before_after": compared}
    report["gate_failed"] = gate_failed or ""
    return report | ({"untrained": str(skipped), "trained_nothing": skipped.is_all} if skipped.num else {})


def _of_policy(run: Run, version: int) -> tuple[str, Facts]:
    """The folder of a policy, by which MLflow knows it, and the values of events about it."""
    ref, manifest = run.policy(version)
    folder = run.store.address(f"{ref.folder}/{manifest.files[0].name.split('/')[0]}")
    return folder, {"policy": folder, "weight_version": version, "store": run.store.url}


def untrained_so_far(run: Run, total: int) -> Untrained:
    """The number of iterations in which nothing was trained, of `total` committed ones, by the
    record of the last."""
    return untrained(run, run.record(total - 1) if total else None)


async def publish_evaluation(session: Session, before: str) -> list[str]:
    """Lines of the newest evaluation (and of that at the start of RL), also as an artifact: for a
    person who must approve the next phase.
    """
    run, done = session.run, session.progress.num_done("rl")
    evaluated = await asyncio.to_thread(evaluations, run, done)
    newest = with_errors(evaluated[-1][1] if evaluated else {})
    lines = [f"  {name:32s} {value}" for name, value in sorted(newest.items())]
    lines = before_after(evaluated) or lines or ["  no evaluation yet"]
    title = f"# {run.name} waits for an approval before {before}"
    await _show(
        f"{_key(session)}-approval",
        [title, "", *_preformatted(lines), "Resume: the button above"],
        "The evaluation to approve",
    )
    return lines


async def publish_gate(session: Session, passed: bool | None, lines: list[str]) -> None:
    """Says what the gate found, and shows it as an artifact of the flow run. `passed`: None where
    it could not judge.
    """
    for line in lines:
        say(line)
    verdict = {True: "passed its gate", False: "failed its gate", None: "was not judged"}[passed]
    markdown = [f"# {session.run.name} {verdict}", "", *_preformatted(lines)]
    await _show(f"{_key(session)}-gate", markdown, "The policy beside the one to beat")


async def revoke(session: Session, version: int, said: str) -> None:
    """Tags a registered policy as revoked in MLflow, and then sends the event. `said`: what the
    gate says of it.
    """
    folder, facts = await asyncio.to_thread(_of_policy, session.run, version)
    here = contextvars.copy_context()  # of the flow run, for the tracker's thread
    failed = partial(tell, session.run.name, "gate.failed", said, facts)
    session.tracker.judged(folder, "revoked", lambda: here.run(failed))


async def ended(session: Session, phases: tuple[str, ...], data: Any, reason: str = "", gate_failed: str = "") -> Any:
    """Returns a flow's data at its end, in a state that says why the phases ended, or that there
    was nothing to do.

    `GateFailed`: the policy is registered, and not promoted. `Stopped`: a budget or a stop rule
    ended the phases, for `reason`. `NothingTrained`: RL is complete, and no iteration kept anything
    to train. `NothingToTrain`: everything was committed before this start.
    """
    session.tracker.stopped = reason
    if reason:
        context = FlowRunContext.get()
        if (
            context is None or context.flow_run is None or context.flow_run.parent_task_run_id is None
        ):  # else the outer flow reports it too
            tell(session.run.name, "run.stopped", reason)
    if reason or gate_failed:
        return Completed(name="GateFailed" if gate_failed else "Stopped", message=gate_failed or reason, data=data)
    skipped = await asyncio.to_thread(
        untrained_so_far, session.run, session.progress.num_done("rl") if "rl" in phases else 0
    )
    if skipped.is_all:
        session.tracker.stopped = NOTHING_TRAINED.format(skipped=skipped)
        return Completed(name="NothingTrained", message=session.tracker.stopped, data=data)
    counts = await asyncio.to_thread(lambda: {phase: session.progress.num_done(phase) for phase in phases})
    # an earlier start of this flow run, or its part before a gate, may have trained
    maybe_trained = flow_run.run_count > 1 or session.config.approval
    if maybe_trained or any(session.at_start[phase] != count for phase, count in counts.items()):
        return data
    units = {"sft": "SFT segments", "rl": "RL iterations"}
    committed = " and ".join(f"{count} {units[phase]}" for phase, count in counts.items())
    message = f"run {session.run.name} was complete: {committed} were committed before this start"
    return Completed(name="NothingToTrain", message=message, data=data)


def _key(session: Session) -> str:
    """The run's name in the form of Prefect's artifact keys."""
    return session.run.name.lower().replace("_", "-").replace(".", "-")


def _preformatted(lines: list[str]) -> list[str]:
    return ["```text", *lines, "```", ""] if lines else []


def image(kind: str, data: bytes) -> str:
    """An image inside markdown: an artifact of type image shows its whole address beside itself."""
    return f"![curves](data:image/{kind};base64,{base64.b64encode(data).decode()})"
