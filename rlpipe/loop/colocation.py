"""Trainer and engines that share GPUs (`engines.colocate`) take turns in their memory: one works,
the other has given its memory back.

    engines sample -> engines release -> the trainer comes back with its next job, trains, saves
    -> the trainer offloads -> engines wake, load the new policy, are proved -> engines sample

On several nodes all engines have their turn, and all of the gang. Nothing of it has to be known
after a crash: child processes of the flow end with it; of services that outlive it, the next start
asks both sides to give back what they hold, before the other takes it.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from rlpipe.engines.fleet import FindHosts
from rlpipe.engines.pool import EnginePool
from rlpipe.trainer.client import TrainerClient


class MemoryTurns:
    """Whose turn it is. A call that fails leaves the turn where it was, and may be made again."""

    def __init__(self, pool: EnginePool, joined: FindHosts, trainer: TrainerClient) -> None:
        self.pool = pool
        self.joined = joined
        self.trainer = trainer
        self.turn: Literal["nobody", "trainer", "engines"] = "nobody"
        self._lock = asyncio.Lock()

    async def to_trainer(self) -> None:
        """Before any job of the trainer: engines hold no memory once this returns, and have no
        policy before they are given one.
        """
        async with self._lock:
            if self.turn != "trainer":
                await self.pool.release(await self.joined())
                self.turn = "trainer"

    async def to_engines(self) -> None:
        """Before engines are given a policy: the trainer holds no memory once this returns.

        It comes back with its next job.
        """
        async with self._lock:
            if self.turn != "engines":
                await self.trainer.offload()
                self.turn = "engines"
