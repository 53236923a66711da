"""The thread that owns the model: takes requests and control calls from an inbox, and runs waiting
requests together, in steps.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from rlpipe.base.errors import UserError
from rlpipe.extras.local_engine.model import BUCKET_STEP, PROMPT_STEP, LocalModel, PrefixBlock, block_rows, round_up
from rlpipe.extras.local_engine.protocol import ABORTED, ABORTED_WAITING, BadRequest, Call, FinishReason, SamplingJob
from rlpipe.extras.local_engine.slots import SlotPool

POOLS_MAX = 4
IDLE_POLL_S = 1.0
LOOK_AHEAD = 256  # waiting jobs looked at to fill a prefill block
PREFIX_BYTES_MAX = 256 << 20


class PrefixStore:
    """Computed prompts by their tokens, bounded in bytes; the oldest are dropped first.

    Equal prompts only: a prefix would have another shape.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], tuple[PrefixBlock, int]] = {}
        self._bytes = 0

    def get(self, prompt: tuple[int, ...]) -> tuple[PrefixBlock, int] | None:
        return self._rows.get(prompt)

    def add(self, block: PrefixBlock) -> None:
        """Keeps a block; the oldest ones are dropped to make room, never the new one."""
        assert not any(prompt in self._rows for prompt in block.prompts), "a prompt is computed once"
        while self._rows and self._bytes + block.num_bytes > PREFIX_BYTES_MAX:
            oldest, _ = next(iter(self._rows.values()))  # rows are in the order of their blocks
            self._bytes -= oldest.num_bytes
            for prompt in oldest.prompts:
                del self._rows[prompt]
        self._bytes += block.num_bytes
        self._rows |= {prompt: (block, row) for row, prompt in enumerate(block.prompts)}
        assert self._bytes <= max(PREFIX_BYTES_MAX, block.num_bytes), "the store outgrew its bound"


