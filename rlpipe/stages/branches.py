"""The branches of agents' rollouts that are trained beside them (`rl.branches = "all"`).

They lie beside the rollouts of a shard and of a batch, in a file of their own: what reads rollouts counts rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.training import RlConfig
from rlpipe.records.rollout import BRANCHES_FILE, TRUNCATED, Branch, Rollout
from rlpipe.store.artifacts import read_records_if_any
from rlpipe.store.backend import Store
from rlpipe.types import ArtifactRef, Metrics


def branch_fields(config: PipelineConfig) -> list[str]:
    """The field that says that branches are trained, where they are: other artifacts do not depend on it."""
    return ["rl.branches"] if config.rl.branches == "all" else []


def shards_with_branches(config: PipelineConfig, shards: list[ArtifactRef]) -> list[ArtifactRef] | None:
    """The shards of rollouts, where their branches are trained: then a batch is made of them too."""
    return list(shards) if config.rl.branches == "all" else None


def read_branches(store: Store, shards: list[ArtifactRef] | None) -> list[Branch]:
    """The branches beside the rollouts of shards."""
    return [branch for ref in shards or [] for branch in read_records_if_any(store, ref, BRANCHES_FILE, Branch)]


def branches_of(rollouts: Iterable[Rollout], branches: Iterable[Branch], rl: RlConfig) -> list[Branch]:
    """The branches of these rollouts: with `rl.mask_truncated` neither those that were cut off, nor any of a rollout that was."""
    places = {
        (rollout.group_index, rollout.rollout_index)
        for rollout in rollouts
        if not (rl.mask_truncated and rollout.finish_reason == TRUNCATED)
    }
    return [
        branch
        for branch in branches
        if (branch.group_index, branch.rollout_index) in places
        and not (rl.mask_truncated and branch.finish_reason == TRUNCATED)
    ]


def branch_metrics(branches: list[Branch], rl: RlConfig) -> Metrics:
    """How many branches of a batch are trained beside its rollouts, and their tokens; nothing where none would be."""
    if rl.branches != "all":
        return {}
    return {
        "rollout/num_branches_trained": len(branches),
        "rollout/num_branch_tokens_trained": sum(int(np.count_nonzero(branch.loss_mask)) for branch in branches),
    }
