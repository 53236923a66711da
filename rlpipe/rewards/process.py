"""A scoring process as its owner sees it: non-blocking pipes, bounded waits, and a kill that takes its children too."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import IO

from rlpipe.types import JsonDict, UserError

START_TIMEOUT_S = 120.0
CHUNK_BYTES = 1 << 16
POLL_S = 0.1


class LineProcess:
    """`python -m <module>` that talks JSON lines: it gets `hello`, answers {"ready": true} or {"error": message}, then serves."""

    def __init__(self, module: str, hello: JsonDict, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._start_timeout_s = start_timeout_s
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a kill takes the reward's own children too
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin: IO[bytes] = self._process.stdin
        self.stdout: IO[bytes] = self._process.stdout
        for pipe in (self.stdin, self.stdout):
            os.set_blocking(pipe.fileno(), False)
        self.send(hello)
        self.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Returns when it is ready; UserError when it cannot be, or is not within the time to start."""
        answer, alive = self.wait_answer(self._start_timeout_s)
        if answer and answer.get("ready"):
            return
        self.kill()
        if answer:
            raise UserError(answer["error"])
        what = (
            f"ended with code {self._process.returncode}" if not alive else f"did not answer in {self._start_timeout_s:.0f} s"
        )
        raise UserError(f"rl.rewards: the process that loads the rewards {what}; its output is above")

    def wait_answer(self, timeout_s: float) -> tuple[JsonDict | None, bool]:
        """The next answer (none within the time: None), and whether the process still holds its end."""
        deadline_s = time.monotonic() + timeout_s
        answers: list[JsonDict] = []
        alive = True
        while alive and not answers and time.monotonic() < deadline_s:
            self.flush()
            select.select([self.stdout], [self.stdin] if self._outgoing else [], [], POLL_S)
            answers, alive = self.receive()
        assert len(answers) <= 1, "one question has one answer"
        return (answers[0] if answers else None), alive

    def send(self, value: JsonDict) -> None:
        """Queues a line; `flush` writes it."""
        self._outgoing += json.dumps(value).encode() + b"\n"

    def flush(self) -> None:
        """Writes what the pipe takes now."""
        with suppress(BlockingIOError, BrokenPipeError):  # a process that is gone is noticed when reading
            while self._outgoing:
                written = os.write(self.stdin.fileno(), self._outgoing[:CHUNK_BYTES])
                del self._outgoing[:written]

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def receive(self) -> tuple[list[JsonDict], bool]:
        """The answers that have arrived, and whether the process still holds its end."""
        alive = True
        with suppress(BlockingIOError):
            while chunk := os.read(self.stdout.fileno(), CHUNK_BYTES):
                self._incoming += chunk
            alive = False
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        return [json.loads(line) for line in lines], alive

    def stop(self) -> None:
        """SIGKILL to the process and its children; whoever reads from it, in another thread too, finds its end."""
        if self._process.returncode is None:  # once reaped, the pid may be someone else's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Stops it and closes its pipes, which no other thread may be using; returns when it is gone."""
        self.stop()
        self._process.wait()
        self.stdin.close()
        self.stdout.close()


class RewardProcess(LineProcess):
    """`rlpipe.rewards.worker` with the rewards loaded. It scores what is in flight in order, one rollout at a time."""

    def __init__(self, rewards: dict[str, float], args: dict[str, JsonDict], timeout_s: float) -> None:
        self.in_flight: deque[int] = deque()  # the first one is being scored
        self.item_started_s = 0.0
        self.timeout_s = timeout_s
        super().__init__("rlpipe.rewards.worker", {"rewards": rewards, "args": args, "timeout_s": timeout_s})

    def submit(self, index: int, item: JsonDict) -> None:
        """Queues a rollout; its clock starts when the one before it is done."""
        if not self.in_flight:
            self.item_started_s = time.monotonic()
        self.in_flight.append(index)
        self.send({"index": index, **item})

    def finish(self, index: int) -> None:
        """The rollout in front has been answered: the next one's clock starts."""
        assert self.in_flight[0] == index, "answers come in order"
        self.in_flight.popleft()
        self.item_started_s = time.monotonic()

    def overdue_in_s(self, now_s: float) -> float:
        """Seconds until the rollout being scored is out of time."""
        return self.item_started_s + self.timeout_s - now_s if self.in_flight else float("inf")
