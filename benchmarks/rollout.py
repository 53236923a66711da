"""Sampling on the tiny model: tokens per second of engines behind the pool, as ratios to
transformers' `generate()`, and reloads.

    .venv/bin/python benchmarks/rollout.py [--engines 1] [--pairs 8]

Every pair samples the same 256 rollouts (32 prompts x 8, 16 tokens each) with `generate()` and with
the pool, one after the other, on the same number of threads. Reloads are timed from the committed
policy to all engines proved to serve it. The engines are those of the tests:
RLPIPE_TEST_ENGINE=sglang takes a real SGLang (tests/engine_fixtures.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.processes.launch import THREADS

os.environ.update(THREADS)  # as all processes of rlpipe; read when torch is loaded

import torch

from rlpipe.engines.client import NOTHING_YET, Sampling
from rlpipe.engines.pool import EnginePool, GroupRequest
from tests.engine_fixtures import ENGINE_KIND, VOCAB, reference, tiny_model
from tests.engine_world import probe, world

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 24, 16
RELOADS = 20


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCAB, (PROMPTS, PROMPT_TOKENS), generator=random).tolist()


def plain_generate(lm: torch.nn.Module) -> float:
    """Seconds of one batch of all rollouts with transformers."""
    input_ids = torch.tensor(prompts()).repeat_interleave(GROUP_SIZE, 0)
    started = time.perf_counter()
    with torch.inference_mode():
        out = lm.generate(  # type: ignore[operator]
            input_ids, attention_mask=torch.ones_like(input_ids), do_sample=True, top_k=0, min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )  # fmt: skip
    assert out.shape[1] == PROMPT_TOKENS + NEW_TOKENS
    return time.perf_counter() - started


async def pool_generate(pool: EnginePool, turn: int) -> float:
    """Seconds of the same rollouts from the pool."""
    params = [Sampling(NEW_TOKENS, seed=turn * GROUP_SIZE + index, ignore_eos=True) for index in range(GROUP_SIZE)]
    groups = [
        GroupRequest(f"bench/{index}", tokens, params, [NOTHING_YET] * GROUP_SIZE)
        for index, tokens in enumerate(prompts())
    ]
    started = time.perf_counter()
    done = await pool.generate(groups)
    assert all(len(completion.tokens) == NEW_TOKENS for group in done for completion in group)
    return time.perf_counter() - started


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(arguments.threads)
    lm = reference(tiny_model(0))
    plain, pooled, reloads = [], [], []
    async with world(folder, f"engines.count={arguments.engines}", f"engines.threads={arguments.threads}") as served:
        for turn in range(arguments.pairs + 1):
            plain.append(plain_generate(lm))
            pooled.append(await pool_generate(served.pool, turn))
        policies = [(served.policy(seed), probe(seed)) for seed in (1, 0)]  # 0 is served now
        for turn in range(RELOADS):
            policy, proof = policies[turn % 2]
            started = time.perf_counter()
            await served.pool.serve(policy, served.version + 1 + turn, proof)
            reloads.append(time.perf_counter() - started)
    tokens = PROMPTS * GROUP_SIZE * NEW_TOKENS
    ratios = [before / after for before, after in zip(plain[1:], pooled[1:], strict=True)]  # the first pair warms up
    print(
        f"{arguments.engines} {ENGINE_KIND} engine(s), {arguments.threads} thread(s), "
        f"{arguments.pairs} pairs of {tokens} tokens"
    )
    print(f"generate()  {tokens / statistics.median(plain[1:]):8.0f} tokens/s")
    print(f"pool        {tokens / statistics.median(pooled[1:]):8.0f} tokens/s")
    print(f"ratio       {statistics.median(ratios):8.2f} (median; {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"reload      {statistics.median(reloads):8.3f} s (median of {RELOADS}; longest {max(reloads):.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=8)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measure(parser.parse_args(), Path(scratch)))
