"""The trainer gang from the flow's side: starts it, asks it, brings it back when it dies. Only references cross this border."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import aiohttp

from rlpipe.config import PipelineConfig
from rlpipe.launch import Service, check_port_free, free_port
from rlpipe.trainer.options import TrainerOptions, torchrun_argv
from rlpipe.types import JsonDict, StepRefused, TrainerError, UserError

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0  # the gang answers within 20 s, "running" if it must
BUSY_RETRY_S = 0.5
DYING_S = 60.0


class NotResident(TrainerError):
    """The gang does not hold the position that a job starts from (it was restarted, or served another run)."""


class GangLost(TrainerError):
    """The gang died while it was asked; it has been restarted and is empty."""


class TrainerClient:
    """One resident gang. `load`, `train` and `save` are idempotent by content: asked twice, done once."""

    def __init__(self, config: PipelineConfig, work_dir: Path) -> None:
        self.config = config
        self.work_dir = work_dir
        self.service: Service | None = None
        self.session: aiohttp.ClientSession | None = None
        self.url = ""
        self.token = secrets.token_hex(16)

    @property
    def started(self) -> bool:
        return self.service is not None

    async def start(self) -> None:
        """Starts the gang and waits until it answers."""
        assert self.service is None, "the gang runs already"
        trainer, port = self.config.trainer, self.config.trainer.port or free_port()
        try:
            check_port_free("trainer.port", port)
        except ValueError as error:
            raise UserError(str(error)) from error
        options = TrainerOptions(
            store=self.config.store,
            host="127.0.0.1",
            port=port,
            work_dir=str(self.work_dir / "trainer"),
            tokens_max=trainer.tokens_max,
            threads=trainer.threads,
            dtype=self.config.model.dtype,
            device="cuda" if trainer.gpu_ids else "cpu",
            activation_checkpointing=trainer.activation_checkpointing,
        )
        self.url = f"http://127.0.0.1:{port}"
        self.service = Service(
            name="trainer",
            argv=torchrun_argv(options, trainer.ranks),
            log_path=self.work_dir / "trainer.log",
            ready=self._answers,
            environment=self._environment(),
        )
        self.service.start()
        self.session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.token}"})
        await self._wait_ready()

    def _environment(self) -> dict[str, str]:
        gpus = ",".join(str(gpu) for gpu in self.config.trainer.gpu_ids)
        shown = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        threads = str(self.config.trainer.threads)
        return {"RLPIPE_TRAINER_TOKEN": self.token, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", **shown}

    def _answers(self) -> bool:
        request = urllib.request.Request(f"{self.url}/health", headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    async def _wait_ready(self) -> None:
        assert self.service is not None
        try:
            await asyncio.to_thread(self.service.wait_ready)
        except RuntimeError as error:
            raise TrainerError(str(error)) from error

    async def run(self, job: str, body: JsonDict, on_progress: Callable[[JsonDict], None] | None = None) -> JsonDict:
        """Does one job (`load`, `train` or `save`) and returns its result.

        NotResident when the gang holds another position, GangLost when it died (and was restarted, empty),
        StepRefused when a step would be non-finite, TrainerError past `trainer.job_timeout_s`.
        """
        deadline = time.monotonic() + self.config.trainer.job_timeout_s
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
        raise TrainerError(f"{job} took longer than trainer.job_timeout_s={self.config.trainer.job_timeout_s}")

    async def _post(self, job: str, body: JsonDict) -> tuple[int, JsonDict]:
        assert self.session is not None, "start comes first"
        try:
            timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
            async with self.session.post(f"{self.url}/{job}", json=body, timeout=timeout) as answer:
                return answer.status, await answer.json()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            log.warning("the trainer was lost while doing %s (%s %s): bringing it back", job, type(error).__name__, error)
            await self._bring_back()
            raise GangLost(f"the trainer died while doing {job}") from error

    async def _bring_back(self) -> None:
        """A dead rank ends its gang; it is started again here, within the budget. One that neither ends nor answers is ended."""
        assert self.service is not None
        await asyncio.sleep(1.0)  # a dying torchrun takes a moment to end
        deadline = time.monotonic() + DYING_S
        while self.service.alive() and not await asyncio.to_thread(self._answers):
            if time.monotonic() > deadline:
                await asyncio.to_thread(self.service.stop)
            await asyncio.sleep(0.5)
        try:
            self.service.ensure()
        except RuntimeError as error:
            raise TrainerError(str(error)) from error
        await self._wait_ready()

    async def close(self) -> None:
        if self.service is not None:
            await asyncio.to_thread(self.service.stop)
        if self.session is not None:
            await self.session.close()
