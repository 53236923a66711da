"""The branches of agents' rollouts that are trained beside them (`rl.branches = "all"`).

They are stored beside the rollouts of a shard and of a batch, in a file of their own, so that code
that counts rollouts does not count branches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.training import RlConfig
from rlpipe.records.rollout import BRANCHES_FILE, TRUNCATED, Branch, Rollout
from rlpipe.store.artifacts import read_records_if_any
from rlpipe.store.backend import Store


def shards_with_branches(config: PipelineConfig, shards: list[ArtifactRef]) -> list[ArtifactRef] | None:
    """The shards of rollouts where branches are trained, as a further input of the batch; None
    otherwise.
    """
    return list(shards) if config.rl.branches == "all" else None


def read_branches(store: Store, shards: list[ArtifactRef] | None) -> list[Branch]:
    """The branches beside the rollouts of shards."""
    return [branch for ref in shards or [] for branch in read_records_if_any(store, ref, BRANCHES_FILE, Branch)]


def branches_of(rollouts: Iterable[Rollout], branches: Iterable[Branch], rl: RlConfig) -> list[Branch]:
    """The branches of these rollouts as they are trained.

    With `rl.mask_truncated`, a truncated rollout has none, and a truncated branch is trained
    without its truncated reply.
    """
    places = {
        (rollout.group_index, rollout.rollout_index)
        for rollout in rollouts
        if not (rl.mask_truncated and rollout.finish_reason == TRUNCATED)
    }
    ours = [branch for branch in branches if (branch.group_index, branch.rollout_index) in places]
    if not rl.mask_truncated:
        return ours
    whole = [_without_last_reply(branch) if branch.finish_reason == TRUNCATED else branch for branch in ours]
    return [branch for branch in whole if branch.loss_mask.any()]


def _without_last_reply(branch: Branch) -> Branch:
    """The branch without loss on its last reply, the tokens after its last one with mask 0.

    No other row holds that reply, and something precedes it.
    """
    untrained = np.flatnonzero(branch.loss_mask == 0)
    loss_mask = branch.loss_mask.copy()
    loss_mask[untrained[-1] if len(untrained) else 0 :] = 0
    return replace(branch, loss_mask=loss_mask)


def branch_metrics(branches: list[Branch], rl: RlConfig) -> Metrics:
    """The number of branches that are trained beside the rollouts of a batch, and of their tokens.

    Empty unless `rl.branches` is "all". `branches`: those of the batch.
    """
    if rl.branches != "all":
        return {}
    return {
        "rollout/num_branches_trained": len(branches),
        "rollout/num_branch_tokens_trained": sum(int(np.count_nonzero(branch.loss_mask)) for branch in branches),
    }
