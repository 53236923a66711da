"""The branches of agents' rollouts that are trained beside them (`rl.branches = "all"`).

They lie beside the rollouts that they are of, in the artifacts of generate, score and filter, in a file of their own: what reads rollouts
counts rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.training import RlConfig
from rlpipe.records.rollout import BRANCHES_FILE, TRUNCATED, Branch, Rollout
from rlpipe.stages.session import Session
from rlpipe.stages.stage import Attempt
from rlpipe.store.artifacts import read_records_if_any
from rlpipe.types import ArtifactRef, FileRecord, Metrics


def branch_fields(config: PipelineConfig) -> list[str]:
    """The field that says that branches are trained, where they are: other artifacts do not depend on it."""
    return ["rl.branches"] if config.rl.branches == "all" else []


def branches_to_train(session: Session, artifacts: Iterable[ArtifactRef]) -> list[Branch]:
    """The branches beside the rollouts of artifacts; none where they are not trained."""
    if session.config.rl.branches != "all":
        return []
    return [branch for ref in artifacts for branch in read_records_if_any(session.run.store, ref, BRANCHES_FILE, Branch)]


def branches_of(rollouts: Iterable[Rollout], branches: Iterable[Branch], rl: RlConfig) -> list[Branch]:
    """The branches of these rollouts: with `rl.mask_truncated` of those only that have a loss."""
    places = {
        (rollout.group_index, rollout.rollout_index)
        for rollout in rollouts
        if not (rl.mask_truncated and rollout.finish_reason == TRUNCATED)
    }
    return [branch for branch in branches if (branch.group_index, branch.rollout_index) in places]


def write_branches_to_train(attempt: Attempt, branches: list[Branch]) -> list[FileRecord]:
    """As one file; none where there are none."""
    return [attempt.write(BRANCHES_FILE, branches, Branch)] if branches else []


def branch_metrics(branches: list[Branch], rl: RlConfig) -> Metrics:
    """How many branches of a batch are trained beside its rollouts, and their tokens; nothing where none would be."""
    if rl.branches != "all":
        return {}
    return {
        "rollout/num_branches_trained": len(branches),
        "rollout/num_branch_tokens_trained": sum(int(np.count_nonzero(branch.loss_mask)) for branch in branches),
    }
