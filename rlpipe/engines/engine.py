"""One engine process as its host sees it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlpipe.base.errors import EngineError
from rlpipe.engines.client import EngineClient
from rlpipe.engines.commands import EngineAddress
from rlpipe.engines.proof import ProbeAnswer
from rlpipe.engines.weights import Weights
from rlpipe.processes.launch import Service

log = logging.getLogger(__name__)


@dataclass
class Engine:
    """One engine process and the client that talks to it."""

    address: EngineAddress
    service: Service
    client: EngineClient
    control: asyncio.Lock = field(default_factory=asyncio.Lock)  # one control call at a time; no repair during a reload
    # the weight version that it was proved to serve; None: it may not
    # sample, and only a restart helps
    proved: int | None = None
    # when it was proved last; None since a start, and while it has no weights
    answered: ProbeAnswer | None = None
    # it has given its memory back, or has ended: nobody restarts it before it is woken
    released: bool = False
    # the weights that it was started on, beside which it may load adapters
    base: Path | None = None
    restarting_on: Weights | None = None  # what a restart under way reads
    unwell_since: float | None = None
    given_up: str = ""  # why it is not restarted any more

    def serves(self, version: int) -> bool:
        """True when the engine was proved to serve `version`, runs, and answered when it was last
        looked at."""
        return self.proved == version and self.service.alive() and self.unwell_since is None

    def move_to(self, port: int) -> None:
        """Sets the port on which the engine listens from its next start on."""
        assert not self.service.alive(), "it listens already"
        self.address = replace(self.address, port=port)
        self.client.url = self.address.url

    async def release(self) -> None:
        """Gives its memory back; an engine that cannot is ended, which does it too.

        A restart under way is waited for.
        """
        async with self.control:
            if self.released:
                return
            self.proved = self.answered = None
            try:
                await self.client.release()
            except EngineError as error:
                log.warning(
                    "%s could not give its memory back (%s): it is ended until it is to serve", self.client.name, error
                )
                await asyncio.to_thread(self.service.stop)
            self.released, self.unwell_since = True, None

    async def load(self, weights: Weights) -> None:
        """Puts a policy in place of the one before; EngineError when only a restart can.

        The caller holds `control`.
        """
        if weights.adapter is None:
            await self.client.load(str(weights.folder), weights.version)
        elif weights.folder == self.base:
            await self.client.load_adapter(weights.adapter, weights.version)
        else:
            raise EngineError(f"{self.client.name} was started on {self.base}, and the adapter is of {weights.folder}")

    async def started_on(self, weights: Weights) -> None:
        """It was just started on a policy's folder: it is told the
        version, and loads the adapter."""
        self.base, self.client.adapted = weights.folder, False
        await self.client.adopt(weights.version)
        if weights.adapter:
            await self.client.load_adapter(weights.adapter, weights.version)

    async def wake(self) -> None:
        """Has its memory again, whatever the weights in it are worth.

        EngineError when it ended meanwhile. The caller holds `control`.
        """
        assert self.control.locked(), "one control call at a time"
        if self.released:
            self.released = False  # whatever comes of it: from here on it is looked after
            await self.client.resume()
