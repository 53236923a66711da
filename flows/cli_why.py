"""`rlpipe why`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli_services import STORE, StoreUrl, readable_store
from flows.printing import echo_all
from rlpipe.base.errors import UserError
from rlpipe.store.run import open_existing

if TYPE_CHECKING:
    from rlpipe.report.why import Verdict

NOTHING_NAMED = 4  # the exit code where no cause was found
AtIteration = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="the iteration from which something is different; without: the one where most changes"
    ),
]
Prove = Annotated[bool, typer.Option("--prove", help="run the fork that shows the reward without what is named first")]
Second = Annotated[
    str | None,
    typer.Option(metavar="REWARD", help="score what is stored by this reward too, and show where the two part"),
]


def why(run: str, at: AtIteration = None, prove: Prove = False, second: Second = None, store: StoreUrl = STORE) -> None:
    """Rank the changes around an iteration by how much of the reward's change they explain.

    Exit code 4 when no cause is found.
    """
    from rlpipe.report.around import History  # scipy takes a moment to import
    from rlpipe.report.proof import proof_lines
    from rlpipe.report.second import parting, parts_ways, rescored, second_lines
    from rlpipe.report.today import Today
    from rlpipe.report.why import judged, why_lines

    stored = open_existing(readable_store(store), run)
    if second is not None:
        if prove or at is not None:
            raise UserError("--second compares two rewards over the whole run: leave --at and --prove away")
        both = rescored(History(stored), second)
        echo_all(second_lines(both, second))
        is_named = parts_ways(parting(both)[1])
    else:
        with Today(stored) as today:
            verdict = judged(History(stored, today), at)
        echo_all([*why_lines(verdict), *proof_lines(verdict)])
        is_named = bool(verdict.findings)
        if prove and is_named:
            _prove(verdict)
    if not is_named:
        raise typer.Exit(NOTHING_NAMED)


def _prove(verdict: Verdict) -> None:
    """Runs the fork, as a process of its own, and prints what it shows."""
    from rlpipe.report.proof import fork_arguments, fork_name, provable, proved_lines

    if (pair := provable(verdict)) is None:
        raise UserError("--prove: no fork can leave out what is named first: it was sampled with, or is in the data")
    finding, proof = pair
    command = [sys.executable, "-m", "flows.cli", *fork_arguments(verdict, finding, proof)]
    if code := subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"--prove: the fork ended with exit code {code}")
    fork = open_existing(verdict.around.run.store, fork_name(verdict, finding))
    echo_all(["", f"proof of {finding.suspect}", *(f"   {line}" for line in proved_lines(verdict, proof, fork))])
