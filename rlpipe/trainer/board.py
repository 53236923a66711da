"""What rank 0 knows of jobs: the one that runs, those that are done, and the position that is resident. Needs no torch.

A job asked twice is done once: its key is the sha256 of its kind and body. HTTP threads submit and wait; the main thread works.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

from rlpipe.types import JsonDict, sha256_of

STATUS_OK = 200


@dataclass
class Job:
    """One piece of work."""

    kind: str  # load, train or save
    body: JsonDict
    done: threading.Event = field(default_factory=threading.Event)
    status: int = 0
    answer: JsonDict = field(default_factory=dict)
    progress: JsonDict = field(default_factory=lambda: {"done": 0, "total": 0})

    @property
    def key(self) -> str:
        return sha256_of([self.kind, self.body])


class Refused(Exception):
    """A job that may not run now, with the answer."""

    def __init__(self, answer: JsonDict) -> None:
        super().__init__(str(answer["error"]))
        self.answer = answer


class Board:
    """At most one job at a time; positions change only by jobs that succeed."""

    def __init__(self) -> None:
        self.position: str | None = None
        self.running: Job | None = None
        self._finished: dict[str, Job] = {}  # the job that led to the position, and those after it that left it there
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._worked = time.monotonic()  # when somebody last asked for work, or it ended

    def submit(self, kind: str, body: JsonDict) -> Job:
        """The job that does this: one that runs, one that is done and still holds, or a new one. Refused otherwise."""
        job = Job(kind, body)
        with self._lock:
            self._worked = time.monotonic()
            if self.running is not None:
                if self.running.key == job.key:
                    return self.running
                raise Refused({"error": "busy", "position": self.position})
            done = self._finished.get(job.key)
            if done is not None:
                return done
            needed = {"train": body.get("start"), "save": body.get("position")}.get(kind)
            if kind != "load" and (needed is None or needed != self.position):
                raise Refused({"error": "not resident", "position": self.position})
            if kind != "save":
                self.position = None
                self._finished.clear()
            self.running = job
            self._waiting.put(job)
            return job

    def next(self, timeout_s: float) -> Job | None:
        """The next job for the main thread, or None after the timeout."""
        try:
            return self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def progress(self, done: int, total: int) -> None:
        """What the running job has done so far."""
        assert 0 <= done <= total, f"{done} of {total}"
        if self.running is not None:
            self.running.progress = {"done": done, "total": total}

    def finish(self, job: Job, status: int, answer: JsonDict) -> None:
        """Ends the running job; a successful load or train sets the position."""
        with self._lock:
            assert self.running is job, "another job was running"
            if status == STATUS_OK and job.kind != "save":
                self.position = job.body["position" if job.kind == "load" else "result"]
            job.status, job.answer = status, answer
            self._finished[job.key] = job
            self.running, self._worked = None, time.monotonic()
            job.done.set()

    def told(self, job: Job) -> None:
        """The answer was sent: a failure is forgotten, so that the same job can be tried again."""
        with self._lock:
            if job.status != STATUS_OK and self._finished.get(job.key) is job:
                del self._finished[job.key]

    def status(self) -> JsonDict:
        """What is resident, what runs and how far it is, and for how many seconds there was nothing to do."""
        running = self.running
        idle_s = 0.0 if running else time.monotonic() - self._worked
        told = running.progress if running else None
        return {"position": self.position, "busy": running is not None, "progress": told, "idle_s": idle_s}
