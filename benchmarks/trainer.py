"""One RL iteration's training on a CPU: rlpipe's trainer beside a plain loop over
transformers that does the same passes.

    .venv/bin/python benchmarks/trainer.py [--pairs 5] [--threads 1 2] [--steps 4]
    .venv/bin/python benchmarks/trainer.py --shape qwen3-0.6b [--pairs 5]
        one GPU: tokens/s, MFU and peak memory of a shape
    .venv/bin/python benchmarks/trainer.py --shape qwen3-0.6b --offload optimizer
        the same with AdamW's moments on the host

512 rollouts of the preset `tiny`'s shape. Both compute proximal logprobs of every step, then
forward, backward, gradient norm and AdamW per step, with the clipped loss over all tokens, the
entropy and deterministic kernels, in float32. The plain loop pads its batch to the longest sequence
and runs it at once. They are done in turns, in one process. What is read from the store, and the
proofs, are not timed on either side.

With `--shape` no other loop runs: random weights of the shape in bf16, activations
recomputed, two steps of two rollouts of 8k tokens (prompt 1k), with the pass of the
proximal logprobs, on the first GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.processes.launch import THREADS

os.environ.update(THREADS)  # as all processes of rlpipe; read when torch is loaded
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as its trainers on GPUs

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from transformers import AutoModelForCausalLM

from rlpipe.base.values import JsonDict
from rlpipe.models.causal import hf_config
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world

GROUPS, GROUP_SIZE, PROMPT, COMPLETION = 64, 8, 17, 16
TINY: JsonDict = {
    **world.MODEL, "vocab_size": 400, "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 4, "head_dim": 32,
    "max_position_embeddings": 128,
}  # fmt: skip

QWEN3: JsonDict = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}  # fmt: skip
SHAPES: dict[str, JsonDict] = {
    name: QWEN3
    | dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), sizes, strict=True))
    | {"tie_word_embeddings": name != "qwen3-8b"}
    for name, sizes in {
        "qwen3-0.6b": (1024, 3072, 28, 16), "qwen3-1.7b": (2048, 6144, 28, 16), "qwen3-4b": (2560, 9728, 36, 32),
        "qwen3-8b": (4096, 12288, 36, 32),
    }.items()
}  # fmt: skip
SHAPE_GROUPS, SHAPE_PROMPT, SHAPE_COMPLETION = 2, 1024, 7168  # of two rollouts each


def rows(mixed: bool) -> list[JsonDict]:
    random = np.random.default_rng(0)
    made = []
    for group in range(GROUPS):
        prompt = random.integers(2, 400, random.integers(PROMPT - 6, PROMPT + 7) if mixed else PROMPT).tolist()
        for _ in range(GROUP_SIZE):
            length = int(random.integers(2, COMPLETION + 1)) if mixed else COMPLETION
            made.append(
                {
                    "group_index": group, "prompt_tokens": prompt,
                    "completion_tokens": random.integers(2, 400, length).tolist(),
                    "loss_mask": [1] * length, "rollout_logprobs": (-6 + 0.1 * random.standard_normal(length)).tolist(),
                    "reward": float(random.random() < 0.5),
                }
            )  # fmt: skip
    return made


class PlainLoop:
    """What one would write by hand: a padded batch a step, transformers' own forward pass."""

    def __init__(self, steps: int, rows: list[JsonDict]) -> None:
        torch.manual_seed(0)
        self.lm = AutoModelForCausalLM.from_config(hf_config(TINY), dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=1e-4, fused=True)
        self.batches = [
            self._batch([row for row in rows if row["group_index"] % steps == step]) for step in range(steps)
        ]

    def _batch(self, chosen: list[JsonDict]) -> tuple[torch.Tensor, ...]:
        whole = [row["prompt_tokens"] + row["completion_tokens"] for row in chosen]
        longest = max(map(len, whole))
        ids, mask, old = torch.zeros(len(chosen), longest, dtype=torch.long), *torch.zeros(2, len(chosen), longest)
        for index, (tokens, row) in enumerate(zip(whole, chosen, strict=True)):
            first, end = len(row["prompt_tokens"]), len(tokens)
            ids[index, :end], mask[index, first:end] = torch.tensor(tokens), 1.0
            old[index, first:end] = torch.tensor(row["rollout_logprobs"])
        rewards = torch.tensor([row["reward"] for row in chosen]).view(-1, GROUP_SIZE)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        return ids, mask[:, 1:], old[:, 1:], advantages.view(-1, 1)

    def logprobs(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(self.lm(ids[:, :-1], use_cache=False).logits, -1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1), entropy

    def iteration(self) -> None:
        with torch.no_grad():
            proximal = [self.logprobs(ids)[0] for ids, *_ in self.batches]
        for (ids, mask, old, advantages), before in zip(self.batches, proximal, strict=True):
            logprobs, entropy = self.logprobs(ids)
            ratio, weight = (logprobs - before).exp(), (before - old).exp().clamp(max=2.0)
            losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) * weight
            ((losses * mask).sum() / mask.sum()).backward()
            float((entropy * mask).sum())
            torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def measure(threads: int, mixed: bool, pairs: int, steps: int, folder: Path) -> None:
    torch.set_num_threads(threads)
    trainer = Trainer(world.one_rank(folder, threads=threads, tokens_max=8192))
    made = rows(mixed)
    batch = world.batch(trainer.ranks.store, f"batch-{threads}-{mixed}-{steps}", made)
    world.run(trainer, "load", world.load_new("0", model=TINY))
    settings = {"num_steps": steps, "learning_rate": 1e-4, "clip_high": 0.28}
    plain, own, spent = PlainLoop(steps, made), [], []
    metrics: JsonDict = {}
    for turn in range(pairs + 1):
        started = time.perf_counter()
        plain.iteration()
        spent.append(time.perf_counter() - started)
        metrics = world.run(trainer, "train", world.train(str(turn), str(turn + 1), "rl", batch, settings))["metrics"]
        own.append(metrics["train_s"])
    tokens = metrics["train/num_tokens_processed"]
    ratios = [ours / theirs for ours, theirs in zip(own[1:], spent[1:], strict=True)]  # the first pair warms up
    print(
        f"{'mixed' if mixed else 'equal'} lengths, {steps} steps, {threads} threads: "
        f"plain {statistics.median(spent[1:]):.2f} s, rlpipe "
        f"{statistics.median(own[1:]):.2f} s ({tokens / statistics.median(own[1:]):,.0f} tokens/s, "
        f"rows {metrics['train/packing_efficiency']:.0%} full): ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


def long_rows(vocab_size: int, prompt: int, completion: int) -> list[JsonDict]:
    random = np.random.default_rng(0)
    return [
        {
            "group_index": group, "prompt_tokens": random.integers(2, vocab_size, prompt).tolist(),
            "loss_mask": [1] * completion,
            "completion_tokens": random.integers(2, vocab_size, completion).tolist(),
            "rollout_logprobs": [-12.0] * completion,
            "reward": float(index),
        }
        for group in range(SHAPE_GROUPS) for index in range(2)
    ]  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """What a trainer of some shape did, in its best of several iterations."""

    tokens_per_s: float
    mfu: float | None  # None for a device whose peak is not known
    peak_gib: float  # the most that it ever held
    first_s: float  # of the first iteration, in which kernels are compiled

    def __str__(self) -> str:
        mfu = "not known here" if self.mfu is None else f"{self.mfu:.1%}"
        return (
            f"{self.tokens_per_s:,.0f} tokens/s, MFU {mfu}, peak memory {self.peak_gib:.2f} GiB, "
            f"the first iteration {self.first_s:.0f} s"
        )


def measure_rows(trainer: Trainer, turns: int, prompt: int, completion: int) -> Figures:
    """Trains what is resident on two steps of two rollouts of that length, and
    once more, which does not count."""
    assert trainer.resident is not None, "nothing is loaded"
    vocab_size = trainer.resident.policy.lm.config.vocab_size
    batch = world.batch(trainer.ranks.store, f"rows-{prompt}-{completion}", long_rows(vocab_size, prompt, completion))
    settings = {"num_steps": SHAPE_GROUPS, "learning_rate": 1e-6, "completion_tokens_max": completion}
    trained = []
    for turn in range(turns + 1):
        position = f"{prompt}-{completion}-{turn}"
        trained.append(world.run(trainer, "train", world.train(position, position, "rl", batch, settings))["metrics"])
    best = min(trained[1:], key=lambda metrics: metrics["train_s"])
    per_s = best["train/num_tokens_processed"] / best["train_s"]
    return Figures(per_s, best.get("train/mfu"), best["train/peak_memory_gib"], trained[0]["train_s"])


def measure_shape(name: str, turns: int, offload: str, folder: Path) -> None:
    if not torch.cuda.is_available():
        print(
            "trainer: --shape needs a GPU that torch sees, and there is none; without --shape it runs on a CPU",
            file=sys.stderr,
        )
        raise SystemExit(2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    tokens_max = SHAPE_PROMPT + SHAPE_COMPLETION
    of_gpu = {
        "gpu_ids": [0],
        "dtype": "bfloat16",
        "tokens_max": tokens_max,
        "activation_checkpointing": True,
        "offload": offload,
    }
    trainer = Trainer(world.one_rank(folder, **of_gpu))
    world.run(trainer, "load", world.load_new("0", model=SHAPES[name]))
    figures = measure_rows(trainer, turns, SHAPE_PROMPT, SHAPE_COMPLETION)
    print(f"{name}, offload {offload}, on {torch.cuda.get_device_name(trainer.ranks.device)}: {figures}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape on a GPU instead")
    parser.add_argument(
        "--offload", choices=["none", "optimizer"], default="none", help="with --shape: trainer.offload"
    )
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.shape:
            measure_shape(arguments.shape, arguments.pairs, arguments.offload, Path(scratch))
            raise SystemExit
        for threads in arguments.threads:
            for mixed in (False, True):
                measure(threads, mixed, arguments.pairs, arguments.steps, Path(scratch))
