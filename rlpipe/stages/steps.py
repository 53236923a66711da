"""What one optimizer step trains on, made while the groups of later steps are sampled (`rl.overlap = "steps"`, docs/overlap.md)."""

from __future__ import annotations

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.records.rollout import ROLLOUTS, Rollout, grouped
from rlpipe.stages.branches import read_branches, shards_with_branches
from rlpipe.stages.filtering import empty_groups, filtered_by, sort_groups, write_batch
from rlpipe.stages.sampling import prompts_by_id
from rlpipe.stages.scoring import SCORING, KeptReward, known_scores, score_rollouts
from rlpipe.stages.session import Session
from rlpipe.stages.stage import Attempt, Produced, stage
from rlpipe.store.artifacts import read_records
from rlpipe.types import ArtifactRef


def _made_by(config: PipelineConfig) -> list[str]:
    return [*SCORING, *filtered_by(config)]


@stage("rl", "steps/step-{step:03d}", settings=_made_by, verb="score", numbered="{name}-{index:03d}")
def score_step(
    session: Session, attempt: Attempt, *, iteration: int, step: int, prompts: ArtifactRef, rollouts: list[ArtifactRef]
) -> Produced:
    """The rewards of the rollouts of one step, and its batch: the rows that the batch of the whole iteration has for it.

    UserError when not a single rollout of the step could be scored: nothing of it is committed then.
    """
    store = session.run.store
    sampled = [row for ref in rollouts for row in read_records(store, ref, "rollouts.parquet", Rollout, ROLLOUTS)]
    scored = score_rollouts(session, prompts_by_id(store, [prompts]), sampled, known_scores(session, (iteration, 0)))
    trained, _, carried, _, reasons = sort_groups(session, grouped(scored), iteration)
    assert not carried, "where steps overlap, every group of a step is finished and trained in it, or dropped"
    rewards = [
        KeptReward(row.group_index, row.rollout_index, row.reward or 0.0, row.reward_parts, row.reward_fault) for row in scored
    ]
    batch = [rollout for group in trained for rollout in group]
    branches = read_branches(store, shards_with_branches(session.config, rollouts))
    written = write_batch(attempt, batch, branches, session.config.rl)
    return Produced(
        [attempt.write("rewards.parquet", rewards, KeptReward), *written.files],
        {"num_scored": len(scored), "num_masked": written.num_masked, "empty_groups": empty_groups(reasons)},
    )
