"""The proof of a finding: a fork without the suspect, its command, and the reward with it and
without it.
"""

from __future__ import annotations

import shlex

import numpy as np

from rlpipe.extras.why.suspects.finding import Finding, WhatIf
from rlpipe.extras.why.verdict import Verdict
from rlpipe.report.show import REWARD
from rlpipe.store.progress import Progress
from rlpipe.store.run import AT_SFT, Run


def provable(verdict: Verdict) -> tuple[Finding, WhatIf] | None:
    """The first finding and its fork, where a fork can prove it; else None."""
    first = verdict.findings[0] if verdict.findings else None
    return (first, first.proof) if first and first.proof else None


def fork_name(verdict: Verdict, finding: Finding) -> str:
    """The name of the fork. Example: a-7-without-reward_part."""
    return f"{verdict.around.run.name}-{verdict.around.at}-without-{finding.suspect}"


def fork_arguments(verdict: Verdict, finding: Finding, proof: WhatIf) -> list[str]:
    """The arguments of `rlpipe` that make the fork."""
    run = verdict.around.run
    redo = ["--redo", proof.redo] if proof.redo else []
    sets = [*proof.sets, *([f"rl.num_iterations={proof.num_iterations}"] if proof.num_iterations else [])]
    options = [part for entry in sets for part in ("--set", entry)]
    return [
        "fork",
        run.name,
        "--at",
        "sft" if proof.at == AT_SFT else str(proof.at),
        "--run",
        fork_name(verdict, finding),
        "--store",
        run.store.url,
        *redo,
        *options,
    ]


def proof_lines(verdict: Verdict) -> list[str]:
    """The lines about a proof of the first finding: the command, and the result as far as stored
    data give it. Empty where no fork can prove it.
    """
    if (pair := provable(verdict)) is None:
        return []
    finding, proof = pair
    lines = [
        "",
        f"proof of {finding.suspect} (--prove runs it):",
        f"   rlpipe {shlex.join(fork_arguments(verdict, finding, proof))}",
    ]
    if proof.stored:
        at, change = verdict.around.at, verdict.change
        lines.append(
            f"   by the stored parts: {proof.stored[0]:.3f} before, {proof.stored[1]:.3f} from {at} on without it"
        )
        lines.append(f"   with it: {change.before:.3f} before, {change.after:.3f} from {at} on")
    return lines


def proved_lines(verdict: Verdict, proof: WhatIf, fork: Run) -> list[str]:
    """The mean reward before and in the iterations of the fork, with the suspect and without it."""
    around, count = verdict.around, Progress(fork).num_iterations
    numbers = [number for number in around.metrics if around.at <= number < count]
    before = np.mean([metrics[REWARD] for number, metrics in around.metrics.items() if number < around.at])
    with_it = np.mean([around.metrics[number][REWARD] for number in numbers])
    without = np.mean([fork.record(number).metrics[REWARD] for number in numbers])
    where = f"in iteration {numbers[0]}" if len(numbers) == 1 else f"in iterations {numbers[0]} to {numbers[-1]}"
    return [
        f"with it: {before:.3f} before, {with_it:.3f} {where}",
        (
            f"without it: {proof.stored[0] if proof.stored else before:.3f} before, {without:.3f} {where} (run"
            f" {fork.name})"
        ),
    ]
