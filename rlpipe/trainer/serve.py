"""This node's part of a run's gang as a service of the run: `rlpipe trainer`, the deployment serve-trainer.

Node 0 says in its record where the nodes meet, anew at each start of the gang: a gang that lost a node starts whole, or not at all.
"""

from __future__ import annotations

import asyncio
import logging

from rlpipe.config import PipelineConfig
from rlpipe.launch import free_port
from rlpipe.services import TRAINER, WATCH_S, Registration, ServiceRecord, node_name, registered, service_key
from rlpipe.store.backend import Store
from rlpipe.trainer.process import GangProcess, asked
from rlpipe.types import TrainerError

log = logging.getLogger(__name__)
RESTARTS_MAX = 5


class GangService:
    """One node's part, restarted when it ends, within RESTARTS_MAX."""

    def __init__(self, store: Store, config: PipelineConfig, node: int, address: str) -> None:
        assert 0 <= node < config.trainer.nodes, f"node {node} of {config.trainer.nodes}"
        self.registration = Registration(store, f"runs/{config.run}", TRAINER, ServiceRecord(node_name(node), ""))
        self._config = config
        self._node = node
        self._address = address
        self._key = service_key()
        self._work_dir = self.registration.work_dir()
        self._gang: GangProcess | None = None
        self._starts = 0

    async def run(self, idle_timeout_s: float, ended: asyncio.Event) -> str:
        """Serves until it is over, and says why. TrainerError when the gang cannot be kept up."""
        await self.registration.enter()  # before there is anything to change in it: two writes at once would have no order
        over = asyncio.create_task(self.registration.until_over(self._idle_s, idle_timeout_s, ended))
        keeping = asyncio.create_task(self._keep_up())
        try:
            await asyncio.wait({over, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            return await over
        finally:
            over.cancel()
            keeping.cancel()
            await asyncio.gather(over, keeping, return_exceptions=True)
            await self.registration.leave()
            if self._gang is not None:
                await self._gang.close()

    async def _idle_s(self) -> float:
        """Seconds since the gang's last job; a gang that is only starting, and the nodes behind the first, do not count them."""
        if self._node > 0 or self._gang is None:
            return 0.0
        told = await asyncio.to_thread(asked, self._gang.url, "/status", self._key)
        return told["idle_s"] if told is not None else 0.0

    async def _keep_up(self) -> None:
        """Starts the gang, again whenever it ended."""
        met_at = ""
        while True:
            met_at = await self._meeting_point(met_at)
            if self._starts > RESTARTS_MAX:
                raise TrainerError(f"the gang ended {self._starts} times; see {self._work_dir}/trainer.log")
            self._starts += 1
            self._gang = GangProcess(self._config, self._work_dir, self._key, self._address, self._node, met_at)
            try:
                url = await self._gang.start()
                if self._node == 0:
                    await self._tell(url, met_at)
                while self._gang.alive and await self._meets_at(met_at):
                    await asyncio.sleep(WATCH_S)
            except TrainerError as error:
                log.warning("the gang did not come up: %s", error)
            finally:
                await self._gang.close()
            log.warning("the gang of node %d ended", self._node)

    async def _meeting_point(self, before: str) -> str:
        """Where the nodes meet: a new place on node 0, which says so; the others wait for one that they have not been to."""
        if self._node == 0:
            met_at = f"{self._address}:{free_port()}"
            await self._tell("", met_at)
            return met_at
        while (met_at := await self._told()) in ("", before):
            await asyncio.sleep(WATCH_S)
        return met_at

    async def _meets_at(self, met_at: str) -> bool:
        return self._node == 0 or await self._told() in ("", met_at)

    async def _told(self) -> str:
        """What the record of node 0 says; empty when there is none."""
        run_root, store = self.registration.run_root, self.registration.store
        records = await asyncio.to_thread(registered, store, run_root, TRAINER)
        return next((record.rendezvous for record in records if record.name == node_name(0)), "")

    async def _tell(self, url: str, rendezvous: str) -> None:
        await self.registration.change(url=url, rendezvous=rendezvous)
