"""The verdict of `rlpipe why`: the changes around an iteration of a run, ranked by the part of the
reward's change that they explain.

Each suspect (rlpipe/extras/why/suspects/) returns its findings, with p-values. A finding counts
when its p-value is below ALPHA after a correction for all iterations and suspects that were tested;
others are not named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.extras.why.around import Around, History
from rlpipe.extras.why.changes import Shift
from rlpipe.extras.why.suspects.evaluation import evaluation
from rlpipe.extras.why.suspects.finding import Finding, Suspect
from rlpipe.extras.why.suspects.labels import labels
from rlpipe.extras.why.suspects.policy import length, mismatch, moved, rate, reference, settings, staleness, truncation
from rlpipe.extras.why.suspects.prompts import duplicates, mix, template
from rlpipe.extras.why.suspects.reward_parts import reward_parts
from rlpipe.extras.why.suspects.scoring import faults, hacked, reward_settings

SUSPECTS: tuple[Suspect, ...] = (
    faults, reward_settings, reward_parts, hacked, template, mix, duplicates, labels, settings, rate, mismatch,
    reference, staleness, moved, truncation, length, evaluation,
)  # fmt: skip
ALPHA = 0.01  # of a whole report: the chance of a finding where nothing changed
# suspects whose being there is no matter of chance: their p-values are corrected for these alone
CERTAIN = 2
MATTERS = 0.05  # of the spread of the reward: the least that a finding has to explain
# of the reward's change: what explains less is left out, and symptoms come after what explains more
SMALL = 0.1
# iterations that are looked at with their rollouts; of more, those whose metrics jump most
SCANNED_MAX = 40


@dataclass(frozen=True)
class Verdict:
    """The findings on the changes at an iteration, in order; none where nothing is significant."""

    around: Around
    change: Shift  # of the reward
    findings: list[Finding]
    rest: float
    looks: int  # tests that were made: the p-values that count are below ALPHA / looks
    direction: float  # of the reward's change; 0 where it is not significant

    def share(self, finding: Finding) -> float:
        """The part of the reward's change that a finding explains, in units of the reward."""
        return self.rest if finding.explains is None else finding.explains

    def toward(self, finding: Finding) -> float:
        """`share` in the direction of the change; its absolute value where the reward did not
        change."""
        return self.share(finding) * self.direction if self.direction else abs(self.share(finding))

    @property
    def score(self) -> tuple[float, float]:
        """The part that the first finding explains in the direction of the change, and its
        certainty, `|z|`. A symptom counts half: another iteration may have the cause.
        """
        if not self.findings:
            return 0.0, 0.0
        first = self.findings[0]
        return self.toward(first) / (2 if first.symptom else 1), abs(first.shift.z)


def judged(history: History, at: int | None) -> Verdict:
    """The verdict on iteration `at`, or on the one with the largest change.

    UserError when there is nothing to compare.
    """
    count = history.num_iterations
    if count < 2:
        raise UserError(
            f"run {history.run.name} has {count} committed iterations, and a comparison needs at least two; train more"
            " first"
        )
    if at is not None:
        if not 1 <= at < count:
            raise UserError(f"--at {at}: choose an iteration from 1 to {count - 1}; there has to be one before it")
        return judge(history.around(at), looks=len(SUSPECTS))
    looks = len(SUSPECTS) * (count - 1)
    verdicts = [judge(history.around(number), looks) for number in candidates(history)]
    return max(
        verdicts,
        key=lambda verdict: (bool(verdict.findings), verdict.score, bool(verdict.around.changed), -verdict.change.p),
    )


def candidates(history: History) -> list[int]:
    """The iterations that are tested: all of a short run, else those at which a metric jumps most,
    and the fork points.
    """
    count = history.num_iterations
    if count <= SCANNED_MAX:
        return list(range(1, count))
    strongest: dict[int, float] = dict.fromkeys(range(1, count), 0.0)
    for name in sorted(
        {name for metrics in history.metrics for name in metrics if name.startswith(("rollout/", "train/"))}
    ):
        values = np.array([metrics.get(name, np.nan) for metrics in history.metrics], dtype=float)
        if np.isfinite(values).all():
            for number, jump in enumerate(_jumps(values), start=1):
                strongest[number] = max(strongest[number], jump)
    ordered = sorted(strongest, key=lambda number: -strongest[number])
    return sorted({*ordered[: SCANNED_MAX - len(history.fork_points)], *history.fork_points})


def _jumps(values: np.ndarray) -> list[float]:
    """At each iteration from 1 on, the mean of three less that of the three before, in units of the
    usual step.
    """
    usual = float(np.median(np.abs(np.diff(values)))) or float(np.std(values)) or 1.0
    return [
        abs(values[at : at + 3].mean() - values[max(0, at - 3) : at].mean()) / usual for at in range(1, len(values))
    ]


def judge(around: Around, looks: int) -> Verdict:
    """The verdict of the suspects on one iteration. A symptom counts only where the reward changed
    too.
    """
    change = around.reward_change
    findings = [finding for suspect in SUSPECTS for finding in suspect(around)]
    findings = [finding for finding in findings if finding.shift.p * (CERTAIN if finding.certain else looks) < ALPHA]
    changed = change.p * looks < ALPHA or any(finding.certain for finding in findings)
    findings = [finding for finding in findings if changed or not finding.symptom]
    findings = [finding for finding in findings if not _is_against(finding, change)]
    shares = sum(finding.explains or 0.0 for finding in findings if not finding.symptom)
    direction = float(np.sign(change.size)) if changed else 0.0
    verdict = Verdict(around, change, [], change.size - shares if changed else 0.0, looks, direction)
    least = max(MATTERS * float(around.reward_R.std()), SMALL * abs(change.size) * changed)
    kept = [finding for finding in findings if finding.explains is None or abs(finding.explains) >= least]
    explained = any(not finding.symptom and verdict.toward(finding) >= SMALL * abs(change.size) for finding in kept)
    kept.sort(
        key=lambda finding: (finding.symptom and explained, -round(verdict.toward(finding), 9), -abs(finding.shift.z))
    )
    return replace(verdict, findings=kept)


def _is_against(finding: Finding, change: Shift) -> bool:
    """True when a finding would explain the opposite of the reward's change, by more than its own
    noise.
    """
    return abs(change.z) > 1 and (finding.explains or 0.0) * change.size < 0 and not finding.certain
