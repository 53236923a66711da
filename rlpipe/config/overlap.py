"""The rules of `rl.overlap`: settings that one step off policy does not allow.

As in rules.py, each line begins with the field that must change.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlpipe.config.training import RlConfig


def broken_overlap(rl: RlConfig) -> Iterator[str]:
    """Yields one line for each broken rule of `rl.overlap`."""
    if rl.overlap == "none":
        return
    if rl.rollouts_from:
        yield (
            f"{rl.overlap=}: rollouts from {rl.rollouts_from} are not sampled, and there is nothing to overlap; use"
            " overlap = 'none'"
        )
    if not rl.corrects_staleness:
        yield (
            f"{rl.overlap=}: what is trained was sampled by the version before, and nothing would correct that; set"
            " rl.importance, for example to token_truncate"
        )
    if not rl.train_stale_tokens:
        yield (
            f"{rl.overlap=}: all that is trained is older than the policy, and rl.train_stale_tokens=False asks for"
            " none of it; leave it true"
        )
    if rl.oversampling > 1:
        yield (
            f"{rl.overlap=}: what an over-sampled round leaves would be older still when it is trained; use"
            " oversampling = 1"
        )
