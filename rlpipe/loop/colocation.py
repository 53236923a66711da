"""Turns of trainer and engines in the memory of GPUs that they share (`engines.colocate`): while
one works, the other has freed its memory.

    engines sample -> engines release -> the trainer reloads with its next job, trains, saves
    -> the trainer offloads -> engines wake, load the new policy, are proved -> engines sample

On several nodes all engines take their turn together, and so do all trainer processes. Nothing has
to be remembered after a crash: child processes of the flow end with it; services that outlive it
are asked by the next start to free their memory, both sides, before either uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from rlpipe.engines.fleet import FindHosts
from rlpipe.engines.pool import EnginePool
from rlpipe.trainer.client import TrainerClient


class MemoryTurns:
    """The side that may use the memory. A call that fails leaves the turn where it was; it may be
    repeated.
    """

    def __init__(self, pool: EnginePool, joined: FindHosts, trainer: TrainerClient) -> None:
        self.pool = pool
        self.joined = joined
        self.trainer = trainer
        self.turn: Literal["nobody", "trainer", "engines"] = "nobody"
        self._lock = asyncio.Lock()

    async def to_trainer(self) -> None:
        """Frees the engines' memory; called before any job of the trainer.

        Engines have no policy afterwards, until they are given one.
        """
        async with self._lock:
            if self.turn != "trainer":
                await self.pool.release(await self.joined())
                self.turn = "trainer"

    async def to_engines(self) -> None:
        """Frees the trainer's memory; called before engines are given a policy.

        The trainer reloads with its next job.
        """
        async with self._lock:
            if self.turn != "engines":
                await self.trainer.offload()
                self.turn = "engines"


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
