"""The stage filter: groups are kept or dropped, kept groups become the batch, and groups with
partial rollouts go on in the next iteration.

A group that was cut goes on as a whole: each of its rollouts keeps its tokens, unless the oldest of
them are too stale. A batch has as many groups as were asked for. Finished groups beyond that number
go to the next iteration too, or are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rlpipe.algorithms.advantages import all_tokens, gdpo_advantages, rollout_means, rollout_sums, row_advantages
from rlpipe.algorithms.filters import NOTHING_LEFT, apply_filters, resolve_filters
from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.config.training import RlConfig
from rlpipe.engines.client import NOTHING_YET
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, stage
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import (
    BATCH,
    BRANCHES_FILE,
    CUT_SHORT,
    SCORES,
    TRUNCATED,
    Branch,
    CarriedRollout,
    Group,
    Rollout,
    grouped,
    is_finished,
    with_branches,
)
from rlpipe.rewards.score import parts_matrix
from rlpipe.stages.branches import branch_metrics, branches_of, read_branches
from rlpipe.stages.iteration import account, staleness
from rlpipe.stages.sampling import prompts_by_id, write_pass_rates
from rlpipe.store.artifacts import read_records


def trainable(group: Group, rl: RlConfig) -> Group:
    """The rollouts of a group that may be trained: all but those that are left out for a fault."""
    return [rollout for rollout in group if not rl.leaves_out(rollout.reward_fault)]


def kept_groups(session: Session, groups: list[Group]) -> tuple[list[int], dict[int, str]]:
    """The positions of the groups that are kept, and the reason of each dropped one.

    `groups`: the trainable rollouts of each group. A group without any, or with too few to compare
    a rollout with, is dropped before the filters are called.
    """
    rl = session.config.rl
    return apply_filters(
        groups, resolve_filters(rl.filters, size_min=rl.rollouts_min, mask_truncated=rl.mask_truncated)
    )


def survives(session: Session, group: Group) -> bool:
    """True when the filters keep a scored group.

    The group is judged alone: a filter may look at one group only.
    """
    kept = kept_groups(session, [trainable(group, session.config.rl)])[0]
    return all(rollout.reward is not None for rollout in group) and bool(kept)


class Sorted(NamedTuple):
    """The groups of an iteration by where they go, in the order of sampling.

    Each is in one of `trained`, `dropped` and `carried`.
    """

    trained: list[Group]  # these and the dropped ones without the rollouts that are left out
    dropped: list[Group]
    # whole, for the next iteration: unfinished groups, and finished ones beyond the trained ones
    carried: list[Group]
    ended: list[Group]  # those that are trained or dropped, whole
    reasons: dict[int, str]  # of each dropped one, by its group_index


def sort_groups(session: Session, sampled: list[Group], iteration: int) -> Sorted:
    """Trains the first groups that the filters keep, as many as were asked for (`batch_groups`).

    Kept groups beyond that are surplus. Where rounds are over-sampled, the next iteration uses
    surplus groups before it samples new ones: as many as it has places, and none that would be too
    stale. The rest is dropped.
    """
    rl = session.config.rl
    finished = [group for group in sampled if is_finished(group)]
    groups = [trainable(group, rl) for group in finished]
    kept, reasons = kept_groups(session, groups)
    surplus = kept[rl.batch_groups :]
    room = max(0, rl.round_groups - (len(sampled) - len(finished))) if rl.carries_surplus else 0
    waiting = [index for index in surplus if not goes_stale(finished[index], iteration + 1, rl.staleness_max)][:room]
    reasons |= dict.fromkeys({*surplus} - {*waiting}, "surplus")
    ended = [index for index in range(len(groups)) if index not in waiting]
    carried = {id(finished[index]) for index in waiting}
    result = Sorted(
        [groups[index] for index in kept[: rl.batch_groups]],
        [groups[index] for index in ended if index in reasons],
        [group for group in sampled if id(group) in carried or not is_finished(group)],
        [finished[index] for index in ended],
        {finished[index][0].group_index: reason for index, reason in reasons.items()},
    )
    assert len(result.trained) + len(result.dropped) + len(result.carried) == len(sampled), (
        "a group was lost or counted twice"
    )
    return result


def goes_stale(group: Group, version: int, staleness_max: int) -> bool:
    """True when iteration `version` would have to sample a rollout of the group again.

    `group`: a finished one.
    """
    spans = [span for rollout in group for span in rollout.weight_versions]
    return any(version - span.version > staleness_max for span in spans) or not all(
        len(one.completion_tokens) for one in group
    )


@stage("rl", "batch/round-{round_index}", verb="filter")
def filter_groups(
    session: Session,
    attempt: Attempt,
    *,
    iteration: int,
    round_index: int,
    prompts: list[ArtifactRef],
    scores: list[ArtifactRef],
    branches: list[ArtifactRef] | None = None,
    pass_rates: ArtifactRef | None = None,
) -> Produced:
    """The groups to train of all rounds so far, with advantages, and the groups that go on in the
    next iteration. `prompts` and `scores` have one artifact a round.

    The metrics say if another round is needed, and where every rollout went. `branches`: the shards
    of all rounds, where branches are trained (`shards_with_branches`). `pass_rates`, for a
    curriculum, is the batch of the previous iteration: its rates, updated, are stored beside this
    batch.
    """
    rl, store = session.config.rl, session.run.store
    assert (branches is not None) == (rl.branches == "all"), "branches are trained, or they are not"
    sampled = grouped(
        rollout for ref in scores for rollout in read_records(store, ref, "scores.parquet", Rollout, SCORES)
    )
    trained, dropped, handed, ended, reasons = sort_groups(session, sampled, iteration)
    counts = Counter(reasons.values())
    is_stored = bool(rl.rollouts_from) or session.run.redoes(iteration)  # then there is no further round
    needs_more = len(trained) < rl.groups_min and round_index + 1 < rl.rounds_max and not is_stored
    if len(trained) < rl.groups_min and not needs_more and rl.on_too_few == "fail":
        raise UserError(
            f"rl.groups_min={rl.groups_min}: only {len(trained)} groups survived {round_index + 1} rounds "
            f"(dropped: {dict(counts)}); loosen rl.filters or set rl.on_too_few = 'train'"
        )
    batch = [rollout for group in trained for rollout in group]
    if rl.overlap != "none" and not session.run.redoes(iteration):  # a redo keeps the stored weight versions
        assert {rollout.weight_version for rollout in batch} <= {rl.sampled_by(iteration)}, (
            f"iteration {iteration}: another staleness"
        )
    filtered = [rollout for group in dropped for rollout in group]
    carried = _carried(session, iteration, prompts, handed)
    written = write_batch(attempt, batch, read_branches(store, branches), rl)
    files = [attempt.write("carried.parquet", carried, CarriedRollout)] if carried else []
    rates, known = write_pass_rates(session, attempt, pass_rates, ended)
    num_left_out = sum(map(len, ended)) - len(batch) - len(filtered)
    metrics = {
        "rollout/groups_kept": len(trained),
        "rollout/rounds": round_index + 1,
        **{f"rollout/groups_dropped_{reason}": count for reason, count in counts.items()},
        **account(sampled, batch, filtered, carried, iteration, session.run.sampled_by(iteration), num_left_out),
        **staleness(batch, iteration),
        **known,
        "rollout/groups_carried": len(handed),
        "rollout/num_masked": written.num_masked,
        **branch_metrics(written.branches, rl),
        "needs_more": needs_more,
        "empty_groups": empty_groups(reasons),
        "dropped": {str(index): reason for index, reason in reasons.items()},
    }
    return Produced(written.files + files + rates, metrics)


def empty_groups(reasons: dict[int, str]) -> list[int]:
    """The dropped groups of which nothing can be trained, by `group_index`.

    They keep their place among the groups of a step.
    """
    return sorted(index for index, reason in reasons.items() if reason in NOTHING_LEFT)


class WrittenBatch(NamedTuple):
    """The batch that the trainer reads."""

    files: list[FileRecord]
    num_masked: int  # rollouts without any token in the loss
    branches: list[Branch]  # that are trained beside the rollouts


def write_batch(attempt: Attempt, rollouts: Group, branches: list[Branch], rl: RlConfig) -> WrittenBatch:
    """Writes the rollouts that are trained, with advantages.

    `branches`: of these rollouts, and of others, whose branches are not trained.
    """
    masked = without_truncated(rollouts) if rl.mask_truncated else rollouts
    num_masked = sum(new is not old for new, old in zip(masked, rollouts, strict=True))
    trained = branches_of(rollouts, branches, rl)
    if rl.estimator == "gdpo":
        rows = with_gdpo(masked, rl.rewards)
    else:
        rows = with_advantages(masked, rl.estimator, rl.gamma, trained)
    files = [attempt.write("batch.parquet", rows, Rollout, BATCH)]
    files += [attempt.write(BRANCHES_FILE, trained, Branch)] if trained else []
    return WrittenBatch(files, num_masked, trained)


def _carried(session: Session, iteration: int, prompts: list[ArtifactRef], groups: list[Group]) -> list[CarriedRollout]:
    """The rollouts of these groups as the next iteration gets them."""
    by_id = prompts_by_id(session.run.store, prompts if groups else [])
    return [
        rollout
        for group in groups
        for rollout in carried_rollouts(
            group, by_id[group[0].prompt_id], iteration + 1, session.config.rl.staleness_max
        )
    ]


def without_truncated(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts, with loss mask 0 on all tokens of those that the token limit cut off; the
    others are the same objects.
    """
    return [
        replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask))
        if rollout.finish_reason == TRUNCATED and rollout.loss_mask.any()
        else rollout
        for rollout in rollouts
    ]


