"""Rank 0's record of the trainer's jobs: the one that runs, those that are done, and the resident
position. Needs no torch.

Jobs with equal fields are one job, and are done once. The HTTP thread submits jobs and waits; the
main thread does them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlpipe.trainer.jobs import STATUS_LOST, STATUS_OK, AnyJob, AtPosition, OffloadJob, TrainJob, Unplaced


@dataclass(eq=False)
class JobRecord:
    """A job on the board. `answer`: HTTP status and body, once it is done."""

    job: AnyJob
    answer: Future[tuple[int, dict[str, object]]] = field(default_factory=Future)
    progress: dict[str, int] = field(default_factory=lambda: {"done": 0, "total": 0})


class JobRefused(Exception):
    """The job may not run now; `answer` has the reason and the resident position."""

    def __init__(self, error: str, position: str | None) -> None:
        super().__init__(error)
        self.answer = {"error": error, "position": position}


class Board:
    """Runs at most one job at a time; only a job that succeeds changes the position."""

    def __init__(self) -> None:
        self.position: str | None = None
        self.running: JobRecord | None = None
        # the nodes, with the seconds for which each has been silent
        self.nodes: Callable[[], list[dict[str, object]]] = list
        self.lost = ""  # the reason why the trainer ends; empty while it works
        # the job that led to the position, and later jobs that did not change it
        self._finished: list[JobRecord] = []
        self._waiting: queue.SimpleQueue[JobRecord] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._worked = time.monotonic()  # time of the last submit, or of the end of the last job

    def submit(self, job: AnyJob) -> JobRecord:
        """Returns the record of a job that runs, that is done and still valid, or that is new.

        JobRefused for any other job.
        """
        with self._lock:
            self._worked = time.monotonic()
            for record in [self.running] if self.running else self._finished:
                if record.job == job:
                    return record
            if self.running is not None:
                raise JobRefused("busy", self.position)
            starts_from = (
                job.start
                if isinstance(job, TrainJob)
                else job.position
                if isinstance(job, AtPosition)
                else self.position
            )
            if starts_from != self.position:
                raise JobRefused("not resident", self.position)
            # this job restores what was offloaded, so a later offload is a new job
            self._finished = [record for record in self._finished if not isinstance(record.job, OffloadJob)]
            if not isinstance(job, AtPosition | Unplaced):
                self.position = None
                self._finished.clear()
            self.running = JobRecord(job)
            self._waiting.put(self.running)
            return self.running

    def next(self, timeout_s: float) -> JobRecord | None:
        """The next job for the main thread, or None after the timeout."""
        try:
            return self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def progress(self, done: int, total: int) -> None:
        """Notes that the running job has done `done` of `total`."""
        assert 0 <= done <= total, f"{done} of {total}"
        if self.running is not None:
            self.running.progress = {"done": done, "total": total}

    def finish(self, record: JobRecord, status: int, answer: dict[str, object]) -> None:
        """Ends the running job; a job that succeeded sets the position."""
        with self._lock:
            assert self.running is record, "another job was running"
            if status == STATUS_OK and not isinstance(record.job, Unplaced):
                self.position = record.job.result if isinstance(record.job, TrainJob) else record.job.position
            self._finished.append(record)
            self.running, self._worked = None, time.monotonic()
        record.answer.set_result((status, answer))

    def give_up(self, why: str) -> None:
        """Answers all waiting and later requests with the reason why the trainer ends."""
        with self._lock:
            self.lost, running = why, self.running
        if running is not None and not running.answer.done():
            running.answer.set_result((STATUS_LOST, {"error": why}))

    def delivered(self, record: JobRecord) -> None:
        """Notes that the answer was sent: a failed job is then forgotten, so that it can be tried
        again.
        """
        with self._lock:
            if record.answer.result()[0] != STATUS_OK and record in self._finished:
                self._finished.remove(record)

    def status(self) -> dict[str, object]:
        """The resident position, the running job's progress, and the seconds since there was last
        something to do.
        """
        running = self.running
        progress, idle_s = (running.progress, 0.0) if running else (None, time.monotonic() - self._worked)
        return {"position": self.position, "busy": running is not None, "progress": progress, "idle_s": idle_s}
