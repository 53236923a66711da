"""The trainer gang from the flow's side: starts it, asks it, brings it back when it dies. Only references cross this border."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import aiohttp

from rlpipe.types import JsonDict, StepRefused, TrainerError

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0  # the gang answers within 20 s, "running" if it must
BUSY_RETRY_S = 0.5


class NotResident(TrainerError):
    """The gang does not hold the position that a job starts from (it was restarted, or served another run)."""


class GangLost(TrainerError):
    """The gang died while it was asked; it has been restarted and is empty."""


class GangPlace(Protocol):
    """Where a gang runs: child processes of the flow, or services of the run."""

    key: str  # the gang's bearer key

    async def start(self) -> str:
        """Its URL, once it answers; TrainerError when it does not come up."""
        ...

    async def bring_back(self) -> str:
        """Its URL, once it answers again after it was lost."""
        ...

    async def close(self) -> None: ...


class TrainerClient:
    """One resident gang. `load`, `train` and `save` are idempotent by content: asked twice, done once."""

    def __init__(self, place: GangPlace, job_timeout_s: float) -> None:
        self.place = place
        self.job_timeout_s = job_timeout_s
        self.session: aiohttp.ClientSession | None = None
        self.url = ""

    @property
    def started(self) -> bool:
        return self.session is not None

    async def start(self) -> None:
        """Starts the gang, or finds it, and waits until it answers."""
        assert self.session is None, "the gang runs already"
        self.url = await self.place.start()
        self.session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.place.key}"})

    async def run(self, job: str, body: JsonDict, on_progress: Callable[[JsonDict], None] | None = None) -> JsonDict:
        """Does one job (`load`, `train` or `save`) and returns its result.

        NotResident when the gang holds another position, GangLost when it died (and was restarted, empty),
        StepRefused when a step would be non-finite, TrainerError past `trainer.job_timeout_s`.
        """
        deadline = time.monotonic() + self.job_timeout_s
        while time.monotonic() < deadline:
            status, answer = await self._post(job, body)
            if status == 200:
                return answer["result"]
            if status == 202:
                if on_progress is not None:
                    on_progress(answer["progress"])
                continue
            message = str(answer.get("error"))
            if status == 422:
                raise StepRefused(message)
            if status == 409 and message == "not resident":
                raise NotResident(f"the trainer holds {answer.get('position')}, not what {job} starts from")
            if status == 409:
                await asyncio.sleep(BUSY_RETRY_S)
                continue
            raise TrainerError(f"the trainer refused {job} ({status}): {message}")
        raise TrainerError(f"{job} took longer than trainer.job_timeout_s={self.job_timeout_s}")

    async def _post(self, job: str, body: JsonDict) -> tuple[int, JsonDict]:
        assert self.session is not None, "start comes first"
        try:
            timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
            async with self.session.post(f"{self.url}/{job}", json=body, timeout=timeout) as answer:
                return answer.status, await answer.json()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            log.warning("the trainer was lost while doing %s (%s %s): bringing it back", job, type(error).__name__, error)
            self.url = await self.place.bring_back()
            raise GangLost(f"the trainer died while doing {job}") from error

    async def close(self) -> None:
        await self.place.close()
        if self.session is not None:
            await self.session.close()
