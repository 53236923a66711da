"""A played engine behind HTTP that speaks SGLang's /generate as a stream, as slowly as wanted, and
may fall silent or be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from rlpipe.base.references import ArtifactRef
from rlpipe.engines.client import NOTHING_YET, EngineClient, Sampling
from rlpipe.engines.fleet import Host
from rlpipe.engines.pool import EnginePool, GroupRequest
from rlpipe.engines.sglang_client import SglangClient
from rlpipe.engines.weights import Probe
from rlpipe.services.calls import new_session
from rlpipe.store.nearby import Nearby

VERSION = 3
PROMPT = [5, 17, 200]


def token_at(position: int) -> int:
    """What stands at a position of every text that this engine writes:
    so a seam in a completion shows."""
    return position * 7919 % 1000


class SlowEngine:
    """A token every `tick_s` for each of `seats` requests; the others wait in its queue."""

    name = "played"
    progress = 0

    def __init__(self, name: str, tick_s: float, seats: int = 99) -> None:
        self.engine, self.tick_s = name, tick_s
        self.asked: list[list[int]] = []  # the tokens that each request brought
        self.aborts: list[str] = []
        self.num_sampled = 0
        self.silent_after = self.lost_after = 1 << 30  # tokens of a request
        self._seats = asyncio.Semaphore(seats)
        self._ending: set[str] = set()
        self._transports: set[asyncio.Transport] = set()

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate), web.post("/abort_request", self.abort)])
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.session = new_session()
        url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.clients_now: list[EngineClient] = [SglangClient(self.engine, url, self.session, "api", "admin")]

    async def kill(self) -> None:
        """Its connections break, as those of a process that is gone."""
        for transport in self._transports:
            transport.abort()
        await self.runner.cleanup()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        (tokens,), (params,), (rid,) = body["input_ids"], body["sampling_params"], body["rid"]
        self.asked.append(tokens)
        assert request.transport is not None
        self._transports.add(request.transport)
        response = web.StreamResponse()
        await response.prepare(request)
        async with self._seats:
            for count in range(params["max_new_tokens"]):
                if count >= self.lost_after:
                    request.transport.abort()
                    return response
                await asyncio.sleep(self.tick_s)
                while count >= self.silent_after and rid not in self._ending:
                    await asyncio.sleep(self.tick_s)
                if rid in self._ending:
                    await self._say(response, [], count, "abort")
                    return response
                self.num_sampled += 1
                last = count + 1 == params["max_new_tokens"]
                await self._say(response, [token_at(len(tokens) + count)], count + 1, "length" if last else "")
        return response

    async def _say(self, response: web.StreamResponse, tokens: list[int], count: int, reason: str) -> None:
        meta: dict[str, Any] = {"finish_reason": {"type": reason} if reason else None, "weight_version": str(VERSION)}
        meta["output_token_logprobs"] = [[-float(token), token, None] for token in tokens]
        if reason:
            meta["weight_versions"] = [{"version": str(VERSION), "start": 0, "end": count}]
        end = "data: [DONE]\n\n" if reason else ""
        await response.write(f"data: {json.dumps({'output_ids': tokens, 'meta_info': meta})}\n\n{end}".encode())

    async def abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        self._ending.add(rid)
        return web.Response()

    # as a host of one engine

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None: ...

    async def clients(self, version: int) -> list[EngineClient]:
        return self.clients_now

    async def release(self) -> None: ...

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def slow_pool(
    *engines: SlowEngine, progress_timeout_s: float, in_flight_max: int = 64
) -> AsyncIterator[EnginePool]:
    """A pool of slow engines."""

    async def find_hosts() -> list[Host]:
        return [*engines]

    for engine in engines:
        await engine.start()
    pool = EnginePool(find_hosts, in_flight_max, progress_timeout_s)
    try:
        await pool.serve(ArtifactRef("policy", "sha"), VERSION, Probe([1, 2], [-1.0]))
        yield pool
    finally:
        for engine in engines:
            await engine.session.close()
            await engine.runner.cleanup()


def wanted(*lengths: int, groups: int = 1) -> list[GroupRequest]:
    """Groups with one rollout of each length."""
    params = [Sampling(length, seed=seed) for seed, length in enumerate(lengths)]
    return [GroupRequest(f"slow/{index}", PROMPT, params, [NOTHING_YET] * len(params)) for index in range(groups)]


def text(length: int) -> list[int]:
    """The completion of so many tokens, without a seam."""
    return [token_at(len(PROMPT) + index) for index in range(length)]
