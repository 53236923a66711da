"""Rewards in processes of their own, so that one may raise, crash, print or never return."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rlpipe.child import ChildProcess, ProcessEnded
from rlpipe.rewards.score import FAILURES_MAX, Score
from rlpipe.types import JsonDict, UserError

logger = logging.getLogger(__name__)


class RewardLost(RuntimeError):
    """A reward that was loaded before does not load again, for want of memory or of its files: scoring is worth another try."""


class ProcessScorer:
    """Processes with rewards loaded, from `start` to `close`; each is asked `batch_size` rollouts at a time, which have n x `timeout_s`.

    Rollouts that fail together are asked again one by one; what fails alone is at fault, where losses are bounded the second time
    only: a process that was killed from outside costs no rollout. A process that dies or hangs is replaced, at most `losses_max`
    times within one `score`, nor FAILURES_MAX times before anything was answered.
    """

    def __init__(
        self, name: str, launch: Callable[[], ChildProcess], timeout_s: float, *,
        workers: int = 1, batch_size: int = 1, losses_max: float = math.inf,
    ) -> None:  # fmt: skip
        assert workers > 0
        assert timeout_s > 0
        self._name = name
        self._launch = launch
        self._timeout_s = timeout_s
        self._workers = workers
        self._batch_size = batch_size
        self._losses_max = losses_max
        self._processes: list[ChildProcess] = []
        self._scoring = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Returns when the rewards are loaded; UserError when one cannot be."""
        self._processes = [self._launch() for _ in range(self._workers)]
        with ThreadPoolExecutor(self._workers) as threads:
            list(threads.map(ChildProcess.wait_ready, self._processes))

    def score(self, items: list[JsonDict]) -> list[Score]:
        """One Score per item, in order."""
        job = _Job(self._name, items, self._batch_size, self._losses_max)
        with self._scoring, ThreadPoolExecutor(self._workers, thread_name_prefix=self._name) as threads:
            list(threads.map(lambda slot: self._work(slot, job), range(self._workers)))
        not_asked = Score(None, {}, "reward_unavailable", f"reward {self._name!r}: closed")
        assert self._closed or len(job.scores) == len(items)
        return [job.scores.get(index, not_asked) for index in range(len(items))]

    def close(self) -> None:
        """Kills the processes; what is being scored ends soon, with faults."""
        self._closed = True
        for process in self._processes:
            process.stop()
        with self._scoring:  # it ends at once: there is nobody left to wait for
            for process in self._processes:
                process.kill()

    def _work(self, slot: int, job: _Job) -> None:
        """Asks the process in `slot` until nothing is left."""
        while not self._closed and (batch := job.take()):
            try:
                process = self._living(slot)
            except UserError as error:
                job.abandon()
                if self._closed:
                    return
                raise RewardLost(str(error)) from error
            try:
                answer = process.ask({"items": [job.items[index] for index in batch]}, self._timeout_s * len(batch))
            except TimeoutError:
                job.lose(batch, "reward_timeout", f"took more than rl.reward_timeout_s={self._timeout_s:g}")
            except ProcessEnded:
                job.lose(batch, "reward_crash", "its process died")
            else:
                job.answered(batch, answer)

    def _living(self, slot: int) -> ChildProcess:
        """A process that can be asked; UserError when it does not start again."""
        if not self._processes[slot].alive:
            self._processes[slot].kill()
            self._processes[slot] = self._launch()
            if self._closed:  # before `close` could see it
                self._processes[slot].stop()
            self._processes[slot].wait_ready()
        return self._processes[slot]


class _Job:
    """What one call of `score` knows; `lock` is for what its threads change together."""

    def __init__(self, name: str, items: list[JsonDict], batch_size: int, losses_max: float) -> None:
        self.items = items
        self.scores: dict[int, Score] = {}
        order = sorted(range(len(items)), key=lambda index: len(items[index]["completion"]))  # alike lengths pad little
        self.batches = deque(order[start : start + batch_size] for start in range(0, len(order), batch_size))
        self._name = name
        self._losses_max = losses_max
        self._num_losses = 0
        self._has_answers = False
        self._alone: set[int] = set()  # asked alone after a failure
        self._lock = threading.Lock()

    def take(self) -> list[int] | None:
        """The next batch; None when there is no more."""
        with self._lock:
            return self.batches.popleft() if self.batches else None

    def abandon(self) -> None:
        """There is nobody to ask."""
        with self._lock:
            self.batches.clear()

    def answered(self, batch: list[int], answer: JsonDict) -> None:
        """A batch's scores, or the error that all of it met."""
        self._has_answers = True
        if "error" in answer:
            with self._lock:
                self._fail(batch, "reward_error", answer["error"])
            return
        if answer.get("warning"):
            logger.warning("%s: %s", self._name, answer["warning"])
        self.scores.update((index, Score(**score)) for index, score in zip(batch, answer["scores"], strict=True))

    def lose(self, batch: list[int], reason: str, message: str) -> None:
        """A process was lost with a batch. What has lost too many would go on so: what is left is at fault then."""
        with self._lock:
            self._num_losses += 1
            self._fail(batch, reason, message)
            if self._num_losses > self._losses_max:
                self._give_up("reward_crash", f"its process had to be replaced more than {self._num_losses - 1} times")
            elif self._num_losses >= FAILURES_MAX and not self._has_answers:
                self._give_up(reason, f"given up after {self._num_losses} processes; the last one: {message}")

    def _give_up(self, reason: str, message: str) -> None:
        """What was not answered is at fault."""
        for index in [index for left in self.batches for index in left]:
            self._fault(index, reason, message)
        self.batches.clear()

    def _fail(self, batch: list[int], reason: str, message: str) -> None:
        """Of several none is known to be at fault: each is tried alone, before the others."""
        if len(batch) > 1 or (math.isfinite(self._losses_max) and batch[0] not in self._alone):
            self._alone.update(batch)
            self.batches.extendleft([index] for index in reversed(batch))
        else:
            self._fault(batch[0], reason, message)

    def _fault(self, index: int, reason: str, message: str) -> None:
        where = f"reward {self._name!r} on prompt {self.items[index]['prompt'].get('prompt_id')}"
        self.scores[index] = Score(None, {}, reason, f"{where}: {message}")
