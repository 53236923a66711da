"""The trainer as a session has it: started when it is needed, and one job's turn at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlpipe.loop.colocation import MemoryTurns
from rlpipe.trainer.client import TrainerClient


class TrainerSeat:
    """The trainer of a session. `turn` is held by whoever brings the trainer to a position and asks
    for what it holds then. `memory`: whose turn it is in the memory that it shares with engines;
    None where it shares none.
    """

    def __init__(
        self, client: TrainerClient, memory: MemoryTurns | None, may_steer: Callable[[], Awaitable[None]]
    ) -> None:
        self.client, self.memory, self._may_steer = client, memory, may_steer
        self.turn, self._starting = asyncio.Lock(), asyncio.Lock()

    async def ready(self) -> TrainerClient:
        """The client of the trainer, for a job: the trainer runs, and has the memory that it may
        share with engines. Errors as of `Session.check_open`; TakenOver.
        """
        async with self._starting:
            await self._may_steer()
            if self.memory:
                await self.memory.to_trainer()
            if not self.client.started:
                await self.client.start()
        return self.client
