"""`rlpipe why`, behind its arguments."""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.base.errors import UserError
from rlpipe.extras.why.around import History
from rlpipe.extras.why.proof import fork_arguments, fork_name, proof_lines, provable, proved_lines
from rlpipe.extras.why.second import parting, parts_ways, rescored, second_lines
from rlpipe.extras.why.today import Today
from rlpipe.extras.why.verdict import Verdict, judged, why_lines
from rlpipe.store.run import Run, open_existing

Say = Callable[[list[str]], None]
RunFork = Callable[[list[str]], int]


def explain(run: Run, at: int | None, run_fork: RunFork | None, say: Say) -> bool:
    """Says the changes around iteration `at` of a run, or around the one where most changes, by how
    much of the reward's change they explain.

    With `run_fork` (the arguments of `rlpipe` to an exit code), the fork without what is named
    first is run and shown. Returns whether anything is named. RuntimeError when the fork fails.
    """
    with Today(run) as today:
        verdict = judged(History(run, today), at)
    say([*why_lines(verdict), *proof_lines(verdict)])
    if run_fork and verdict.findings:
        say(_proof(verdict, run_fork))
    return bool(verdict.findings)


def compare_rewards(run: Run, reward: str, say: Say) -> bool:
    """Says where the reward of a run and another one, which scores the same rollouts now, part.
    Returns whether they do."""
    both = rescored(History(run), reward)
    say(second_lines(both, reward))
    return parts_ways(parting(both)[1])


def _proof(verdict: Verdict, run_fork: RunFork) -> list[str]:
    """Runs the fork; the lines that it shows."""
    if (pair := provable(verdict)) is None:
        raise UserError("--prove: no fork can leave out what is named first: it was sampled with, or is in the data")
    finding, proof = pair
    if code := run_fork(fork_arguments(verdict, finding, proof)):
        raise RuntimeError(f"--prove: the fork ended with exit code {code}")
    fork = open_existing(verdict.around.run.store, fork_name(verdict, finding))
    return ["", f"proof of {finding.suspect}", *(f"   {line}" for line in proved_lines(verdict, proof, fork))]
