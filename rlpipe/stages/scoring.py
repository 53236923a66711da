"""The stages score and filter."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping

import numpy as np

from rlpipe.advantages import rollout_means, token_advantages
from rlpipe.filters import TRUNCATED, ResolvedFilter, apply_filters, resolve_filters
from rlpipe.rewards.score import Score
from rlpipe.rollouts import (
    BATCH,
    CARRIED,
    KEPT_REWARDS,
    PROMPTS,
    ROLLOUTS,
    SCORES,
    grouped,
    prompt_of,
    read_rows,
    read_rows_if_any,
)
from rlpipe.stages.carrying import account, carried_rows, finished, num_sampled_of, staleness
from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.curriculum import write_pass_rates
from rlpipe.stages.session import Session
from rlpipe.stages.survivors import Finished, ScoreKey, Survivors
from rlpipe.stages.turns import environment_metrics
from rlpipe.types import ArtifactRef, JsonDict, StageResult, UserError

log = logging.getLogger(__name__)
NO_SCORE: JsonDict = {"reward": None, "reward_parts": "{}", "reward_fault": ""}


def score_rows(
    session: Session, prompts: dict[str, JsonDict], rows: list[JsonDict], known: Mapping[ScoreKey, Score] | None = None
) -> list[JsonDict]:
    """The rows with reward, reward_parts and reward_fault. A rollout that could not be scored gets the fallback, counted.

    UserError when it has no fallback (`rl.reward_fallback = none`), or when not a single rollout could be scored.
    """
    pool, fallback = session.rewards, session.config.rl.reward_fallback
    scores = _scores(session, prompts, rows, known or {})
    faults = Counter(score.reason for score in scores if score.reason)
    if faults:
        log.warning(
            "%d of %d rollouts could not be scored %s; last error: %s", faults.total(), len(rows), dict(faults), pool.last_error
        )
    if rows and (faults.total() == len(rows) or (faults and fallback is None)):
        raise UserError(_unscored(session, faults, len(rows), pool.last_error))
    return [_scored(session, row, score) for row, score in zip(rows, scores, strict=True)]


def _unscored(session: Session, faults: Counter[str], num_rows: int, last_error: str | None) -> str:
    told = f"{faults.total()} of {num_rows} rollouts could not be scored ({dict(faults)}; {last_error or 'the log says which'})"
    if all(reason.startswith("environment_") for reason in faults):
        return (
            f"rl.environment={session.config.rl.environment!r}: {told}. Mend the environment and start again; rollouts that are "
            f"committed with their faults stay so: sample them anew in a fork of {session.run.name} from an iteration before them"
        )
    return f"rl.rewards={list(session.config.rl.rewards)}: {told}. Mend the reward and start again: what was sampled is kept"


def _scores(
    session: Session, prompts: dict[str, JsonDict], rows: list[JsonDict], known: Mapping[ScoreKey, Score]
) -> list[Score]:
    """The scores of rollouts, in order; those that are known are not computed again."""
    told = [_environment_fault(row) or known.get(_score_key(row)) for row in rows]
    unknown = [row for row, score in zip(rows, told, strict=True) if score is None]
    items = [{"prompt": prompts[row["prompt_id"]], "completion": row["completion"], "rollout": _facts(row)} for row in unknown]
    computed = iter(session.rewards.score(items))
    scores = [next(computed) if score is None else score for score in told]
    assert next(computed, None) is None, "a score was lost"
    return scores


def _facts(row: JsonDict) -> JsonDict:
    """What a reward may know of a rollout beside its text; `environment`: what that has recorded, none without one."""
    environment = json.loads(row["environment"]) if row["environment"] else None
    return {"num_tokens": len(row["completion_tokens"]), "finish_reason": row["finish_reason"], "environment": environment}


def _environment_fault(row: JsonDict) -> Score | None:
    """A rollout that its environment failed has no score."""
    fault = json.loads(row["environment"])["fault"] if row["environment"] else ""
    return Score(None, {}, fault) if fault else None


def _score_key(row: JsonDict) -> ScoreKey:
    return row["prompt_id"], row["completion"], json.dumps(_facts(row), sort_keys=True)


def _scored(session: Session, row: JsonDict, score: Score) -> JsonDict:
    return {
        **row,
        "reward": session.config.rl.reward_fallback if score.reward is None else score.reward,
        "reward_parts": json.dumps(score.parts, sort_keys=True),
        "reward_fault": score.reason or "",
    }


async def judge(session: Session, survivors: Survivors, prompt: JsonDict, group: list[JsonDict]) -> None:
    """Scores and filters one group while others are still sampled, and counts it when it survives.

    The groups that finish while others are scored are scored together. The scores are kept for the stage score, which also
    decides what to do about a rollout that cannot be scored.
    """
    if not finished(group):
        return
    mine = Finished(prompt, group, asyncio.get_running_loop().create_future())
    survivors.waiting.append(mine)
    try:
        async with survivors.judging:
            if not mine.survives.done():  # else who had the lock before has judged it too
                ready = [each for each in survivors.waiting if not each.survives.done()]
                told = await asyncio.to_thread(_survive, session, survivors, ready)
                for each, survives in zip(ready, told, strict=True):
                    each.survives.set_result(survives)
    finally:  # also when this failed or is not wanted any more: the others then judge themselves
        survivors.waiting.remove(mine)
    if mine.survives.result():
        survivors.add(group[0]["group_index"])


def _survive(session: Session, survivors: Survivors, ready: list[Finished]) -> list[bool]:
    """Which of the groups are kept, each by itself: filters may look at one group only."""
    rows = [row for each in ready for row in each.group]
    prompts = {each.prompt["prompt_id"]: prompt_of(each.prompt) for each in ready}
    scores = _scores(session, prompts, rows, survivors.scores)
    survivors.scores.update({_score_key(row): score for row, score in zip(rows, scores, strict=True)})
    scored = iter([_scored(session, row, score) for row, score in zip(rows, scores, strict=True)])
    groups = [[next(scored) for _ in each.group] for each in ready]  # not `grouped`: a group may be there twice, after a retry
    whole = [all(row["reward"] is not None for row in group) for group in groups]
    return [ok and bool(apply_filters([group], _filters(session))[0]) for ok, group in zip(whole, groups, strict=True)]


async def score(
    session: Session, iteration: int, round_index: int, prompts: ArtifactRef, rollouts: list[ArtifactRef]
) -> StageResult:
    """The rewards of one round's rollouts; none for those of a group that was cut short."""

    def produce(attempt: Attempt) -> Produced:
        store, survivors = session.run.store, session.survivors.get((iteration, round_index))
        known = {row["prompt_id"]: prompt_of(row) for row in read_rows(store, prompts, "prompts.parquet", PROMPTS)}
        rows = [row for ref in rollouts for row in read_rows(store, ref, "rollouts.parquet", ROLLOUTS)]
        groups = grouped(rows)
        kept = {place: reward for ref in rollouts for place, reward in _kept_rewards(session, ref).items()}
        whole = [row for group in groups if finished(group) for row in group if _place(row) not in kept]
        scored = iter(score_rows(session, known, whole, survivors.scores if survivors else None) if whole else [])
        told = [
            {**row, **kept[_place(row)]} if _place(row) in kept else next(scored) if finished(group) else {**row, **NO_SCORE}
            for group in groups
            for row in group
        ]
        assert next(scored, None) is None and len(told) == len(rows), "a score was lost"
        return Produced([attempt.write_rows("scores.parquet", told, SCORES)], _score_metrics(session, iteration, told))

    inputs = {"prompts": prompts} | {f"rollouts-{shard:03d}": ref for shard, ref in enumerate(rollouts)}
    return await run_stage(session, StageKey("rl", iteration, f"scores/round-{round_index}"), inputs, produce)


