"""The stage score: the rollouts of a round get their rewards."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import Metrics
from rlpipe.config.faults import BY_CAUSE, cause_of_fault
from rlpipe.config.passing import passing_reward
from rlpipe.config.training import RlConfig
from rlpipe.loop.sampling_round import ScoreKey, Scores
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, stage
from rlpipe.records.kinds import Float, Int32, Json, Text
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import ROLLOUTS, SCORE_COLUMNS, SCORES, TRUNCATED, WORLD_FAULTS, Rollout
from rlpipe.records.turns import turns_of
from rlpipe.rewards.pool import RewardPool
from rlpipe.rewards.score import Item, RolloutFacts, Score, facts_of
from rlpipe.stages.rollouts import environment_metrics
from rlpipe.stages.sampling import prompts_by_id
from rlpipe.store.artifacts import read_records, read_records_if_any

log = logging.getLogger(__name__)


def score_rollouts(
    session: Session, prompts: dict[str, Prompt], rollouts: list[Rollout], known: Scores, use: str = "rl"
) -> list[Rollout]:
    """The rollouts with their rewards, those of `use` (rl or evaluation).

    A rollout that could not be scored gets the reward that `rl.faults` has for it, and the reason
    in `reward_fault`. Scores in `known` are not computed again; new ones are added to it.

    UserError when a fault stops the run by `rl.faults`, or when not a single rollout could be
    scored.
    """
    pool = session.rewards(use)
    scored = rewarded(session, prompts, rollouts, known, pool)
    faults = Counter(rollout.reward_fault for rollout in scored if rollout.reward_fault)
    if faults:
        counts = f"{faults.total()} of {len(rollouts)} rollouts could not be scored"
        messages = (
            known[score_key(rollout, _facts(session, rollout))].message for rollout in scored if rollout.reward_fault
        )
        last_error = next(filter(None, messages), None)
        log.warning("%s %s; last error: %s", counts, dict(faults), last_error)
        if faults.total() == len(rollouts) or session.config.rl.stops_at(faults):
            if session.sampling_round:
                session.sampling_round.forget_scores()
            raise UserError(
                _unscored(session, use, faults, f"{counts} ({dict(faults)}; {last_error or 'the log says which'})")
            )
    return scored


def _unscored(session: Session, use: str, faults: Counter[str], counts: str) -> str:
    if all(reason.startswith(WORLD_FAULTS) for reason in faults):
        return (
            f"{session.config.rl.world}: {counts}. Mend it and start again; rollouts that are committed with their"
            f" faults stay so: sample them anew in a fork of {session.run.name} from an iteration before them"
        )
    section = "evaluation" if use == "evaluation" and session.config.evaluation.rewards else "rl"
    return (
        f"{section}.rewards={list(session.config.rewards(use))}: {counts}. Mend the reward and start again: what was"
        " sampled is kept"
    )


def rewarded(
    session: Session, prompts: dict[str, Prompt], rollouts: list[Rollout], known: Scores, pool: RewardPool
) -> list[Rollout]:
    """The rollouts with their scores, or the reward of their fault.

    Scores in `known` are not computed again; new ones are added to it.
    """
    facts = [_facts(session, rollout) for rollout in rollouts]
    keys = [score_key(rollout, known_of) for rollout, known_of in zip(rollouts, facts, strict=True)]
    scores = [_environment_fault(rollout) or known.get(key) for rollout, key in zip(rollouts, keys, strict=True)]
    items: list[Item] = [
        {"prompt": prompts[rollout.prompt_id].for_reward(), "completion": rollout.completion, "rollout": known_of}
        for rollout, known_of, score in zip(rollouts, facts, scores, strict=True)
        if score is None
    ]
    computed = iter(pool.score(items) if items else [])
    complete = [next(computed) if score is None else score for score in scores]
    assert next(computed, None) is None, "a score was lost"
    known.update(zip(keys, complete, strict=True))
    return [_with_score(rollout, score, session.config.rl) for rollout, score in zip(rollouts, complete, strict=True)]


def _with_score(rollout: Rollout, score: Score, rl: RlConfig) -> Rollout:
    fault = score.reason or ""
    reward = rl.fault_reward(fault) if score.reward is None else score.reward
    return replace(rollout, reward=reward, reward_parts=score.parts, reward_fault=fault)


def _environment_fault(rollout: Rollout) -> Score | None:
    """The fault of a rollout that its environment failed, which has no score; None for others."""
    fault = rollout.environment.fault if rollout.environment else ""
    return Score(None, {}, fault) if fault else None


def _facts(session: Session, rollout: Rollout) -> RolloutFacts:
    by_agent = bool(session.config.rl.agent)
    return facts_of(rollout, turns_of(rollout, lambda tokens: session.data.tokenizer.decode(tokens), by_agent))


def score_key(rollout: Rollout, facts: RolloutFacts) -> ScoreKey:
    """The key by which a score is known. The text of a single turn is in it already."""
    turns = facts["turns"] if len(facts["turns"]) > 1 else []
    return rollout.prompt_id, rollout.completion, json.dumps(facts | {"turns": turns}, sort_keys=True)


@dataclass(frozen=True)
class KeptReward:
    """The reward that an imported rollout came with; its prompt is not known."""

    group_index: Int32
    rollout_index: Int32
    reward: Float
    reward_parts: Annotated[dict[str, float], Json(sort_keys=True)]
    reward_fault: Text = ""


@stage("rl", "scores/round-{round_index}", numbered="{name}-{index:03d}")
def score(
    session: Session,
    attempt: Attempt,
    *,
    iteration: int,
    round_index: int,
    prompts: ArtifactRef,
    rollouts: list[ArtifactRef],
) -> Produced:
    """The rewards of one round's rollouts; none for unfinished groups."""
    store, known = session.run.store, known_scores(session, (iteration, round_index))
    stored = [reward for ref in rollouts for reward in read_records_if_any(store, ref, "rewards.parquet", KeptReward)]
    kept = {_place(reward): {name: getattr(reward, name) for name in SCORE_COLUMNS} for reward in stored}
    shards = [
        rollout for ref in rollouts for rollout in read_records(store, ref, "rollouts.parquet", Rollout, ROLLOUTS)
    ]
    sampled = [replace(rollout, **kept[place]) if (place := _place(rollout)) in kept else rollout for rollout in shards]
    cut_short = {rollout.group_index for rollout in sampled if rollout.is_cut_short}
    to_score = [rollout for rollout in sampled if rollout.reward is None and rollout.group_index not in cut_short]
    scored = score_rollouts(session, prompts_by_id(store, [prompts]), to_score, known) if to_score else []
    by_place = {_place(rollout): rollout for rollout in scored}
    result = [by_place.get(_place(rollout), rollout) for rollout in sampled]
    assert len(kept) + len(scored) == sum(rollout.reward is not None for rollout in result), "a score was lost"
    return Produced(
        [attempt.write("scores.parquet", result, Rollout, SCORES)], _score_metrics(session, iteration, result)
    )


