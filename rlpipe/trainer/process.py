"""This node's part of a gang as a child process: started, asked, brought back when it dies, stopped. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

from rlpipe.config import PipelineConfig
from rlpipe.launch import Service, check_port_free, free_port
from rlpipe.services import KEY_VARIABLE
from rlpipe.trainer.options import TrainerOptions, torchrun_argv
from rlpipe.types import JsonDict, TrainerError

DYING_S = 60.0
ANSWER_TIMEOUT_S = 5.0


def asked(url: str, path: str, key: str) -> JsonDict | None:
    """What a gang answers to a GET; None when it does not answer."""
    request = urllib.request.Request(f"{url}{path}", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError):
        return None


class GangProcess:
    """One node of a gang. Node 0 answers HTTP at `url`; the others do what it says.

    `rendezvous`: host:port where the nodes of a gang of several meet; not read when there is one.
    """

    def __init__(
        self, config: PipelineConfig, work_dir: Path, key: str, host: str = "127.0.0.1", node: int = 0, rendezvous: str = ""
    ) -> None:
        assert rendezvous or config.trainer.nodes == 1
        self.config = config
        self.key = key
        self.node = node
        self.url = ""
        self._host = host
        self._work_dir = work_dir
        self._rendezvous = rendezvous
        self._service: Service | None = None

    async def start(self) -> str:
        """Starts it; returns `url` once node 0 answers. TrainerError when it does not come up."""
        assert self._service is None, "the gang runs already"
        trainer, port = self.config.trainer, self.config.trainer.port or free_port()
        check_port_free("trainer.port", port)
        options = TrainerOptions(
            store=self.config.store,
            host=self._host,
            port=port,
            work_dir=str(self._work_dir / "trainer"),
            tokens_max=trainer.tokens_max,
            threads=trainer.threads,
            dtype=self.config.model.dtype,
            device="cuda" if trainer.gpu_ids else "cpu",
            activation_checkpointing=trainer.activation_checkpointing,
        )
        self.url = f"http://{self._host}:{port}"
        self._service = Service(
            name="trainer",
            argv=torchrun_argv(options, trainer.ranks, nodes=trainer.nodes, node=self.node, rendezvous=self._rendezvous),
            log_path=self._work_dir / "trainer.log",
            ready=lambda: self.node > 0 or asked(self.url, "/health", self.key) is not None,
            environment=self._environment(),
        )
        self._service.start()
        try:
            return await self._until_ready()
        except TrainerError:  # a retry starts anew: the port that was free may be somebody else's by now
            await self.close()
            self._service = None
            raise

    @property
    def alive(self) -> bool:
        return self._service is not None and self._service.alive()

    async def bring_back(self) -> str:
        """A dead rank ends its gang; it is started again here, within the budget. One that neither ends nor answers is ended."""
        service = self._service
        assert service is not None, "start comes first"
        await asyncio.sleep(1.0)  # a dying torchrun takes a moment to end
        deadline = time.monotonic() + DYING_S
        while service.alive() and not await asyncio.to_thread(service.ready):
            if time.monotonic() > deadline:
                await asyncio.to_thread(service.stop)
            await asyncio.sleep(0.5)
        try:
            service.ensure()
        except RuntimeError as error:
            raise TrainerError(str(error)) from error
        return await self._until_ready()

    async def close(self) -> None:
        if self._service is not None:
            await asyncio.to_thread(self._service.stop)

    async def _until_ready(self) -> str:
        assert self._service is not None
        try:
            await asyncio.to_thread(self._service.wait_ready)
        except RuntimeError as error:
            raise TrainerError(str(error)) from error
        return self.url

    def _environment(self) -> dict[str, str]:
        gpus = ",".join(str(gpu) for gpu in self.config.trainer.gpu_ids)
        shown = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        return {KEY_VARIABLE: self.key, "OMP_NUM_THREADS": str(self.config.trainer.threads), "HF_HUB_OFFLINE": "1", **shown}
