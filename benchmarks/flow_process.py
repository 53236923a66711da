"""Many long rollouts through the process of the flow: seconds and memory,
with engines that take no time.

    .venv/bin/python benchmarks/flow_process.py [--rollouts 16384] [--tokens 4096]

Two engines are played, in processes of their own: they answer /generate as SGLang does, 32 tokens
an event, as fast as they are read. The rest is rlpipe's own, as the stages generate, score and
filter use it: the pool and its client, decoding, Parquet, the reward `length` in its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from rlpipe.base.references import ArtifactRef
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.engines.client import NOTHING_YET, EngineClient, Sampling
from rlpipe.engines.fleet import Host
from rlpipe.engines.pool import EnginePool, GroupRequest
from rlpipe.engines.sglang_client import SglangClient
from rlpipe.engines.weights import Probe
from rlpipe.loop.player import Hooks, PoolPlayer
from rlpipe.processes.launch import free_port
from rlpipe.records.columns import from_table, read_table, to_parquet, to_table
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import BATCH, ROLLOUTS, SCORES, PromptGroup, Rollout
from rlpipe.rewards.pool import RewardPool
from rlpipe.services.calls import new_session
from rlpipe.stages.generation import round_at_work
from rlpipe.stages.rollouts import ShardGroups
from rlpipe.stages.scoring import known_scores, rewarded
from rlpipe.store.nearby import Nearby

ENGINES, ANSWERS, GROUP, SHARD, EVENT, VERSION = 2, 256, 16, 64, 32, 3
WORDS = [
    "".join(letters) for letters in itertools.product("abcdefghijkl", repeat=4)
]  # each is a token of the tokenizer


def answer(length: int, seed: int) -> bytes:
    """The stream of one completion."""
    draw, events = np.random.Generator(np.random.PCG64(seed)), []
    for start in range(0, length, EVENT):
        tokens = draw.integers(300, len(WORDS), min(EVENT, length - start)).tolist()
        logprobs = (-draw.exponential(0.5, len(tokens)).astype(np.float32)).tolist()
        last = start + EVENT >= length
        meta: dict[str, Any] = {"finish_reason": {"type": "length"} if last else None}
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
        ]
        if last:
            meta["weight_versions"] = [{"version": str(VERSION), "start": 0, "end": length}]
        events.append(f"data: {json.dumps({'output_ids': tokens, 'meta_info': meta})}\n\n")
    return "".join(events).encode() + b"data: [DONE]\n\n"


def serve_played(port: int, answers: list[bytes]) -> None:
    """A played engine, until its process is ended."""
    turns = itertools.cycle(answers)

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=next(turns), content_type="text/event-stream")

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/generate", generate)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


class PlayedHost:
    """The played engines as one host."""

    name, files_url, progress = "played", "", 0

    def __init__(self, clients: list[EngineClient]) -> None:
        self.served = clients

    async def serve(self, policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None: ...

    async def clients(self, version: int) -> list[EngineClient]:
        return self.served

    async def release(self) -> None: ...

    async def close(self) -> None: ...


async def played_pool(http: aiohttp.ClientSession, ports: list[int]) -> EnginePool:
    """A pool of the played engines, which serve version VERSION."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    host = PlayedHost([SglangClient(url, url, http, "api", "admin") for url in urls])

    async def hosts() -> list[Host]:
        return [host]

    pool = EnginePool(hosts, 256, 60.0)
    await pool.serve(ArtifactRef("policy", "sha"), VERSION, Probe([1, 2], [-1.0]))
    return pool


class Parts:
    """Seconds of each part, those of this process's processors, and
    the most memory until its end."""

    def __init__(self) -> None:
        self.began = self.at = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        now, most = self.now(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        wall, used = (end - start for start, end in zip(self.at, now, strict=True))
        print(f"{name:42s} {wall:8.1f} s   {used:8.1f} s of a processor   {most:6.2f} GiB at most", flush=True)
        self.at = now


def settled(tokenizer: ChatTokenizer, rewards: RewardPool) -> Any:
    """What the making and scoring of rollouts ask of a session."""
    rl = SimpleNamespace(train_stale_tokens=True, fault_reward=lambda reason: 0.0, agent="")
    return SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(rl=rl), rewards=rewards, ahead=None)


async def through(ports: list[int], rollouts: int, length: int, tokenizer: ChatTokenizer, rewards: RewardPool) -> None:
    prompts = [
        Prompt(f"p/{index}", "p", [{"role": "user", "content": " ".join(WORDS[:128])}], "x")
        for index in range(rollouts // GROUP)
    ]
    params = [Sampling(length, seed=seed) for seed in range(GROUP)]
    requests = [GroupRequest(prompt.prompt_id, [5] * 128, params, [NOTHING_YET] * GROUP) for prompt in prompts]
    groups = [PromptGroup(index, index, prompt, []) for index, prompt in enumerate(prompts)]
    session, parts = settled(tokenizer, rewards), Parts()
    async with new_session() as http:
        pool = await played_pool(http, ports)

        async def shard(start: int) -> bytes:
            part = slice(start, start + SHARD)
            shard = ShardGroups(session, round_at_work(session, (0, 0)), groups[part], requests[part], VERSION)
            played = await PoolPlayer(pool).play(requests[part], groups[part], Hooks(shard.score))
            made = [rollout for index, group in enumerate(played) for rollout in await shard.rollouts(index, group)]
            return await asyncio.to_thread(lambda: to_parquet(to_table(made, Rollout, ROLLOUTS)))

        files = await asyncio.gather(*(shard(start) for start in range(0, len(groups), SHARD)))
    parts.end("generate: sampled, decoded, scored and written")
    read = [rollout for data in files for rollout in from_table(read_table(data, ROLLOUTS), Rollout)]
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    scored = rewarded(session, by_id, read, known_scores(session, (0, 0)), rewards)
    scores = to_parquet(to_table(scored, Rollout, SCORES))
    parts.end("score: read and written")
    del read, scored, files
    kept = from_table(read_table(scores, SCORES), Rollout)
    batch = to_parquet(to_table(kept, Rollout, BATCH))
    parts.end("filter: read and written")
    assert sum(len(rollout.completion_tokens) for rollout in kept) == rollouts * length
    parts.at = parts.began
    parts.end(f"{rollouts:,} rollouts of {length:,}, {len(batch) / 1e6:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    if arguments.rollouts % GROUP:
        parser.error(f"--rollouts {arguments.rollouts}: use a multiple of {GROUP}, the size of a group")
    ports = [free_port() for _ in range(ENGINES)]
    answers = [answer(arguments.tokens, seed) for seed in range(ANSWERS)]
    engines = [multiprocessing.Process(target=serve_played, args=(port, answers), daemon=True) for port in ports]
    for engine in engines:
        engine.start()
    time.sleep(1)
    with tempfile.TemporaryDirectory() as scratch:
        build_tokenizer([" " + " ".join(WORDS)], Path(scratch))
        tokenizer = ChatTokenizer.from_folder(Path(scratch))
        with RewardPool({"length": 1.0}, {"length": {"target": 100}}, workers=1, timeout_s=60.0) as rewards:
            asyncio.run(through(ports, arguments.rollouts, arguments.tokens, tokenizer, rewards))
    for engine in engines:
        engine.terminate()
        engine.join()


if __name__ == "__main__":
    main()
