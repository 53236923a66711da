"""The stages score and filter."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter

import numpy as np

from rlpipe.advantages import group_advantages
from rlpipe.filters import apply_filters, resolve_filters
from rlpipe.rollouts import BATCH, PROMPTS, ROLLOUTS, SCORES, prompt_of, read_rows, to_parquet
from rlpipe.stages.commit import Produced, StageKey, run_stage
from rlpipe.stages.session import Session
from rlpipe.store.artifacts import read_manifest, write_bytes
from rlpipe.types import ArtifactRef, JsonDict, StageResult, UserError

log = logging.getLogger(__name__)


def score_rows(session: Session, prompts: dict[str, JsonDict], rows: list[JsonDict]) -> list[JsonDict]:
    """The rows with reward, reward_parts and reward_fault. A rollout that could not be scored gets the fallback, counted.

    UserError when it has no fallback (`rl.reward_fallback = none`), or when not a single rollout could be scored.
    """
    pool, fallback = session.rewards(), session.config.rl.reward_fallback
    scores = pool.score([{"prompt": prompts[row["prompt_id"]], "completion": row["completion"]} for row in rows])
    assert len(scores) == len(rows), "a score was lost"
    faults = Counter(score.reason for score in scores if score.reason)
    if faults:
        log.warning(
            "%d of %d rollouts could not be scored %s; last error: %s", faults.total(), len(rows), dict(faults), pool.last_error
        )
    if rows and (faults.total() == len(rows) or (faults and fallback is None)):
        raise UserError(
            f"rl.rewards={list(session.config.rl.rewards)}: {faults.total()} of {len(rows)} rollouts could not be scored "
            f"({dict(faults)}; {pool.last_error}). Mend the reward and start again: what was sampled is kept"
        )
    return [
        {
            **row,
            "reward": fallback if score.reward is None else score.reward,
            "reward_parts": json.dumps(score.parts, sort_keys=True),
            "reward_fault": score.reason or "",
        }
        for row, score in zip(rows, scores, strict=True)
    ]


async def score(
    session: Session, iteration: int, round_index: int, prompts: ArtifactRef, rollouts: list[ArtifactRef]
) -> StageResult:
    """The rewards of one round's rollouts."""

    def produce_sync(folder: str, attempt: str) -> Produced:
        store = session.run.store
        known = {row["prompt_id"]: prompt_of(row) for row in _rows(session, prompts, PROMPTS)}
        rows = [row for ref in rollouts for row in _rows(session, ref, ROLLOUTS)]
        scored = score_rows(session, known, rows)
        record = write_bytes(store, folder, attempt, "scores.parquet", to_parquet(scored, SCORES))
        return Produced([record], _score_metrics(session, scored))

    async def produce(folder: str, attempt: str) -> Produced:
        return await asyncio.to_thread(produce_sync, folder, attempt)

    inputs = {"prompts": prompts} | {f"rollouts-{shard:03d}": ref for shard, ref in enumerate(rollouts)}
    return await run_stage(session, StageKey("rl", iteration, f"scores/round-{round_index}"), inputs, produce)


def _rows(session: Session, ref: ArtifactRef, schema: object) -> list[JsonDict]:
    manifest = read_manifest(session.run.store, ref.folder, ref.sha256)
    return read_rows(session.run.store, ref.folder, manifest, schema)


def _score_metrics(session: Session, rows: list[JsonDict]) -> JsonDict:
    rewards = np.array([row["reward"] for row in rows])
    lengths = np.array([len(row["completion_tokens"]) for row in rows])
    if not rewards.any() and lengths.any():
        log.warning("all rewards are zero though completions are not empty: a broken grader is the usual cause")
    parts: dict[str, list[float]] = {}
    for row in rows:
        for name, value in json.loads(row["reward_parts"]).items():
            parts.setdefault(name, []).append(value)
    faults = Counter(row["reward_fault"] for row in rows if row["reward_fault"])
    return {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/pass_rate": float((rewards >= session.config.evaluation.pass_threshold).mean()),
        "rollout/length_tokens_mean": float(lengths.mean()),
        "rollout/length_tokens_max": int(lengths.max()),
        "rollout/truncated_fraction": float(np.mean([row["finish_reason"] == "length" for row in rows])),
        "rollout/num_tokens": int(lengths.sum()),
        **{f"rollout/reward_{name.rsplit(':', 1)[-1]}_mean": float(np.mean(values)) for name, values in parts.items()},
        **{f"rollout/fault_{reason}": count for reason, count in faults.items()},
    }


