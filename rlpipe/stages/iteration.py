"""The result of an iteration: the counts of its rollouts, and its commit, `iteration.json`.

After this commit a resume starts with the next iteration.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from rlpipe.base.errors import UserError
from rlpipe.base.manifests import IterationRecord
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict, Metrics
from rlpipe.loop.session import Session
from rlpipe.loop.stage import now
from rlpipe.records.rollout import CarriedRollout, Group, is_finished
from rlpipe.store.limits import add_iteration, add_untrained, best_so_far, cost, gpus_held, own_record, spent_before

CURVE_POINTS_MAX = 64
# points that are never thinned: report/reward.py finds a fall of the reward by them
CURVE_NEWEST = 36


class Before(NamedTuple):
    """The artifacts of an iteration that the next one needs: its prompts, and its batch.

    `prompts` is the last round's: it holds the position from which the cursor goes on.
    """

    prompts: ArtifactRef | None
    batch: ArtifactRef | None


def committed_before(session: Session, iteration: int) -> Before:
    """The artifacts of the previous iteration; UserError when it is not committed."""
    if iteration == 0:
        return Before(None, None)
    record = session.run.iteration(iteration - 1)
    if record is None:
        raise UserError(
            f"iteration {iteration - 1} of run {session.run.name} is not committed: run it before iteration {iteration}"
        )
    return Before(record.artifacts["prompts"], record.artifacts["batch"])


async def commit_iteration(
    session: Session, iteration: int, artifacts: dict[str, ArtifactRef], metrics: JsonDict
) -> IterationRecord:
    """The record of an iteration, committed after the policy that it names; the existing record
    where it was committed before.

    `artifacts`: the iteration's prompts, batch, policy and, when there is one, evaluation.
    """
    assert artifacts.keys() <= {"prompts", "batch", "policy", "evaluation"}, (
        f"no artifacts of an iteration: {sorted(artifacts)}"
    )
    named = {name: value for name, value in metrics.items() if "/" in name}  # the rest is bookkeeping of the stages
    record = await asyncio.to_thread(session.run.iteration, iteration)
    if record is None:
        record = await asyncio.to_thread(_record, session, iteration, artifacts, named)
        session.commits.record(session.run.iteration_key(iteration), record)
    session.commits.then(lambda: asyncio.to_thread(session.retention.committed, record))
    return record


def _record(session: Session, iteration: int, artifacts: dict[str, ArtifactRef], metrics: Metrics) -> IterationRecord:
    run = session.run
    previous = run.iteration(iteration - 1) if iteration else None
    made = ("state", "gap", "teacher_logprobs") if run.config.teachers else ("state", "gap")
    beside = {stage: run.artifact("rl", iteration, stage) for stage in made}
    artifacts = artifacts | {stage: artifact[0] for stage, artifact in beside.items() if artifact is not None}
    metrics = metrics | time_metrics(session, iteration, metrics)
    metrics |= add_iteration(spent_before(run, iteration), metrics, gpus_held(run.config, "rl"))
    metrics |= cost(run.config, metrics)
    metrics |= add_untrained(run, iteration, metrics["train/num_tokens"])
    return IterationRecord(
        run=run.name,
        iteration=iteration,
        weight_version=iteration + 1,
        artifacts=artifacts,
        state_iteration=iteration if "state" in artifacts else (previous.state_iteration if previous else -1),
        metrics=metrics,
        curve=_curve(previous.curve if previous else [], iteration, metrics["rollout/reward_mean"]),
        best=best_so_far(own_record(run, iteration - 1), iteration, metrics["rollout/reward_mean"]),
        ended_at=now(),
        lease=run.lease.number if run.lease else None,
    )


def time_metrics(session: Session, iteration: int, metrics: Metrics) -> Metrics:
    """Seconds since the previous commit, in each stage and in none, and the tokens per second that
    follow from them.
    """
    times = session.clock.at_commit(iteration)
    for name, tokens, verb in (("rollout", "rollout/num_tokens", "generate"), ("train", "train/num_tokens", "train")):
        if times.get(f"time/{verb}_s") and tokens in metrics:
            times[f"throughput/{name}_tokens_per_s"] = round(metrics[tokens] / times[f"time/{verb}_s"], 1)
    return times


def _curve(before: list[list[float]], iteration: int, reward: float) -> list[list[float]]:
    """The [iteration, reward] points so far, so that the curve can be drawn from any record alone;
    older points are thinned to bound their number.
    """
    points = [*before, [iteration, reward]]
    return points if len(points) <= CURVE_POINTS_MAX else [*points[:-CURVE_NEWEST:2], *points[-CURVE_NEWEST:]]


def staleness(trained: Group, version: int) -> Metrics:
    """Staleness of the trained rollouts, in weight versions; below 0 for rollouts of a later policy
    of another run.
    """
    lags = [version - rollout.weight_version for rollout in trained] or [0]
    return {"rollout/staleness_mean": sum(lags) / len(lags), "rollout/staleness_max": max(lags)}


def account(
    groups: list[Group],
    trained: Group,
    filtered: Group,
    carried: list[CarriedRollout],
    iteration: int,
    version: int,
    num_left_out: int = 0,
) -> Metrics:
    """The counts of the rollouts of an iteration that `version` sampled: `num_sampled = num_trained
    + num_filtered + num_left_out + num_carried + num_expired`.

    A rollout left out for a fault is in no other class, whether its group was trained or dropped.
    Rollouts that finished or got a token are counted; the others, of groups that go on, are
    `num_unsampled`. `num_continued`: partial rollouts that came from the previous iteration.
    AssertionError when a rollout is in no class, or in two.
    """
    rollouts = [rollout for group in groups for rollout in group]
    finished = {id(rollout) for group in groups if is_finished(group) for rollout in group}
    counts = {
        "num_sampled": sum(id(rollout) in finished or len(rollout.completion_tokens) > 0 for rollout in rollouts),
        "num_trained": len(trained),
        "num_filtered": len(filtered),
        "num_left_out": num_left_out,
        "num_carried": sum(len(rollout.completion_tokens) > 0 for rollout in carried),
        "num_expired": sum(rollout.num_tokens_expired > 0 for rollout in carried),
        "num_unsampled": sum(
            not len(rollout.completion_tokens) and not rollout.num_tokens_expired for rollout in carried
        ),
        "num_continued": sum(rollout.continues_in(version) for rollout in rollouts),
        "num_tokens_carried": sum(len(rollout.completion_tokens) for rollout in carried),
        "num_tokens_expired": sum(rollout.num_tokens_expired for rollout in carried),
        "num_tokens_stale": sum(
            len(rollout.completion_tokens) - rollout.num_tokens_of(iteration) for rollout in trained
        ),
    }
    ended = sum(counts[name] for name in ("num_trained", "num_filtered", "num_left_out", "num_carried", "num_expired"))
    assert counts["num_sampled"] == ended, f"rollouts were lost or counted twice: {counts}"
    assert len(rollouts) == ended + counts["num_unsampled"], f"{len(rollouts)} rollouts, accounted for: {counts}"
    return {f"rollout/{name}": count for name, count in counts.items()}
