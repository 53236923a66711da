"""The flow's client of the trainer: starts it, sends it jobs, and restarts it when it dies.

Jobs hold references, never data.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Callable, Mapping

import aiohttp

from rlpipe.base.errors import StepRefused, TrainerError
from rlpipe.base.values import JsonDict
from rlpipe.records.sending import Sender
from rlpipe.services.calls import http_call, json_of, new_session
from rlpipe.trainer.jobs import STATUS_LOST, STATUS_STORE, JobAnswer
from rlpipe.trainer.process import TrainerPlace, TrainerProcesses

log = logging.getLogger(__name__)
JOB_TIMEOUT_S = 7200.0
CALL_TIMEOUT_S = 60.0  # rank 0 answers within 20 s, with "running" for a job that takes longer
BUSY_RETRY_S = 0.5


class NotResident(TrainerError):
    """The trainer does not have the position that a job starts from (it was restarted, or did jobs
    of another run).
    """


class TrainerLost(TrainerError):
    """The trainer died during a job; it has been restarted and has nothing resident."""


class TrainerClient:
    """A client of one trainer. Jobs are idempotent by content: a job that is sent twice is done
    once.
    """

    def __init__(self, place: TrainerPlace) -> None:
        self.place = place
        self.session: aiohttp.ClientSession | None = None
        self.url = ""
        self._times_lost = 0
        self._bringing_back = asyncio.Lock()

    @property
    def started(self) -> bool:
        return self.session is not None

    @property
    def serves_files(self) -> bool:
        """True when the trainer serves the files that it has published to other nodes; False for
        child processes of this process.
        """
        return not isinstance(self.place, TrainerProcesses)

    def sender(self, position: str) -> Sender:
        """The address for engines that receive the policy at `position` from the trainer's memory;
        valid while that policy is resident.
        """
        return Sender(self.url, position, self.place.key if isinstance(self.place, TrainerProcesses) else "")

    async def start(self) -> None:
        """Starts the trainer, or finds a running one, and waits until it answers."""
        assert self.session is None, "the trainer runs already"
        self.url = await self.place.start()
        self.session = new_session()

    async def run(
        self, job: str, body: Mapping[str, object], on_progress: Callable[[dict[str, int]], None] | None = None
    ) -> JobAnswer:
        """Does one job (`load`, `train`, `save`, `upload` or `offload`) and returns its result.

        NotResident when the trainer has another position, TrainerLost when it died (and was
        restarted, with nothing resident), StepRefused when a step would be non-finite, OSError when
        the store could not be reached, TrainerError past JOB_TIMEOUT_S.
        """
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while time.monotonic() < deadline:
            times_lost = self._times_lost
            status, answer = await self._post(job, body, times_lost)
            message = str(answer.get("error"))
            if status == 200:
                for line in answer["result"].get("warnings", ()):
                    log.warning("trainer: %s", line)
                return answer["result"]
            if status == 422:
                raise StepRefused(message)
            if status == STATUS_LOST:
                raise await self._lost(job, message, times_lost)
            if status == STATUS_STORE:
                raise OSError(errno.EIO, message)
            if status == 409 and message == "not resident":
                raise NotResident(f"the trainer holds {answer.get('position')}, and {job} starts from another position")
            if status not in (202, 409):
                raise TrainerError(f"the trainer refused {job} ({status}): {message}")
            if status == 409:
                await asyncio.sleep(BUSY_RETRY_S)
            elif on_progress is not None:
                on_progress(answer["progress"])
        raise TrainerError(
            f"{job} took longer than {JOB_TIMEOUT_S:g} s; make it shorter: smaller sft.segment_steps or rl.num_prompts"
        )

    async def offload(self) -> None:
        """Frees the trainer's device memory until its next job, also where another process of the
        run uses the same trainer. Does nothing for one that was never started, or is lost
        meanwhile: it has no memory.
        """
        if not self.started and (url := await self.place.running()):
            self.url, self.session = url, new_session()
        if self.started:
            with contextlib.suppress(TrainerLost):
                await self.run("offload", {"kind": "offload"})

    async def _post(self, job: str, body: Mapping[str, object], times_lost: int) -> tuple[int, JsonDict]:
        assert self.session is not None, "start comes first"
        try:
            url, key = f"{self.url}/{job}", self.place.key
            status, answer = await http_call(self.session, "POST", url, key, body, CALL_TIMEOUT_S)
            return status, json_of(url, status, answer)
        except ConnectionError as error:
            raise await self._lost(job, f"node 0 does not answer ({error})", times_lost) from error

    async def _lost(self, job: str, why: str, times_lost: int) -> TrainerLost:
        """Restarts the trainer, once for all jobs that wait for it; returns the error to raise.

        TrainerError, which names the job that was lost, when the trainer does not start again.

        `times_lost`: the number of earlier losses when the job was sent.
        """
        async with self._bringing_back:
            if self._times_lost == times_lost:
                log.warning("the trainer was lost while doing %s (%s): starting it again", job, why)
                try:
                    self.url = await self.place.bring_back()
                except TrainerError as error:
                    raise TrainerError(f"{error}\nThe trainer was lost while doing {job}: {why}") from error
                self._times_lost += 1
                log.warning("the trainer runs again, and holds no weights yet")
        return TrainerLost(f"the trainer was lost while doing {job}: {why}")

    async def close(self) -> None:
        await self.place.close()
        if self.session is not None:
            await self.session.close()