def over_rounds(rounds: list[JsonDict]) -> JsonDict:
    """The score metrics of an iteration: counts add up, maxima are taken, the rest is the mean of the (equally large) rounds."""
    merged: JsonDict = {}
    for name in {name for told in rounds for name in told}:
        values = [told[name] for told in rounds if name in told]
        if name.startswith("rollout/fault_") or name == "rollout/num_tokens":
            merged[name] = sum(values)
        else:
            merged[name] = max(values) if name.endswith("_max") else float(np.mean(values))
    return merged


async def filter_groups(session: Session, iteration: int, round_index: int, scores: list[ArtifactRef]) -> StageResult:
    """The groups kept of all rounds so far, with advantages; its metrics say whether another round is needed."""

    def produce_sync(folder: str, attempt: str) -> Produced:
        rl = session.config.rl
        rows = [row for ref in scores for row in _rows(session, ref, SCORES)]
        groups = _groups(rows)
        kept, dropped = apply_filters(groups, resolve_filters(rl.filters))
        assert len(kept) + len(dropped) == len(groups), "a group was lost or counted twice"
        needs_more = len(kept) < rl.groups_min and round_index + 1 < rl.rounds_max
        if len(kept) < rl.groups_min and not needs_more and rl.on_too_few == "fail":
            raise UserError(f"rl.groups_min={rl.groups_min}: only {len(kept)} groups survived {round_index + 1} rounds "
                            f"(dropped: {dict(Counter(dropped.values()))}); loosen rl.filters or set rl.on_too_few = 'train'")  # fmt: skip
        batch = [row for index in kept for row in groups[index]]
        record = write_bytes(
            session.run.store, folder, attempt, "batch.parquet", to_parquet(_with_advantages(session, batch), BATCH)
        )
        reasons = {str(groups[index][0]["group_index"]): reason for index, reason in dropped.items()}
        return Produced([record], _filter_metrics(kept, dropped, round_index) | {"needs_more": needs_more, "dropped": reasons})

    async def produce(folder: str, attempt: str) -> Produced:
        return await asyncio.to_thread(produce_sync, folder, attempt)

    inputs = {f"scores-{index}": ref for index, ref in enumerate(scores)}
    return await run_stage(session, StageKey("rl", iteration, f"batch/round-{round_index}"), inputs, produce)


def _groups(rows: list[JsonDict]) -> list[list[JsonDict]]:
    groups: dict[int, list[JsonDict]] = {}
    for row in rows:
        groups.setdefault(row["group_index"], []).append(row)
    return list(groups.values())


def _with_advantages(session: Session, rows: list[JsonDict]) -> list[JsonDict]:
    rewards_B = np.array([row["reward"] for row in rows])
    group_index_B = np.array([row["group_index"] for row in rows], dtype=np.int64)
    advantages_B = group_advantages(rewards_B, group_index_B, estimator=session.config.rl.estimator)
    return [{**row, "advantage": float(advantage)} for row, advantage in zip(rows, advantages_B, strict=True)]


def _filter_metrics(kept: list[int], dropped: dict[int, str], round_index: int) -> JsonDict:
    reasons = {f"rollout/groups_dropped_{reason}": count for reason, count in Counter(dropped.values()).items()}
    return {"rollout/groups_kept": len(kept), "rollout/rounds": round_index + 1, **reasons}