def _place(row: JsonDict) -> tuple[int, int]:
    return row["group_index"], row["rollout_index"]


def _kept_rewards(session: Session, rollouts: ArtifactRef) -> dict[tuple[int, int], JsonDict]:
    """The rewards that imported rollouts came with, where their prompts are not known."""
    rows = read_rows_if_any(session.run.store, rollouts, "rewards.parquet", KEPT_REWARDS)
    return {_place(row): {"reward": row["reward"], "reward_parts": row["reward_parts"], "reward_fault": ""} for row in rows}


def _score_metrics(session: Session, iteration: int, told: list[JsonDict]) -> JsonDict:
    rows = [row for row in told if row["reward"] is not None]
    assert rows, "a round ends when groups have survived it, and these are finished"
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
        "num_scored": len(rows),
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/pass_rate": float((rewards >= session.config.evaluation.pass_threshold).mean()),
        "rollout/length_tokens_mean": float(lengths.mean()),
        "rollout/length_tokens_max": int(lengths.max()),
        "rollout/truncated_fraction": float(np.mean([row["finish_reason"] == "length" for row in rows])),
        "rollout/num_tokens": sum(num_sampled_of(row, iteration) for row in told),
        **{f"rollout/reward_{name}_mean": float(np.mean(values)) for name, values in parts.items()},
        **{f"rollout/{name}": value for name, value in environment_metrics(rows).items()},
        **{f"rollout/fault_{reason}": count for reason, count in faults.items()},
    }


def over_rounds(rounds: list[JsonDict]) -> JsonDict:
    """The score metrics of an iteration: counts add up, maxima are taken, the rest is the mean, each rollout weighing the same."""
    merged: JsonDict = {}
    largest = max(told["num_scored"] for told in rounds)
    for name in {name for told in rounds for name in told}:
        values, weights = zip(*[(told[name], told["num_scored"] / largest) for told in rounds if name in told], strict=True)
        if name.startswith("rollout/fault_") or name in ("rollout/num_tokens", "num_scored"):
            merged[name] = sum(values)
        else:
            merged[name] = max(values) if name.endswith("_max") else float(np.average(values, weights=weights))
    return merged


