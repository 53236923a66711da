"""The state of the batch jobs that start a run's services: `infra/slurm/flow.sbatch` queues them,
and passes their names to its flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)
VARIABLE = "RLPIPE_{}_JOB"  # of TRAINER and of ENGINES: the variable with the name of a Slurm job
ASK_S = 15.0  # not more often: a controller answers many users
ANSWER_TIMEOUT_S = 30.0
STARTED = ("RUNNING", "SUSPENDED", "STOPPED")


@dataclass
class BatchJob:
    """The jobs with one name, one of which is to start a service.

    The state is at most ASK_S old. `lines`: one per job; None: not known.

    `became`: one line per ended job with its result, as far as Slurm still knows it.
    """

    name: str
    lines: list[str] | None = None
    became: list[str] = field(default_factory=list, init=False)
    _asked_at: float = field(default=float("-inf"), init=False)

    async def ask(self) -> None:
        """Updates the state from Slurm, unless that was done a moment ago.

        If Slurm does not answer, the last state stays.
        """
        if time.monotonic() - self._asked_at < ASK_S:
            return
        self._asked_at = time.monotonic()
        try:
            lines = await _squeue("--me", f"--name={self.name}")
            if self.lines and not lines:
                ids = ",".join(line.split()[0] for line in self.lines)
                with contextlib.suppress(OSError):  # Slurm forgets a job after some minutes
                    self.became = await _squeue("--states=all", f"--jobs={ids}")
            self.lines = lines
        except OSError as error:
            log.warning("the state of Slurm job %s is not known: %s", self.name, error)

    @property
    def queued(self) -> bool:
        """True when a job waits to begin, or to begin again, and none of its name runs."""
        return bool(self.lines) and not any(line.split()[1] in STARTED for line in self.lines or ())

    @property
    def ended(self) -> bool:
        """True when no job of this name waits or runs."""
        return self.lines == []

    def __str__(self) -> str:
        """Examples: `Slurm job rlpipe-a-trainer: 12 PENDING (Resources)`,
        `Slurm job rlpipe-a-trainer: 12 CANCELLED (None)`.
        """
        return f"Slurm job {self.name}: {', '.join(self.lines or self.became) or 'none'}"


def batch_job(kind: str) -> BatchJob | None:
    """The job that is to start the services of a kind for this flow; None without a batch
    system.
    """
    name = os.environ.get(VARIABLE.format(kind.upper()), "")
    return BatchJob(name) if name else None


async def _squeue(*which: str) -> list[str]:
    """Returns `ID STATE (REASON)` of each of these jobs, by default of those that have not ended.

    OSError when Slurm does not answer.
    """
    command = ("squeue", "--noheader", *which, "--format=%A %T (%r)")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise OSError(f"squeue did not answer within {ANSWER_TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(f"squeue: {errors.decode(errors='replace').strip()}")
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    if odd := [line for line in lines if len(line.split()) < 2]:
        raise OSError(f"squeue: {odd[0]!r:.200} is no job and its state")
    return lines