def known_scores(session: Session, key: tuple[int, int]) -> Scores:
    """The scores that this process computed while the round was sampled.

    `key`: (iteration, round).
    """
    sampling_round = session.sampling_round
    return sampling_round.scores() if sampling_round is not None and sampling_round.key == key else {}


def _place(rollout: Rollout | KeptReward) -> tuple[int, int]:
    return rollout.group_index, rollout.rollout_index


def _score_metrics(session: Session, iteration: int, rollouts: list[Rollout]) -> Metrics:
    """The metrics of a round, over its scored rollouts but those that say nothing."""
    finished = [rollout for rollout in rollouts if rollout.reward is not None]
    assert finished, "a round ends when groups have survived it, and these are finished"
    version, rl = session.run.sampled_by(iteration), session.config.rl
    scored = [rollout for rollout in finished if not rl.says_nothing(rollout.reward_fault)] or finished
    rewards = np.array([rollout.reward for rollout in scored])
    lengths = np.array([len(rollout.completion_tokens) for rollout in scored])
    if session.config.rl.is_weighed and not rewards.any() and lengths.any():
        log.warning("all rewards are zero though completions are not empty: a broken grader is the usual cause")
    parts = [rollout.reward_parts for rollout in scored]
    faults = Counter(rollout.reward_fault for rollout in finished if rollout.reward_fault)
    causes = Counter(cause_of_fault(reason) for reason in faults.elements())
    return {
        "num_scored": len(scored),
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/pass_rate": float((rewards >= passing_reward(session.config, "rl")).mean()),
        "rollout/length_tokens_mean": float(lengths.mean()),
        "rollout/length_tokens_max": int(lengths.max()),
        "rollout/truncated_fraction": float(np.mean([rollout.finish_reason == TRUNCATED for rollout in scored])),
        "rollout/num_tokens": sum(rollout.num_sampled_by(version) for rollout in rollouts),
        **{
            f"rollout/reward_{name}_mean": float(np.mean([values[name] for values in parts if name in values]))
            for name in {name for values in parts for name in values}
        },
        **{f"rollout/{name}": value for name, value in environment_metrics(scored).items()},
        **{f"rollout/faults_{cause}": causes[cause] for cause in BY_CAUSE},
        **{f"rollout/fault_{reason}": count for reason, count in faults.items()},
    }


def over_rounds(rounds: list[Metrics]) -> Metrics:
    """The score metrics of an iteration: counts add up, maxima are taken, the rest is the mean over
    all rollouts.
    """
    merged: Metrics = {}
    largest = max(metrics["num_scored"] for metrics in rounds)
    for name in {name for metrics in rounds for name in metrics}:
        pairs = [(metrics[name], metrics["num_scored"] / largest) for metrics in rounds if name in metrics]
        values, weights = zip(*pairs, strict=True)
        if name.startswith("rollout/fault") or name in ("rollout/num_tokens", "num_scored"):
            merged[name] = sum(values)
        else:
            merged[name] = max(values) if name.endswith("_max") else float(np.average(values, weights=weights))
    return merged
