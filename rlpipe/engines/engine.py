"""One engine process, as seen by its host."""

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
    """One engine process with its client."""

    address: EngineAddress
    service: Service
    client: EngineClient
    # one control call at a time, and no restart during a reload
    control: asyncio.Lock = field(default_factory=asyncio.Lock)
    # the weight version that it was proved to serve; None: it may not sample, and must be restarted
    proved: int | None = None
    # its answer when it was proved last; None after a start, and while it has no weights
    answered: ProbeAnswer | None = None
    # its memory is freed, or the process has ended: it is not restarted before `wake`
    released: bool = False
    # the weights that it was started on, onto which it may load adapters
    base: Path | None = None
    restarting_on: Weights | None = None  # the weights that a restart in progress reads
    unwell_since: float | None = None
    given_up: str = ""  # the reason why it is no longer restarted

    def serves(self, version: int) -> bool:
        """True when the engine was proved to serve `version`, runs, and answered the last health
        check.
        """
        return self.proved == version and self.service.alive() and self.unwell_since is None

    def move_to(self, port: int) -> None:
        """Sets the port for the next start of the engine."""
        assert not self.service.alive(), "it listens already"
        self.address = replace(self.address, port=port)
        self.client.url = self.address.url

    async def release(self) -> None:
        """Frees the engine's memory; an engine that cannot do so is ended, which also frees it.

        Waits for a restart that is in progress.
        """
        async with self.control:
            if self.released:
                return
            self.proved = self.answered = None
            try:
                await self.client.release()
            except EngineError as error:
                log.warning(
                    "%s could not free its memory (%s): it is stopped, and started again when it has to serve",
                    self.client.name,
                    error,
                )
                await asyncio.to_thread(self.service.stop)
            self.released, self.unwell_since = True, None

    async def load(self, weights: Weights) -> None:
        """Loads a policy in place of the one before. EngineError when only a restart can do so.

        The caller holds `control`.
        """
        if weights.adapter is None:
            await self.client.load(str(weights.folder), weights.version)
        elif weights.folder == self.base:
            await self.client.load_adapter(weights.adapter, weights.version)
        else:
            raise EngineError(
                f"{self.client.name} was started on the base {self.base}, but the adapter belongs to the base"
                f" {weights.folder}"
            )

    async def started_on(self, weights: Weights) -> None:
        """Completes a start on a policy's folder: sets the version label, and loads the adapter."""
        self.base, self.client.adapted = weights.folder, False
        await self.client.adopt(weights.version)
        if weights.adapter:
            await self.client.load_adapter(weights.adapter, weights.version)

    async def wake(self) -> None:
        """Allocates the engine's memory again, with undefined weights.

        EngineError when it ended meanwhile. The caller holds `control`.
        """
        assert self.control.locked(), "one control call at a time"
        if self.released:
            # set also when the wake fails: from here on the watch may restart it
            self.released = False
            await self.client.resume()