async def filter_groups(
    session: Session,
    iteration: int,
    round_index: int,
    prompts: list[ArtifactRef],
    scores: list[ArtifactRef],
    pass_rates: ArtifactRef | None = None,
    last: bool = False,
) -> StageResult:
    """The groups kept of all rounds so far, with advantages, and those to be carried: both lists have one artifact a round.

    The metrics say whether another round is needed, and where every rollout went. `pass_rates`, for a curriculum, is the batch
    of the iteration before: its rates, brought up to date, lie beside this batch. `last`: there is no other round to be had.
    """

    def produce(attempt: Attempt) -> Produced:
        rl, store = session.config.rl, session.run.store
        every = grouped([row for ref in scores for row in read_rows(store, ref, "scores.parquet", SCORES)])
        groups = [group for group in every if finished(group)]
        kept, dropped = apply_filters(groups, _filters(session))
        assert len(kept) + len(dropped) == len(groups), "a group was lost or counted twice"
        needs_more = len(kept) < rl.groups_min and round_index + 1 < rl.rounds_max and not last
        if len(kept) < rl.groups_min and not needs_more and rl.on_too_few == "fail":
            raise UserError(f"rl.groups_min={rl.groups_min}: only {len(kept)} groups survived {round_index + 1} rounds "
                            f"(dropped: {dict(Counter(dropped.values()))}); loosen rl.filters or set rl.on_too_few = 'train'")  # fmt: skip
        batch = [row for index in kept for row in groups[index]]
        filtered = [row for index in dropped for row in groups[index]]
        carried = _carried(session, iteration, prompts, [group for group in every if not finished(group)])
        masked = masked_rows(batch) if rl.mask_truncated else batch
        rows = with_advantages(masked, rl.estimator, rl.gamma)
        files = [attempt.write_rows("batch.parquet", rows, BATCH)]
        if carried:
            files.append(attempt.write_rows("carried.parquet", carried, CARRIED))
        rates, known = write_pass_rates(session, attempt, pass_rates, groups)
        reasons = {str(groups[index][0]["group_index"]): reason for index, reason in dropped.items()}
        metrics = _filter_metrics(kept, dropped, round_index) | account(every, batch, filtered, carried, iteration)
        metrics |= staleness(batch, iteration) | {"rollout/groups_carried": len(every) - len(groups)}
        metrics["rollout/num_masked"] = sum(new is not row for new, row in zip(masked, batch, strict=True))
        return Produced(files + rates, metrics | known | {"needs_more": needs_more, "dropped": reasons})

    inputs = {
        f"{name}-{index}": ref for name, refs in (("prompts", prompts), ("scores", scores)) for index, ref in enumerate(refs)
    } | ({"pass_rates": pass_rates} if pass_rates else {})
    return await run_stage(session, StageKey("rl", iteration, f"batch/round-{round_index}"), inputs, produce)


def _carried(session: Session, iteration: int, prompts: list[ArtifactRef], unfinished: list[list[JsonDict]]) -> list[JsonDict]:
    """The rows of carried.parquet: what goes on in the next iteration."""
    if not unfinished:
        return []
    known = {row["prompt_id"]: row for ref in prompts for row in read_rows(session.run.store, ref, "prompts.parquet", PROMPTS)}
    staleness_max = session.config.rl.staleness_max
    return [
        row for group in unfinished for row in carried_rows(group, known[group[0]["prompt_id"]], iteration + 1, staleness_max)
    ]


def _filters(session: Session) -> list[ResolvedFilter]:
    return resolve_filters(session.config.rl.filters, mask_truncated=session.config.rl.mask_truncated)


def masked_rows(rows: list[JsonDict]) -> list[JsonDict]:
    """The rows, with no token trained in those that the token limit cut off; the others are the same objects."""
    return [
        {**row, "loss_mask": [0] * len(row["loss_mask"])}
        if row["finish_reason"] == TRUNCATED and any(row["loss_mask"])
        else row
        for row in rows
    ]


def with_advantages(rows: list[JsonDict], estimator: str, gamma: float) -> list[JsonDict]:
    """The rows with `advantage`: the mean over the rollout's scored tokens of what the trainer computes, without a KL term."""
    rewards_B = np.array([row["reward"] for row in rows])
    group_index_B = np.array([row["group_index"] for row in rows], dtype=np.int64)
    lengths_B = np.array([np.count_nonzero(row["loss_mask"]) for row in rows], dtype=np.int64)
    advantages_N = token_advantages(rewards_B, group_index_B, lengths_B, estimator=estimator, gamma=gamma)
    advantages_B = rollout_means(advantages_N, lengths_B)
    return [{**row, "advantage": float(advantage)} for row, advantage in zip(rows, advantages_B, strict=True)]


def _filter_metrics(kept: list[int], dropped: dict[int, str], round_index: int) -> JsonDict:
    reasons = {f"rollout/groups_dropped_{reason}": count for reason, count in Counter(dropped.values()).items()}
    return {"rollout/groups_kept": len(kept), "rollout/rounds": round_index + 1, **reasons}
