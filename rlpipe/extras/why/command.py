"""The command `rlpipe why`, without the parsing of its arguments."""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.base.errors import UserError
from rlpipe.extras.why.around import History
from rlpipe.extras.why.proof import fork_arguments, fork_name, provable, proved_lines
from rlpipe.extras.why.report import WhyReport, why_report
from rlpipe.extras.why.second import SecondReport, rescored, second_report
from rlpipe.extras.why.today import Today
from rlpipe.extras.why.verdict import Verdict, judged
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run

Say = Callable[[list[str]], None]
RunFork = Callable[[list[str]], int]


def explain(run: Run, at: int | None, run_fork: RunFork | None, show: Callable[[WhyReport], None], say: Say) -> bool:
    """Shows the changes around iteration `at` of a run, or around the iteration with the largest
    change, ordered by the part of the reward's change that they explain.

    With `run_fork` (the arguments of `rlpipe` to an exit code), the fork without the first finding
    is run, and `say` prints its result. Returns True when there is a finding. RuntimeError when the
    fork fails.
    """
    with Today(run) as today:
        verdict = judged(History(run, today), at)
    show(why_report(verdict))
    if run_fork and verdict.findings:
        say(_proof(verdict, run_fork))
    return bool(verdict.findings)


def compare_rewards(run: Run, reward: str, show: Callable[[SecondReport], None]) -> bool:
    """Shows the iteration from which a run's reward and a second one, which scores the same
    rollouts now, differ. Returns True when they do.
    """
    report = second_report(rescored(History(run), reward), run.name, reward)
    show(report)
    return report.iteration is not None


def _proof(verdict: Verdict, run_fork: RunFork) -> list[str]:
    """Runs the fork; returns the lines about its result."""
    if (pair := provable(verdict)) is None:
        raise UserError(
            "--prove: no fork can undo the first suspect, because it is in the data, or in the settings of sampling"
        )
    finding, proof = pair
    if code := run_fork(fork_arguments(verdict, finding, proof)):
        raise RuntimeError(f"--prove: the fork ended with exit code {code}")
    fork = open_existing(verdict.around.run.store, fork_name(verdict, finding))
    return ["", f"proof of {finding.suspect}", *(f"   {line}" for line in proved_lines(verdict, proof, fork))]
