"""Sampling on the tiny model: tokens per second of engines behind the pool, as ratios to transformers' `generate()`, and reloads.

    .venv/bin/python benchmarks/rollout.py [--kind sglang --python VENV/bin/python] [--engines 1] [--pairs 8]

Every pair samples the same 256 rollouts (32 prompts x 8, 16 tokens each) with `generate()` and with the pool, one after the other,
on the same number of threads. Reloads are timed from the committed policy to all engines proved to serve it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as all processes of rlpipe: spinning threads would starve the engine

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlpipe.config import PipelineConfig
from rlpipe.config_source import read_config
from rlpipe.engines.client import NOTHING_YET, SamplingParams
from rlpipe.engines.host import EngineHost
from rlpipe.engines.pool import EnginePool, GroupRequest, Host
from rlpipe.store.artifacts import commit, write_file
from rlpipe.store.backend import Store, open_store
from rlpipe.types import ArtifactRef, Manifest
from rlpipe.weights import Probe, probe_tokens

ROOT = Path(__file__).parent.parent
PROMPTS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 32, 8, 24, 16, 320
RELOADS = 20


def tiny_model(seed: int, folder: Path) -> Path:
    """The shape of preset tiny, new weights."""
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def committed(store: Store, name: str, folder: Path) -> tuple[ArtifactRef, Probe]:
    """A policy as the trainer commits it, with its probe."""
    records = [write_file(store, name, "a1", path.name, path) for path in sorted(folder.iterdir())]
    manifest = Manifest("bench", "rl", 0, "policy", {}, "", {}, records, {}, None, "", "", "")
    tokens = torch.tensor([probe_tokens(VOCAB)])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits[0, :-1]
        logprobs = torch.log_softmax(logits.double(), -1).gather(1, tokens[0, 1:, None])[:, 0]
    return commit(store, name, manifest)[0], Probe(tokens[0].tolist(), logprobs.tolist())


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
    params = [SamplingParams(NEW_TOKENS, seed=turn * GROUP_SIZE + index, ignore_eos=True) for index in range(GROUP_SIZE)]
    groups = [
        GroupRequest(f"bench/{index}", tokens, params, [NOTHING_YET] * GROUP_SIZE) for index, tokens in enumerate(prompts())
    ]
    started = time.perf_counter()
    done = await pool.generate(groups)
    assert all(len(completion.tokens) == NEW_TOKENS for group in done for completion in group)
    return time.perf_counter() - started


def told_config(arguments: argparse.Namespace) -> PipelineConfig:
    sets = [f"engines.count={arguments.engines}", f"engines.threads={arguments.threads}", f"engines.kind={arguments.kind}"]
    if arguments.kind == "sglang":
        shims = ROOT / "scripts" / "sglang-cpu" / "shims"
        sets += [f"engines.python={arguments.python}", f'engines.environment={{PYTHONPATH = "{shims}"}}',
                 'engines.flags=["--max-total-tokens", "16384"]']  # fmt: skip
    return read_config("tiny", ["run=bench", "model.context_tokens_max=512", *sets], ROOT / "flows" / "presets")


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(arguments.threads)
    config, store = told_config(arguments), open_store(f"file://{folder}/store")
    sources = [tiny_model(seed, folder / f"model-{seed}") for seed in (0, 1)]
    policies = [committed(store, f"policy-{seed}", source) for seed, source in enumerate(sources)]
    lm = AutoModelForCausalLM.from_pretrained(sources[0], dtype=torch.float32).eval()
    host = EngineHost(config, store, folder / "work")

    async def find_hosts() -> list[Host]:
        return [host]

    pool = EnginePool(find_hosts, config.engines.in_flight_max, 600)
    plain, pooled, reloads = [], [], []
    try:
        await pool.serve(policies[0][0], 0, policies[0][1])
        for turn in range(arguments.pairs + 1):
            plain.append(plain_generate(lm))
            pooled.append(await pool_generate(pool, turn))
        for version in range(1, RELOADS + 1):
            ref, probe = policies[version % 2]
            started = time.perf_counter()
            await pool.serve(ref, version, probe)
            reloads.append(time.perf_counter() - started)
    finally:
        await pool.close()
    tokens = PROMPTS * GROUP_SIZE * NEW_TOKENS
    ratios = [before / after for before, after in zip(plain[1:], pooled[1:], strict=True)]  # the first pair warms up
    print(
        f"{arguments.engines} {arguments.kind} engine(s), {arguments.threads} thread(s), {arguments.pairs} pairs of {tokens} tokens"
    )
    print(f"generate()  {tokens / statistics.median(plain[1:]):8.0f} tokens/s")
    print(f"pool        {tokens / statistics.median(pooled[1:]):8.0f} tokens/s")
    print(f"ratio       {statistics.median(ratios):8.2f} (median; {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"reload      {statistics.median(reloads):8.3f} s (median of {RELOADS}; longest {max(reloads):.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("local", "sglang"), default="local")
    parser.add_argument("--python", default="", help="interpreter that has SGLang installed")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=8)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measure(parser.parse_args(), Path(scratch)))