class Scheduler:
    """Continuous batching over fixed shapes.

    All methods but `ask` and `stop` belong to the thread that runs `run`.
    """

    def __init__(self, model: LocalModel, weight_version: str, threads: int) -> None:
        self.model = model
        self.weight_version = weight_version
        self.threads = threads
        self.paused: str | None = None
        self.heartbeat_s = time.monotonic()
        self.prefixes = PrefixStore()
        self.waiting: defaultdict[int, deque[SamplingJob]] = defaultdict(deque)  # by bucket
        self.pools: dict[int, SlotPool] = {}
        self.live: dict[str, SamplingJob] = {}
        self._arrivals = 0
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._stopping = False

    def ask(self, action: Callable[[], Any]) -> Future[Any]:
        """Runs `action` on the scheduler's thread, between two steps. Any thread may call this."""
        answer: Future[Any] = Future()
        self._inbox.put((action, answer))
        return answer

    def run(self) -> None:
        """The thread's main function; returns after `stop`.

        Any error but a refused request ends the process (`server.py`).
        """
        torch.set_num_threads(self.threads)
        assert torch.get_num_threads() == self.threads, "results depend on the number of threads"
        with torch.inference_mode():
            while not self._stopping:
                self.heartbeat_s = time.monotonic()
                self._drain(wait=not self._may_step())
                if self._may_step():
                    self.step()

    def _may_step(self) -> bool:
        return bool(self.live) and self.paused is None and not self.model.released

    def stop(self) -> None:
        self._stopping = True
        self.ask(lambda: None)  # wakes it

    def _drain(self, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                action, answer = self._inbox.get(wait, IDLE_POLL_S)
                wait = False
                if answer.set_running_or_notify_cancel():  # else the caller went away before its turn
                    try:
                        answer.set_result(action())
                    except (BadRequest, UserError) as error:
                        answer.set_exception(error)

    # requests

    def submit(self, call: Call) -> None:
        """Adds a call's jobs, and sets `call.answered` when all are finished; BadRequest for a
        request id that is in use.
        """
        if taken := [job.rid for job in call.jobs if job.rid in self.live]:
            raise BadRequest(f"Duplicate request ID detected: {taken[0]}")
        # from now on a caller that goes away cannot cancel it
        call.answered.set_running_or_notify_cancel()
        for job in call.jobs:
            self._arrivals += 1
            job.arrival = self._arrivals
            self.live[job.rid] = job
            self.waiting[_bucket(job)].append(job)

    def abort(self, rid: str | None) -> None:
        """Ends the job called `rid`, or all jobs (None), with the tokens so far.

        As in SGLang, a `rid` in use also ends each rid that it is a prefix of, and an unused one
        ends nothing.
        """
        if rid is None or rid in self.live:
            self.abort_jobs([job for name, job in self.live.items() if name.startswith(rid or "")])

    def abort_jobs(self, jobs: list[SamplingJob]) -> None:
        """Ends those of `jobs` that are not finished."""
        unfinished = {job for job in jobs if self.live.get(job.rid) is job}
        for pool in self.pools.values():
            for job in unfinished & pool.slots.keys():
                pool.release(job)
                self._finish(job, ABORTED)
        for bucket, queued in self.waiting.items():
            self.waiting[bucket] = deque(job for job in queued if job not in unfinished)
            for job in queued:
                if job in unfinished:
                    self._finish(job, ABORTED_WAITING)

    # control

    def pause(self, mode: str) -> None:
        """Stops the steps. abort: all jobs end; retract: running jobs wait to be computed again;
        in_place: they stay.
        """
        assert mode in ("abort", "retract", "in_place"), mode
        self.paused = mode
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        self.paused = None

    def release(self) -> None:
        """Frees the memory of weights, slots and computed prompts.

        UserError while there are requests.
        """
        if self.live:
            raise UserError(f"{len(self.live)} requests are not finished: abort them first")
        if not self.model.released:
            self.pools.clear()
            self.prefixes = PrefixStore()
            self.model.release()

    def take_back(self) -> None:
        """Undoes a release; requests that came meanwhile are computed from now on."""
        if self.model.released:
            self.model.resume()

    def checksums(self) -> tuple[dict[str, str], str]:
        """As the model's; UserError while it has no weights."""
        self._check_present()
        return self.model.checksums()

    def _check_present(self) -> None:
        if self.model.released:
            raise UserError("the memory of the weights is released: resume it first")

    def update_weights(self, folder: str, version: str | None) -> None:
        """Loads new weights.

        UserError, with nothing changed, when they do not fit or running jobs forbid a flush.
        """
        self._check_present()
        if self._running() and self.paused == "in_place":
            raise UserError(
                "requests run paused in place, and their cache must be flushed: pause with mode abort or retract"
            )
        self._retract()  # their keys and values belong to the old weights
        self.model.reload(folder)
        self.prefixes = PrefixStore()
        self.weight_version = self.weight_version if version is None else version

    def flush(self) -> bool:
        """Drops computed prompts; False, with nothing done, while requests run."""
        if self._running():
            return False
        self.prefixes = PrefixStore()
        return True

    def load(self) -> dict[str, float]:
        running = self._running()
        return {
            "timestamp": time.time(),
            "num_running_reqs": len(running),
            "num_waiting_reqs": len(self.live) - len(running),
            "num_used_tokens": sum(job.num_tokens for job in running),
        }

    def _running(self) -> list[SamplingJob]:
        return [job for pool in self.pools.values() for job in pool.slots]

    def _retract(self) -> None:
        for job in sorted(self._running(), key=lambda job: job.arrival, reverse=True):
            self.waiting[_bucket(job)].appendleft(job)
        self.pools.clear()  # a NaN left by broken weights would poison the rows that come after

    # steps

    def step(self) -> None:
        """Admits waiting jobs that fit, samples one token for every running job and decodes it."""
        last_arrival = self._open_pools()
        for bucket, pool in self.pools.items():
            self._admit(pool, self.waiting[bucket], last_arrival)
            if pool.slots:
                pool.sample(self.weight_version)
            for job in list(pool.slots):
                if reason := job.reason_to_finish():
                    pool.release(job)
                    self._finish(job, reason)
            if pool.slots:
                pool.decode()

    def _open_pools(self) -> int | None:
        """Makes a pool for every bucket that has waiting jobs, oldest first; when all pools are in
        use, returns the arrival after which no job is admitted.
        """
        wanted = sorted(
            (jobs[0].arrival, bucket) for bucket, jobs in self.waiting.items() if jobs and bucket not in self.pools
        )
        for arrival, bucket in wanted:
            for other in [other for other, pool in self.pools.items() if not pool.slots]:
                # an empty pool whose next job came later must go too, or both
                # buckets wait for each other forever
                if not self.waiting[other] or self.waiting[other][0].arrival > arrival:
                    del self.pools[other]
            if len(self.pools) >= POOLS_MAX:
                # later arrivals wait, so that a pool drains and the oldest bucket gets its turn
                return arrival
            self.pools[bucket] = SlotPool(self.model, bucket)
        return None

    def _admit(self, pool: SlotPool, jobs: deque[SamplingJob], last_arrival: int | None) -> None:
        while jobs and pool.free and (last_arrival is None or jobs[0].arrival < last_arrival):
            job = jobs.popleft()
            if job.score_from is not None and job.input_logprobs is None:
                job.input_logprobs, job.input_top = self.model.score(job.prompt, job.score_from, job.top_k)
            if reason := job.reason_to_finish():  # it asks for no token
                self._finish(job, reason)
            else:
                pool.admit(job, *self._prefix(job, jobs))

    def _prefix(self, job: SamplingJob, others: deque[SamplingJob]) -> tuple[PrefixBlock, int]:
        """The computed prompt of a job; computes it if need be, in a block filled up with the
        prompts of later waiting jobs.
        """
        known = self.prefixes.get(job.prefix)
        if job.cached_tokens is None:
            job.cached_tokens = job.num_tokens if known else 0
        if known:
            return known
        padded = round_up(job.num_tokens, PROMPT_STEP)
        prompts = {job.prefix: None}
        for other in itertools.islice(others, LOOK_AHEAD):
            if len(prompts) == block_rows(padded):
                break
            same_shape = round_up(other.num_tokens, PROMPT_STEP) == padded
            if same_shape and not self.prefixes.get(other.prefix) and other.sampling.max_new_tokens:
                prompts[other.prefix] = None
        block = self.model.prefill(list(prompts), padded)
        self.prefixes.add(block)
        return block, 0

    def _finish(self, job: SamplingJob, reason: FinishReason) -> None:
        assert job.finish_reason is None and self.live[job.rid] is job, f"{job.rid} finished twice"
        del self.live[job.rid]
        job.weight_version = self.weight_version
        job.finish_reason = reason
        job.call.on_finish()
        job.call.num_finished += 1
        if job.call.num_finished == len(job.call.jobs):
            job.call.answered.set_result(None)


def _bucket(job: SamplingJob) -> int:
    return round_up(len(job.prompt) + job.sampling.max_new_tokens, BUCKET_STEP)
