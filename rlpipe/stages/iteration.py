"""The commit of a whole iteration: `iteration.json`, after which a resume starts with the next one."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

from rlpipe.stages.limits import add_iteration, best_so_far, gpus_held, own_record, spent_before
from rlpipe.stages.session import Session
from rlpipe.types import ArtifactRef, JsonDict, canonical_json

CURVE_POINTS_MAX = 64


async def commit_iteration(session: Session, iteration: int, artifacts: dict[str, ArtifactRef], metrics: JsonDict) -> JsonDict:
    """Commits an iteration and returns its record (the standing one when it was committed before).

    `artifacts`: the iteration's prompts, batch, policy and, when there is one, evaluation.
    """
    return await asyncio.to_thread(_commit, session, iteration, artifacts, metrics)


def _commit(session: Session, iteration: int, artifacts: dict[str, ArtifactRef], metrics: JsonDict) -> JsonDict:
    run = session.run
    previous = run.iteration_record(iteration - 1) if iteration else None
    state = run.artifact("rl", iteration, "state")
    if state is not None:
        artifacts = artifacts | {"state": state[0]}
    metrics = {name: value for name, value in metrics.items() if "/" in name}  # the rest is bookkeeping of the stages
    metrics |= time_metrics(session, metrics)
    metrics |= add_iteration(spent_before(run, iteration), metrics, gpus_held(run.config, "rl"))
    record = {
        "schema_version": 1,
        "run": run.name,
        "iteration": iteration,
        "weight_version": iteration + 1,
        "artifacts": {name: ref.as_json() for name, ref in artifacts.items()},
        "state_iteration": iteration if state is not None else (previous["state_iteration"] if previous else -1),
        "metrics": metrics,
        "curve": _curve(previous, iteration, metrics),
        "best": best_so_far(own_record(run, iteration - 1), iteration, metrics["rollout/reward_mean"]),
        "ended_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    run.store.create(run.iteration_key(iteration), canonical_json(record))
    standing = run.iteration_record(iteration)
    assert standing is not None, f"iteration {iteration} was committed and is not there"
    return standing


def time_metrics(session: Session, metrics: JsonDict) -> JsonDict:
    """Seconds per stage verb and in none, and the tokens per second they mean."""
    seconds, total_s = session.seconds, time.monotonic() - session.began
    told = {f"time/{verb}_s": round(value, 4) for verb, value in seconds.items()}
    told["time/iteration_s"] = round(total_s, 4)
    told["time/orchestration_s"] = round(total_s - sum(seconds.values()), 4)
    for name, tokens, verb in (("rollout", "rollout/num_tokens", "generate"), ("train", "train/num_tokens", "train")):
        if seconds.get(verb) and tokens in metrics:
            told[f"throughput/{name}_tokens_per_s"] = round(metrics[tokens] / seconds[verb], 1)
    return told


def _curve(previous: JsonDict | None, iteration: int, metrics: JsonDict) -> list[list[float]]:
    """[iteration, reward] points so far, thinned to a bounded number: each record can draw the curve by itself."""
    points = [*(previous["curve"] if previous else []), [iteration, metrics["rollout/reward_mean"]]]
    return points if len(points) <= CURVE_POINTS_MAX else points[::2]