def with_gdpo(rollouts: list[Rollout], rewards: dict[str, float]) -> list[Rollout]:
    """The rollouts with the `advantage` of gdpo, on which the trainer trains: only here the parts
    of their rewards are known.
    """
    group_index_R = np.array([rollout.group_index for rollout in rollouts], dtype=np.int64)
    advantages_R = gdpo_advantages(*parts_matrix(rollouts, rewards), group_index_R)
    return [
        replace(rollout, advantage=float(advantage)) for rollout, advantage in zip(rollouts, advantages_R, strict=True)
    ]


def with_advantages(
    rollouts: list[Rollout], estimator: str, gamma: float, branches: Iterable[Branch] = ()
) -> list[Rollout]:
    """The rollouts with `advantage`: the mean, over the scored tokens of a rollout and of its
    branches, of the advantages that the trainer computes, without a KL term.
    """
    rows, rollout_B = with_branches(rollouts, branches)
    rewards_B = np.array([rollout.reward for rollout in rollouts])[rollout_B]
    group_index_B = np.array([row.group_index for row in rows], dtype=np.int64)
    lengths_B = np.array([np.count_nonzero(row.loss_mask) for row in rows], dtype=np.int64)
    advantages_B = row_advantages(
        rewards_B, group_index_B, lengths_B, estimator=estimator, gamma=gamma, rollout_B=rollout_B
    )
    advantages_R = rollout_means(all_tokens(advantages_B), rollout_sums(lengths_B, rollout_B))
    return [
        replace(rollout, advantage=float(advantage)) for rollout, advantage in zip(rollouts, advantages_R, strict=True)
    ]


def carried_rollouts(group: Group, prompt: Prompt, version: int, staleness_max: int) -> list[CarriedRollout]:
    """The rollouts of an unfinished group as iteration `version` continues them: a rollout with
    tokens that are too stale by then starts again, empty.
    """
    carried = []
    for rollout in group:
        expired = any(version - span.version > staleness_max for span in rollout.weight_versions)
        kept = slice(0, 0) if expired else slice(None)
        entry = CarriedRollout(
            **vars(prompt),
            group_index=rollout.group_index,
            rollout_index=rollout.rollout_index,
            completion_tokens=rollout.completion_tokens[kept],
            rollout_logprobs=rollout.rollout_logprobs[kept],
            weight_versions=rollout.weight_versions[kept],
            finish_reason=CUT_SHORT if expired else rollout.finish_reason,
            seed=rollout.seed,
            engine=NOTHING_YET.engine if expired else rollout.engine,
            num_tokens_expired=len(rollout.completion_tokens) if expired else 0,
            environment=None if expired else rollout.environment,
        )
        carried.append(entry)
    return carried
