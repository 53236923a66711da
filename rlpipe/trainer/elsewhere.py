"""Where a run's gang is: child processes of the flow, or services of the run."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

from rlpipe.services import (
    LOST_S,
    QUEUE_WAIT_S,
    TRAINER,
    ServiceRecord,
    StartService,
    dismiss,
    node_name,
    registered,
    service_key,
)
from rlpipe.store.run import Run
from rlpipe.trainer.client import GangPlace
from rlpipe.trainer.process import GangProcess, asked
from rlpipe.types import TrainerError

LOOK_AGAIN_S = 2.0
WAIT_S = 600.0  # for a gang that somebody else is to start


def gang_place(run: Run, work_dir: Path, start_service: StartService) -> GangPlace:
    """The place that `trainer.place` names."""
    trainer = run.config.trainer
    if trainer.place == "process":
        return GangProcess(run.config, work_dir, secrets.token_hex(16))
    return RegisteredGang(run, start_service)


class RegisteredGang:
    """A gang whose nodes are services of the run; with `trainer.place = "deployment"` they are started where they are missing."""

    def __init__(self, run: Run, start_service: StartService) -> None:
        self.key = service_key()
        self._run = run
        self._started_here = run.config.trainer.place == "deployment"
        self._start_service = start_service

    async def start(self) -> str:
        wait_s = QUEUE_WAIT_S if self._started_here else WAIT_S
        deadline, lost_at = time.monotonic() + wait_s, None
        while time.monotonic() < deadline:
            url = (await self._records()).get(node_name(0), ServiceRecord("", "")).url
            if url and await asyncio.to_thread(asked, url, "/health", self.key) is not None:
                return url
            lost_at = (lost_at or time.monotonic()) if url else None
            lost = lost_at is not None and time.monotonic() - lost_at > LOST_S
            if self._started_here:
                for node in range(self._run.config.trainer.nodes):
                    await self._start_service(TRAINER, node, lost)
            lost_at = None if lost else lost_at
            await asyncio.sleep(LOOK_AGAIN_S)
        raise TrainerError(f"no gang of the run answered within {wait_s:g} s; {self._advice()}")

    async def bring_back(self) -> str:
        return await self.start()

    async def close(self) -> None:
        """A gang that was started for the run is dismissed."""
        for name in await self._records() if self._started_here else ():
            await asyncio.to_thread(dismiss, self._run.store, self._run.root, TRAINER, name)

    async def _records(self) -> dict[str, ServiceRecord]:
        told = await asyncio.to_thread(registered, self._run.store, self._run.root, TRAINER)
        return {record.name: record for record in told}

    def _advice(self) -> str:
        if self._started_here:
            return f"does a worker serve the pool of trainer.deployment={self._run.config.trainer.deployment!r}?"
        return f"on the node that trains run `rlpipe trainer --store {self._run.store.url} --run {self._run.name}`"
