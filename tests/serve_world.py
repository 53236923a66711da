"""A served policy whose pool says what it is given to say, token by token, and the server in front
of it, with the tokenizer of the preset `agent`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from rlpipe.config.source import read_config
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest
from rlpipe.extras.serve.policy import ServedPolicy
from rlpipe.extras.serve.server import SHUTDOWN_S, PolicyServer
from tests.paths import ROOT


@dataclass
class TalkingPool:
    """Says one text after the other, each with its end, a token at a time; ends early once it is
    enough."""

    tokenizer: ChatTokenizer
    texts: list[str] = field(default_factory=list)
    groups: list[GroupRequest] = field(default_factory=list)
    fault: Exception | None = None
    silent: asyncio.Event = field(default_factory=asyncio.Event)  # set: it never answers
    num_cancelled: int = 0

    async def generate(self, groups: list[GroupRequest], enough: asyncio.Event) -> list[list[Completion]]:
        [group] = groups
        self.groups.append(group)
        if self.fault is not None:
            raise self.fault
        try:
            while self.silent.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        whole = self.tokenizer._encoder.encode(f"{self.texts.pop(0)}<|end|>")
        size, limit = 0, group.params[0].max_new_tokens
        while size < min(len(whole), limit) and not enough.is_set():
            size += 1
            if group.hear is not None:
                group.hear(self._completion(whole[:size], "abort"))
            await asyncio.sleep(0)
        reason = "abort" if enough.is_set() else "stop" if size == len(whole) else "length"
        return [[self._completion(whole[:size], reason)]]

    def _completion(self, tokens: list[int], reason: str) -> Completion:
        logprobs = logprobs_of([-0.25 * (place + 1) for place in range(len(tokens))])
        return Completion(tokens_of(tokens), logprobs, reason, [(3, len(tokens))], "e")


def policy_of(pool: TalkingPool) -> ServedPolicy:
    config = read_config("tiny", ["run=talks", "model.context_tokens_max=400"], ROOT / "flows" / "presets")
    return ServedPolicy("talks@3", config, pool.tokenizer, pool)  # type: ignore[arg-type]


@asynccontextmanager
async def address_of(pool: TalkingPool, key: str = "") -> AsyncIterator[str]:
    """The base URL of a server in front of the pool."""
    runner = web.AppRunner(
        PolicyServer(policy_of(pool), key).app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
