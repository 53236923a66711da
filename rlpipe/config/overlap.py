"""The rules of `rl.overlap`: what may not run side by side. As in rules.py a line begins with the field that has to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlpipe.config.training import RlConfig

WHOLE_BATCH = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")  # estimators of which an advantage depends on all groups


def broken_overlap(rl: RlConfig) -> Iterator[str]:
    """One line for each rule of its overlap that RL breaks."""
    if rl.overlap != "none" and rl.rollouts_from:
        yield f"{rl.overlap=}: rollouts from {rl.rollouts_from} are not sampled, and there is nothing to overlap; use overlap = 'none'"
    if rl.overlap == "steps":
        yield from _of_steps(rl)
    if rl.overlap == "iteration":
        yield from _of_iteration(rl)


def _of_steps(rl: RlConfig) -> Iterator[str]:
    """A step is taken before later groups are there: nothing in it may depend on these."""
    if rl.filters:
        yield f"{rl.filters=}: how many groups a step has is known when all are filtered, and rl.overlap='steps' is then over; use filters = {{}}"
    if rl.estimator in WHOLE_BATCH:
        yield (
            f"{rl.estimator=}: is whitened over the whole batch, and with rl.overlap='steps' a step is trained before that is there; use an "
            "estimator of groups, for example grpo"
        )
    if rl.oversampling > 1:
        yield f"{rl.oversampling=}: which groups are trained is known when enough have finished; with rl.overlap='steps' use oversampling = 1"
    if rl.rounds_max > 1:
        yield f"{rl.rounds_max=}: another round would move groups to other steps, and rl.overlap='steps' has taken some; use rounds_max = 1"
    if (num_steps := min(rl.num_steps, rl.num_prompts)) < 2:
        yield (
            f"{rl.num_steps=}: of {num_steps} step ({rl.num_prompts=}) none can be taken while later groups are sampled, which is "
            "rl.overlap='steps'; use 2 or more of both, or overlap = 'none'"
        )


def _of_iteration(rl: RlConfig) -> Iterator[str]:
    if not rl.corrects_staleness:
        yield (
            f"{rl.overlap=}: what is trained was sampled by the version before, and nothing would correct that; set rl.importance, for "
            "example to token_truncate"
        )
    if not rl.train_stale_tokens:
        yield f"{rl.overlap=}: all that is trained is older than the policy, and rl.train_stale_tokens=False asks for none of it; leave it true"
    if rl.oversampling > 1:
        yield f"{rl.overlap=}: what an over-sampled round leaves would be older still when it is trained; use oversampling = 1"
