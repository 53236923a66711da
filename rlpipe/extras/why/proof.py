"""The proof of a finding: a fork without the suspect, its command, and the reward with it and
without it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import numpy as np

from rlpipe.extras.why.changes import Shift
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


@dataclass(frozen=True)
class ProofReport:
    """The fork that would show the reward without a suspect. `reward_before`, `reward_after`: the
    reward without it as far as stored parts say it, else None.
    """

    suspect: str
    command: str
    iteration: int
    change: Shift  # of the reward, with the suspect
    reward_before: float | None
    reward_after: float | None

    def lines(self) -> list[str]:
        """The command, and what stored parts say."""
        lines = ["", f"proof of {self.suspect} (--prove runs it):", f"   {self.command}"]
        if self.reward_before is not None and self.reward_after is not None:
            at = self.iteration
            lines += [
                (
                    f"   by the stored parts: {self.reward_before:.3f} before, {self.reward_after:.3f} from {at} on"
                    " without it"
                ),
                f"   with it: {self.change.before:.3f} before, {self.change.after:.3f} from {at} on",
            ]
        return lines


def proof_report(verdict: Verdict) -> ProofReport | None:
    """The proof of the first finding; None where no fork can prove it."""
    if (pair := provable(verdict)) is None:
        return None
    finding, proof = pair
    command = f"rlpipe {shlex.join(fork_arguments(verdict, finding, proof))}"
    before, after = proof.stored or (None, None)
    return ProofReport(finding.suspect, command, verdict.around.at, verdict.change, before, after)


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
