"""The report of `rlpipe why`: a verdict without the data that it was made of."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import Shift
from rlpipe.extras.why.proof import ProofReport, proof_report
from rlpipe.extras.why.suspects.finding import Finding, from_to
from rlpipe.extras.why.verdict import ALPHA, Verdict
from rlpipe.records.rollout import Rollout
from rlpipe.report.show import parts_text, row_of, text_line


@dataclass(frozen=True)
class EvidenceRollout:
    """A rollout that shows a finding. `answer`: the reference of its prompt; empty without one."""

    iteration: int
    group_index: int
    rollout_index: int
    prompt_id: str
    reward: float | None
    reward_parts: dict[str, float]
    reward_fault: str
    finish_reason: str
    tokens: int
    prompt: str
    completion: str
    answer: str

    @property
    def line(self) -> str:
        parts = parts_text(self.reward_parts, self.reward_fault)
        return (
            f"{self.iteration}/{self.group_index}/{self.rollout_index} {self.prompt_id}: reward"
            f" {self.reward:g}{f' ({parts})' if parts else ''}, {self.finish_reason}, {self.tokens} tokens:"
            f" {text_line(self.prompt)!r} -> {text_line(self.completion)!r}"
            + (f", label {self.answer!r:.80}" if self.answer else "")
        )


@dataclass(frozen=True)
class ReportedFinding:
    """Something that changed at the iteration. `explains`: the part of the reward's change. A
    `symptom` would explain it, but may follow from another finding; `is_rest`: it explains what the
    others leave. `change`: of what the suspect looks at.
    """

    suspect: str
    title: str
    explains: float
    symptom: bool
    is_rest: bool
    change: Shift
    evidence: list[str]
    rollouts: list[EvidenceRollout]

    def lines(self, number: int, whole: Shift) -> list[str]:
        """The finding with its number in the report; `whole`: the change of the reward."""
        kind = "a symptom, would explain" if self.symptom else "what is left over," if self.is_rest else "explains"
        return [
            "",
            f"{number}. {self.title}",
            f"   suspect {self.suspect}: {kind} {self.explains:+.3f} of {whole.size:+.3f}, p = {self.change.p:.1g}",
            *(f"   {line}" for line in self.evidence),
            *(f"   rollout {rollout.line}" for rollout in self.rollouts),
        ]


@dataclass(frozen=True)
class WhyReport:
    """The changes around an iteration, in order. `change`: of the reward, from the iterations
    `first` to `iteration - 1` to those up to `last`. `tests`: that were made; what counts has a
    p-value below `p_max`. `settings`: those that a fork changed here.
    """

    run: str
    iteration: int
    first: int
    last: int
    groups_before: int
    groups_after: int
    change: Shift
    tests: int
    p_max: float
    settings: list[str]
    findings: list[ReportedFinding]
    proof: ProofReport | None

    def lines(self) -> list[str]:
        """The change of the reward, then its causes."""
        change, at = self.change, self.iteration
        is_beyond = abs(change.size - (change.after - change.before)) > 1e-9
        lines = [
            (
                f"run {self.run}, iteration {at}: reward {from_to(change.before, change.after)} (iterations"
                f" {self.first} to {at - 1}, {self.groups_before} groups; {at} to {self.last}, {self.groups_after}"
                f" groups), {change.size:+.3f} {'beyond the trend' if is_beyond else 'in all'}, p = {change.p:.1g}"
            ),
            f"{self.tests} tests: what counts has p below {self.p_max:.1g}",
        ]
        if not self.findings:
            unfelt = [f"changed by a fork, and the reward is what it was: {line}" for line in self.settings]
            return [*lines, *unfelt, "no cause found"]
        for number, finding in enumerate(self.findings, start=1):
            lines += finding.lines(number, change)
        return [*lines, *(self.proof.lines() if self.proof else [])]


def why_report(verdict: Verdict) -> WhyReport:
    """The report of a verdict."""
    around = verdict.around
    numbers = sorted(around.metrics)
    return WhyReport(
        run=around.run.name,
        iteration=around.at,
        first=numbers[0],
        last=numbers[-1],
        groups_before=int((~around.after_G).sum()),
        groups_after=int(around.after_G.sum()),
        change=verdict.change,
        tests=verdict.looks,
        p_max=ALPHA / verdict.looks,
        settings=around.changed,
        findings=[_reported(verdict, finding) for finding in verdict.findings],
        proof=proof_report(verdict),
    )


def _reported(verdict: Verdict, finding: Finding) -> ReportedFinding:
    return ReportedFinding(
        finding.suspect,
        finding.title,
        verdict.share(finding),
        bool(finding.symptom),
        finding.explains is None,
        finding.shift,
        finding.evidence,
        [_evidence(verdict.around, row) for row in finding.rows],
    )


def _evidence(around: Around, row: int) -> EvidenceRollout:
    rollout: Rollout = around.rollouts[row]
    group = around.groups[around.group_R[row]]
    answer, tokens = group.prompt.answer, len(rollout.completion_tokens)
    said = "" if answer is None else str(answer)
    return row_of(EvidenceRollout, rollout, iteration=group.iteration, tokens=tokens, answer=said)
