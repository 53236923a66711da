"""The thread that owns the model: takes requests and control calls from an inbox, runs what waits together, in steps."""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from rlpipe.engines.local.kvcache import PrefixBlock, PrefixStore
from rlpipe.engines.local.model import BUCKET_STEP, PROMPT_STEP, LocalModel, block_rows, round_up
from rlpipe.engines.local.protocol import ABORTED, ABORTED_WAITING, Call, Job, RequestRefused
from rlpipe.engines.local.slots import SlotPool
from rlpipe.types import JsonDict, UserError

POOLS_MAX = 4
IDLE_POLL_S = 1.0
LOOK_AHEAD = 256  # waiting jobs looked at to fill a prefill block


class Scheduler:
    """Continuous batching over fixed shapes. All methods but `ask` and `stop` belong to the thread that runs `run`."""

    def __init__(self, model: LocalModel, weight_version: str, threads: int, deliver: Callable[[list[Job]], None]) -> None:
        self.model = model
        self.weight_version = weight_version
        self.threads = threads
        self.deliver = deliver  # called with finished jobs, at most once a step
        self.paused: str | None = None
        self.heartbeat_s = time.monotonic()
        self.prefixes = PrefixStore()
        self.waiting: dict[int, deque[Job]] = {}  # by bucket
        self.pools: dict[int, SlotPool] = {}
        self.live: dict[str, Job] = {}
        self._arrivals = 0
        self._finished: list[Job] = []
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._stopping = False

    def ask(self, action: Callable[[], Any]) -> Future[Any]:
        """Runs `action` on the scheduler's thread, between two steps. Any thread may call this."""
        answer: Future[Any] = Future()
        self._inbox.put((action, answer))
        return answer

    def run(self) -> None:
        """The thread's main function; returns after `stop`. Any fault but a refused request ends the process (see server)."""
        torch.set_num_threads(self.threads)
        assert torch.get_num_threads() == self.threads, "results depend on the number of threads"
        with torch.inference_mode():
            while not self._stopping:
                self.heartbeat_s = time.monotonic()
                self._drain(wait=self.paused is not None or not self.live)
                if self.paused is None and self.live:
                    self.step()
                self._deliver()

    def stop(self) -> None:
        self._stopping = True
        self.ask(lambda: None)  # wakes it

    def _drain(self, wait: bool) -> None:
        try:
            action, answer = self._inbox.get(timeout=IDLE_POLL_S) if wait else self._inbox.get_nowait()
            while True:
                if answer.set_running_or_notify_cancel():  # else the caller went away before its turn
                    try:
                        answer.set_result(action())
                    except (RequestRefused, UserError) as error:
                        answer.set_exception(error)
                action, answer = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _deliver(self) -> None:
        if self._finished:
            self.deliver(self._finished)
            self._finished = []

    # requests

    def submit(self, call: Call) -> None:
        """Queues a request's jobs; RequestRefused for a request id that is in use."""
        if taken := [job.rid for job in call.jobs if job.rid in self.live]:
            raise RequestRefused(f"Duplicate request ID detected: {taken[0]}")
        for job in call.jobs:
            self._arrivals += 1
            job.arrival = self._arrivals
            self.live[job.rid] = job
            self.waiting.setdefault(round_up(job.tokens_max, BUCKET_STEP), deque()).append(job)

    def abort(self, rid: str | None) -> None:
        """Ends the job called `rid`, or everything (None), with the tokens so far.

        As in SGLang, a live `rid` takes along every rid that it is a prefix of, and one that is not live ends nothing.
        """
        if rid is None or rid in self.live:
            self.abort_jobs([job for name, job in self.live.items() if name.startswith(rid or "")])

    def abort_jobs(self, jobs: list[Job]) -> None:
        """Ends those of `jobs` that are not finished."""
        chosen = {id(job) for job in jobs if job.rid in self.live and self.live[job.rid] is job}
        waiting = {id(job) for queued in self.waiting.values() for job in queued}
        for pool in self.pools.values():
            for slot in pool.running():
                if id(pool.jobs[slot]) in chosen:
                    pool.release(slot, self.weight_version)
        for bucket in list(self.waiting):
            self.waiting[bucket] = deque(job for job in self.waiting[bucket] if id(job) not in chosen)
        for job in jobs:
            if id(job) in chosen:
                self._finish(job, ABORTED_WAITING if id(job) in waiting else ABORTED)

    # control

    def pause(self, mode: str) -> None:
        """Stops stepping. abort: everything ends; retract: running jobs wait to be computed anew; in_place: they stay."""
        assert mode in ("abort", "retract", "in_place"), mode
        self.paused = mode
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        self.paused = None

    def update_weights(self, folder: str, version: str | None, flush: bool) -> None:
        """Puts new weights in place. UserError, nothing changed, when they do not fit or running jobs forbid a flush."""
        running = any(pool.busy for pool in self.pools.values())
        if flush and running and self.paused == "in_place":
            raise UserError("flush_cache=true while requests run paused in place: pause with mode abort or retract")
        if flush:
            self._retract()  # their keys and values belong to the old weights
        for pool in self.pools.values():
            for slot in pool.running():
                pool.stamp(slot, self.weight_version)
        self.model.reload(folder)
        self.prefixes.clear()
        self.weight_version = self.weight_version if version is None else version

    def flush(self) -> bool:
        """Forgets computed prompts; false, with nothing done, while requests run."""
        if any(pool.busy for pool in self.pools.values()):
            return False
        self.prefixes.clear()
        return True

    def load(self) -> JsonDict:
        running = sum(int(pool.active_S.sum()) for pool in self.pools.values())
        tokens = sum(int(pool.length_S[pool.active_S].sum()) for pool in self.pools.values())
        waiting = len(self.live) - running
        return {"timestamp": time.time(), "num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": tokens}

    def _retract(self) -> None:
        for bucket, pool in self.pools.items():
            jobs = [pool.release(slot, self.weight_version) for slot in pool.running()]
            self.waiting.setdefault(bucket, deque()).extendleft(reversed(jobs))
        self.pools.clear()  # a NaN left by broken weights would poison the rows that come after

    # steps

    def step(self) -> None:
        """Admits what fits, samples one token for every running job and decodes it."""
        last_arrival = self._open_pools()
        for bucket, pool in self.pools.items():
            self._admit(pool, self.waiting.get(bucket, deque()), last_arrival)
            if pool.busy:
                self._sample(pool)
            if pool.busy:
                pool.decode()
        for bucket in [bucket for bucket, jobs in self.waiting.items() if not jobs]:
            del self.waiting[bucket]

    def _open_pools(self) -> int | None:
        """Makes a pool for every bucket that waits, oldest first; when all are in use, the arrival after which none is admitted."""
        wanted = sorted((jobs[0].arrival, bucket) for bucket, jobs in self.waiting.items() if jobs and bucket not in self.pools)
        for arrival, bucket in wanted:
            for other in [other for other, pool in self.pools.items() if not pool.busy]:
                # an empty pool whose next job came later must go too, or both buckets wait for each other forever
                if not self.waiting.get(other) or self.waiting[other][0].arrival > arrival:
                    del self.pools[other]
            if len(self.pools) >= POOLS_MAX:
                return arrival  # later arrivals wait, so that a pool drains and the oldest bucket gets its turn
            self.pools[bucket] = SlotPool(self.model, bucket)
        return None

    def _admit(self, pool: SlotPool, jobs: deque[Job], last_arrival: int | None) -> None:
        chosen: dict[int, tuple[PrefixBlock, list[Job], list[int]]] = {}  # by block, so that each is copied once
        room = len(pool.free)
        while jobs and room and (last_arrival is None or jobs[0].arrival < last_arrival):
            job = jobs.popleft()
            if job.score_from is not None and job.input_logprobs is None:
                job.input_logprobs = self.model.score(job.prompt, job.score_from)
            if job.sampling.max_new_tokens == 0:
                self._finish(job, {"type": "length", "length": 0})
                continue
            block, row = self._prefix(job, jobs)
            _, block_jobs, rows = chosen.setdefault(id(block), (block, [], []))
            block_jobs.append(job)
            rows.append(row)
            room -= 1
        for block, block_jobs, rows in chosen.values():
            pool.admit(block_jobs, block, rows)

    def _prefix(self, job: Job, others: deque[Job]) -> tuple[PrefixBlock, int]:
        """The computed prompt of a job; computes it if need be, in a block filled up with prompts that wait behind it."""
        prompt = (*job.prompt, *job.tokens)
        found = self.prefixes.get(prompt)
        if job.cached_tokens is None:
            job.cached_tokens = len(prompt) if found else 0
        if found:
            return found
        padded = round_up(len(prompt), PROMPT_STEP)
        prompts = {prompt: None}
        for index, other in enumerate(others):
            if len(prompts) == block_rows(padded) or index == LOOK_AHEAD:
                break
            tokens = (*other.prompt, *other.tokens)
            if round_up(len(tokens), PROMPT_STEP) == padded and not self.prefixes.get(tokens) and other.sampling.max_new_tokens:
                prompts[tokens] = None
        self.prefixes.add(list(prompts), self.model.prefill(list(prompts), padded))
        found = self.prefixes.get(prompt)
        assert found is not None, "a prompt was computed but not kept"
        return found

    def _sample(self, pool: SlotPool) -> None:
        for slot, matched in pool.sample():
            job = pool.release(slot, self.weight_version)
            if not all(map(math.isfinite, job.logprobs)):
                self._finish(job, {"type": "abort", "message": "the model's logits are not finite", "status_code": 500})
            elif matched is not None:
                self._finish(job, {"type": "stop", "matched": matched})
            else:
                self._finish(job, {"type": "length", "length": len(job.tokens)})

    def _finish(self, job: Job, reason: JsonDict) -> None:
        assert job.finish_reason is None and self.live[job.rid] is job, f"{job.rid} finished twice"
        del self.live[job.rid]
        job.finish_reason = reason
        job.weight_version = self.weight_version
        self._finished.append(job)
