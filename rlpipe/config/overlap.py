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
            f"{rl.overlap=}: with rl.rollouts_from={rl.rollouts_from!r} nothing is sampled, so nothing can overlap;"
            " use overlap = 'none'"
        )
    if not rl.corrects_staleness:
        yield (
            f"{rl.overlap=}: training is one step off policy, and rl.importance='none' corrects nothing; set"
            " rl.importance, for example to token_truncate"
        )
    if not rl.train_stale_tokens:
        yield (
            f"{rl.overlap=}: all tokens are one weight version old, and rl.train_stale_tokens=False would train on"
            " none of them; set it to true"
        )
    if rl.oversampling > 1:
        yield (
            f"{rl.overlap=}: the partial rollouts that oversampling leaves would be even older when they are trained;"
            " use oversampling = 1"
        )
