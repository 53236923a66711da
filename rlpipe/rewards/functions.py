"""Reward functions in processes of their own, so that one may raise, crash, print or never return.

Every rollout gets a Score. Each has `timeout_s` for itself, counted from the end of the one before it in the same process.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque

from rlpipe.rewards.process import RewardProcess
from rlpipe.rewards.score import FAILURES_MAX, Score
from rlpipe.types import EngineError, JsonDict, UserError

IN_FLIGHT_MAX = 16  # rollouts queued in a process: enough to hide the pipe
POLL_MAX_S = 1.0


class FunctionScorer:
    """`workers` processes with the rewards loaded, from `start` to `close`."""

    def __init__(self, rewards: dict[str, float], args: dict[str, JsonDict], workers: int, timeout_s: float) -> None:
        assert workers > 0
        assert timeout_s > 0
        self._rewards = rewards
        self._args = args
        self._workers = workers
        self._timeout_s = timeout_s
        self._processes: list[RewardProcess] = []
        self._scoring = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Returns when the rewards are loaded; UserError when one cannot be."""
        self._processes = [self._new() for _ in range(self._workers)]
        for process in self._processes:
            process.wait_ready()

    def score(self, items: list[JsonDict]) -> list[Score]:
        """One Score per item, in order; EngineError when it is closed, before or meanwhile."""
        with self._scoring:
            job = _Job(items)
            while len(job.scores) < len(items):
                self._check_open()
                self._feed(job)
                self._wait()
                self._check_open()  # a process that was closed did not die of its rollout
                self._collect(job)
            return [job.scores[index] for index in range(len(items))]

    def close(self) -> None:
        """Kills the processes; what is being scored ends with an EngineError."""
        self._closed = True
        for process in self._processes:
            process.stop()
        with self._scoring:  # it ends at once: there is nobody left to wait for
            for process in self._processes:
                process.kill()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("rl.rewards: closed while there was something to score")

    def _new(self) -> RewardProcess:
        return RewardProcess(self._rewards, self._args, self._timeout_s)

    def _feed(self, job: _Job) -> None:
        for process in self._processes:
            while job.pending and len(process.in_flight) < IN_FLIGHT_MAX:
                index = job.pending.popleft()
                process.submit(index, job.items[index])
            process.flush()

    def _wait(self) -> None:
        """Until a process answers, can be written to, or is out of time."""
        now_s = time.monotonic()
        left_s = min(process.overdue_in_s(now_s) for process in self._processes)
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.stdout, selectors.EVENT_READ)
                if process.has_outgoing:
                    selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.select(min(max(0.0, left_s), POLL_MAX_S))

    def _collect(self, job: _Job) -> None:
        for slot, process in enumerate(self._processes):
            # read before looking at the clock: an answer that is here is in time
            answers, alive = process.receive()
            for answer in answers:
                process.finish(answer["index"])
                job.answer(answer)
            if process.overdue_in_s(time.monotonic()) <= 0:  # also when its own alarm was quicker than this loop
                self._replace(slot, job, "reward_timeout", f"took more than rl.reward_timeout_s={self._timeout_s:g}")
            elif not alive:
                self._replace(slot, job, "reward_crash", "its process died")

    def _replace(self, slot: int, job: _Job, reason: str, what: str) -> None:
        """A new process takes over; the rollout that was being scored fails, those behind it go back in the queue."""
        dead = self._processes[slot]
        dead.kill()
        lost = list(dead.in_flight)
        if lost:
            job.fail(lost[0], reason, f"{'+'.join(self._rewards)} on prompt {job.prompt_id(lost[0])}: {what}")
        job.pending.extendleft(reversed(lost[1:]))
        job.give_up_if_broken(reason)
        fresh = self._processes[slot] = self._new()
        self._check_open()  # now that `close` can see it
        try:
            fresh.wait_ready()
        except UserError:
            self._check_open()
            raise


class _Job:
    """What one call of `score` knows."""

    def __init__(self, items: list[JsonDict]) -> None:
        self.items = items
        self.pending = deque(range(len(items)))
        self.scores: dict[int, Score] = {}
        self._num_answers = 0

    def answer(self, answer: JsonDict) -> None:
        self._num_answers += 1
        if "reason" in answer:
            self.fail(answer["index"], answer["reason"], answer["message"])
        else:
            self.scores[answer["index"]] = Score(answer["reward"], answer["parts"])

    def fail(self, index: int, reason: str, message: str) -> None:
        assert index not in self.scores
        self.scores[index] = Score(None, {}, reason, message)

    def give_up_if_broken(self, reason: str) -> None:
        """A reward that has answered nothing and killed FAILURES_MAX processes would do so for every rollout to come."""
        if self._num_answers == 0 and len(self.scores) >= FAILURES_MAX:
            while self.pending:
                self.fail(self.pending.popleft(), reason, f"given up after {FAILURES_MAX} failures in a row")

    def prompt_id(self, index: int) -> str:
        return str(self.items[index]["prompt"].get("prompt_id"))
