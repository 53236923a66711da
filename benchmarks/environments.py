"""Thousands of rollouts at once in an environment that waits: seconds, memory
and threads of one flow process.

    .venv/bin/python benchmarks/environments.py [--rollouts 2000] [--turns 4] [--step-s 1]
        [--processes 64]

The environment takes a second for each answer, and no processor. First its `async` form, all
rollouts in one process; then its sync form, one call at a time in each of `--processes`. Two
engines are played, in processes of their own, which answer /generate as SGLang does. The rest is
rlpipe's own: the turns, the pool of engines and its client, the tokenizer, the processes of
environments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.flow_process import VERSION, played_pool, serve_played
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.engines.client import NOTHING_YET, Sampling
from rlpipe.engines.pool import GroupRequest
from rlpipe.extras.environments.player import EnvironmentPlayer
from rlpipe.extras.environments.pool import EnvironmentPool
from rlpipe.loop.player import Hooks
from rlpipe.processes.launch import free_port, raise_file_limit
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import PromptGroup
from rlpipe.services.calls import new_session

ROOT = Path(__file__).parent.parent
ENGINES, GROUP, TURN_TOKENS = 2, 8, 32
SAMPLE_S = 0.2  # how often threads and memory are looked at
MB = 1024**2


def one_turn(tokenizer: ChatTokenizer) -> bytes:
    """The stream of a completion that ends by itself."""
    tokens = [65] * (TURN_TOKENS - 1) + [tokenizer.eos_token_id]
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": [{"version": str(VERSION), "start": 0, "end": len(tokens)}],
    }
    return f"data: {json.dumps({'output_ids': tokens, 'meta_info': meta})}\n\ndata: [DONE]\n\n".encode()


class Watch:
    """The most threads and memory of this process, and the memory of its
    environments, while `watched` runs."""

    def __init__(self) -> None:
        self.threads, self.flow_mb, self.workers_mb, self.num_workers = 0, 0.0, 0.0, 0

    async def watched(self, work: Callable[[], Awaitable[Any]]) -> Any:
        task = asyncio.create_task(self._look())
        try:
            return await work()
        finally:
            task.cancel()

    async def _look(self) -> None:
        flow = psutil.Process()
        while True:
            self.threads = max(self.threads, flow.num_threads(), threading.active_count())
            self.flow_mb = max(self.flow_mb, flow.memory_info().rss / MB)
            workers = [child for child in flow.children() if "rlpipe.extras.environments.worker" in child.cmdline()]
            self.num_workers = max(self.num_workers, len(workers))
            self.workers_mb = max(self.workers_mb, sum(worker.memory_info().rss for worker in workers) / MB)
            await asyncio.sleep(SAMPLE_S)


async def through(
    kind: str, processes: int, arguments: argparse.Namespace, ports: list[int], tokenizer: ChatTokenizer
) -> None:
    """Plays all rollouts in this kind of environment, and prints what that took."""
    messages = [{"role": "user", "content": "wait"}]
    tokens = tokenizer.encode_prompt(messages)
    prompts = [Prompt(f"p/{index}", "p", messages, "x") for index in range(arguments.rollouts // GROUP)]
    params = [Sampling(1 << 16, seed=seed) for seed in range(GROUP)]
    requests = [GroupRequest(prompt.prompt_id, tokens, params, [NOTHING_YET] * GROUP) for prompt in prompts]
    rl: Any = SimpleNamespace(turns_max=arguments.turns, stops_at=lambda reasons: False, environment=kind)
    args = {"seconds": arguments.step_s, "turns": arguments.turns}
    environments = EnvironmentPool(f"benchmarks.waiting:{kind}", args, processes, arguments.step_s + 30.0)
    watch = Watch()
    async with new_session() as http:
        pool = await played_pool(http, ports)
        player = EnvironmentPlayer(rl, pool, tokenizer, environments)
        groups_asked = [PromptGroup(index, index, prompt) for index, prompt in enumerate(prompts)]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        groups = await watch.watched(lambda: player.play(requests, groups_asked, Hooks()))
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    await environments.close()
    rollouts = [rollout for group in groups for rollout in group]
    assert len(rollouts) == arguments.rollouts
    for rollout in rollouts:
        assert rollout.outcome is not None and rollout.completion.finish_reason == "stop"
        assert rollout.outcome.reward == rollout.outcome.num_turns == arguments.turns
    print(
        f"{kind:10s} {watch.num_workers:3d} processes {took_s:8.1f} s   {cpu_s:6.1f} s of the flow's processor   "
        f"{watch.threads:3d} threads, {watch.flow_mb:7.0f} MB at most in the flow   "
        f"{watch.workers_mb:7.0f} MB in environments",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=64, help="of the sync form; 0: without it")
    arguments = parser.parse_args()
    if arguments.rollouts % GROUP:
        parser.error(f"--rollouts {arguments.rollouts}: use a multiple of {GROUP}, the size of a group")
    raise_file_limit()
    os.chdir(ROOT)  # where the processes of environments import benchmarks.waiting from
    os.environ["PYTHONPATH"] = str(ROOT)
    total_s = arguments.rollouts * arguments.turns * arguments.step_s
    print(f"{arguments.rollouts} rollouts of {arguments.turns} turns, {arguments.step_s:g} s each: "
          f"{total_s:g} s of waiting; at least "
          f"{arguments.turns * arguments.step_s:g} s side by side, {total_s / max(1, arguments.processes):g} s in "
          f"{arguments.processes} processes")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        build_tokenizer(["wait"], Path(scratch))
        tokenizer = ChatTokenizer.from_folder(Path(scratch))
        ports = [free_port() for _ in range(ENGINES)]
        engines = [
            multiprocessing.Process(target=serve_played, args=(port, [one_turn(tokenizer)]), daemon=True)
            for port in ports
        ]
        for engine in engines:
            engine.start()
        time.sleep(1)
        asyncio.run(through("AsyncWait", 1, arguments, ports, tokenizer))
        if arguments.processes:
            asyncio.run(through("SyncWait", arguments.processes, arguments, ports, tokenizer))
        for engine in engines:
            engine.terminate()
            engine.join()


if __name__ == "__main__":
    main()
