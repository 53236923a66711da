"""A part of the first ten minutes on a GPU: `python -m scripts.gpu_parts PART gpu|cpu FOLDER`
writes FOLDER/PART.json."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.processes.launch import THREADS

os.environ.update(THREADS)  # as all processes of rlpipe; read when torch is loaded
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as its trainers on GPUs

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.trainer import SHAPES, TINY, measure_rows
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.extras.plan.memory import training_bytes
from rlpipe.extras.plan.trial import PlannedTraining, sizes_of
from rlpipe.models.causal import empty_model, hf_config
from rlpipe.models.flex import uses_flex
from rlpipe.processes.memory import settle_heap
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from rlpipe.store.policy_files import stored_policy
from rlpipe.trainer.model import own_rows
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.selftest import gradient_distance, prove
from rlpipe.trainer.trainer import Trainer
from scripts.gpu_commands import Commands, kill
from tests import trainer_world as world

Figures = dict[str, float | str]
LENGTHS = {"gpu": (2048, 8192), "cpu": (64, 128)}
PROMPT_SHARE = 8  # an eighth of a sequence is prompt
TURNS = 3
# of the kernels' part: groups of heads, several blocks of attention
KERNEL_SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                "num_attention_heads": 8, "num_key_value_heads": 2,
                "head_dim": 128, "max_position_embeddings": 4096}  # fmt: skip
KERNEL_ROWS = (6, 4, 900)  # groups, rollouts of each, the longest
WORDS, ITERATIONS = 400, 3
KILLED_AFTER = "rl/00001/iteration.json"
# Qwen3-0.6B's width, eight layers of it, with a vocabulary of letters; on a CPU a smaller one
RUN_SHAPE = {
    "gpu": (
        'dtype = "bfloat16"\nhidden_size = 1024\nintermediate_size = 3072\nnum_layers = 8\n'
        "num_heads = 16\nnum_kv_heads = 8"
    ),
    "cpu": "hidden_size = 64\nintermediate_size = 128\nnum_layers = 2\nnum_heads = 4\nnum_kv_heads = 2",
}
RUN = """
[model]
context_tokens_max = 64
{shape}

[[data]]
name = "words"
use = "sft"
source = "words.jsonl"
completion_template = "<answer>{{answer}}</answer>"

[[data]]
name = "words"
use = "rl"
source = "words.jsonl"

[sft]
num_steps = 4
segment_steps = 4
decay_steps = 4
warmup_steps = 2
batch_size = 32

[rl]
num_iterations = {iterations}
num_prompts = 16
group_size = 4
shard_prompts = 8
num_steps = 2
warmup_steps = 2
completion_tokens_max = 16
rewards = {{ length = 1.0 }}    # rollouts differ in it before anything is learned
reward_args = {{ length = {{ target = 12 }} }}
filters = {{}}

[evaluation]
every = 0
pass_threshold = 0.5

[trainer]
tokens_max = 4096
activation_checkpointing = true
{gpu}

[engines]
count = 1
{gpu}
"""


@dataclass(frozen=True)
class Where:
    """On what a part runs, and into which folder it writes."""

    device: str
    folder: Path

    @property
    def gpu_ids(self) -> list[int]:
        return [0] if self.device == "gpu" else []

    def trainer(self, name: str, tokens_max: int, dtype: str = "bfloat16", offload: str = "none") -> Trainer:
        """A trainer of this process alone."""
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.gpu_ids else "gloo", store=HashStore(), rank=0, world_size=1
            )
        how = {"gpu_ids": self.gpu_ids, "tokens_max": tokens_max, "activation_checkpointing": True, "offload": offload}
        return Trainer(world.one_rank(self.folder / name, dtype=dtype, **how))

    def reset_peak(self) -> None:
        """From here on `torch.cuda.max_memory_allocated` counts."""
        if self.gpu_ids:
            torch.cuda.reset_peak_memory_stats()


def kernels(where: Where) -> Figures:
    """Attention of rows beside the model's own, forward and backward, and a job done twice to the
    same bits, in both number types."""
    groups, size, longest = KERNEL_ROWS if where.gpu_ids else (3, 2, 40)
    figures: Figures = {}
    for dtype in ("float32", "bfloat16"):
        trainer = where.trainer(f"kernels-{dtype}", 4096, dtype)
        data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(groups, size, longest=longest))
        bits = []
        for turn in range(2):
            world.run(trainer, "load", world.load_new(model=world.MODEL | (KERNEL_SHAPE if where.gpu_ids else {})))
            world.run(trainer, "train", world.train("new", "b", "rl", data, {"completion_tokens_max": longest}))
            saved = world.run(trainer, "save", world.save("b", f"policy-{turn}", f"state-{turn}"))
            bits.append((world.digests(saved["policy"]), world.digests(saved["state"])))
        assert trainer.resident is not None
        policy, ranks = trainer.resident.policy, trainer.ranks
        assert uses_flex(policy.lm) or not where.gpu_ids, (
            f"flex_attention is not used: {where.folder}/kernels.log says why"
        )
        proof = prove(policy, ranks.device)
        figures[f"{dtype}: logprobs differ from the model's own by"] = (
            f"{max(proof.single, proof.packed, proof.shared):.1e}"
        )
        figures[f"{dtype}: gradient by"] = f"{gradient_distance(ranks, policy, Rows.SINGLE, Rows.PACKED):.1e}"
        assert bits[0] == bits[1], f"{dtype}: one job done twice has two results"
    return figures | {"done twice": "the same bits"}


def shape(where: Where, name: str) -> Figures:
    """Tokens/s, MFU and memory of training a shape, activations recomputed, rows of two lengths."""
    lengths = LENGTHS[where.device]
    trainer, began = where.trainer(name, lengths[-1]), time.monotonic()
    model = SHAPES[name] if where.gpu_ids else TINY
    world.run(trainer, "load", world.load_new("0", model=model))
    figures: Figures = {"loaded and proved in s": round(time.monotonic() - began)}
    for length in lengths:
        where.reset_peak()
        measured = measure_rows(trainer, TURNS, length // PROMPT_SHARE, length - length // PROMPT_SHARE)
        mfu = "" if measured.mfu is None else f", MFU {measured.mfu:.1%}"
        held = f"{measured.peak_gib:.1f} GiB (plan {planned_gib(model, length, lengths[-1]):.1f})"
        figures[f"{length} tokens:"] = f"{measured.tokens_per_s:,.0f} tokens/s{mfu}, {held}"
    return figures


def planned_gib(model: JsonDict, length: int, tokens_max: int) -> float:
    """What `rlpipe plan` says that a rank takes to train it in bf16, activations recomputed."""
    training: PlannedTraining = {"tokens_max": tokens_max, "dtype": "bfloat16", "activation_checkpointing": True}
    sizes = sizes_of(empty_model(hf_config(model)), length, training)
    data = [{"name": "words", "use": "rl", "source": "words.jsonl"}]  # a config has some
    config = PipelineConfig.model_validate(
        {"model": {"dtype": "bfloat16"}, "trainer": {"activation_checkpointing": True}, "data": data}
    )
    return sum(training_bytes(config, sizes)) / 2**30


def lora(where: Where) -> Figures:
    """An adapter beside the shape of 0.6B: its memory and speed."""
    length = LENGTHS[where.device][0]
    trainer = where.trainer("lora", length)
    world.run(trainer, "load", world.load_new("0", model=SHAPES["qwen3-0.6b"] if where.gpu_ids else TINY))
    base = world.saved(trainer.ranks.store, "base", world.run(trainer, "save", world.save("0", "base", None))["policy"])
    adapter = {"settings": {"rank": 16, "alpha": 32.0}, "seed": 1}
    world.run(trainer, "load", {**world.load_ref("fresh", "policy", base), "adapter": adapter})
    where.reset_peak()
    measured = measure_rows(trainer, TURNS, length // PROMPT_SHARE, length - length // PROMPT_SHARE)
    return {f"{length} tokens:": f"{measured.tokens_per_s:,.0f} tokens/s, {measured.peak_gib:.1f} GiB"}


def offload(where: Where) -> Figures:
    """AdamW's moments on the host while passes run: what that saves, what it
    costs, and that it changes no bit."""
    length, figures, bits = LENGTHS[where.device][0], Figures(), []
    for kept in ("none", "optimizer"):
        trainer = where.trainer(f"offload-{kept}", length, offload=kept)
        world.run(trainer, "load", world.load_new("0", model=SHAPES["qwen3-1.7b"] if where.gpu_ids else TINY))
        where.reset_peak()
        measured = measure_rows(trainer, TURNS, length // PROMPT_SHARE, length - length // PROMPT_SHARE)
        assert trainer.resident is not None
        bits.append([own_rows(parameter).clone() for _, parameter in trainer.resident.policy.shards()])
        figures[f"{kept}:"] = f"{measured.tokens_per_s:,.0f} tokens/s, {measured.peak_gib:.1f} GiB"
        del trainer
        settle_heap()
    assert all(map(torch.equal, *bits)), "with the moments on the host the weights are others"
    return figures | {"weights": "the same bits"}


def run_of(where: Where, name: str, *sets: str, killed: bool = False, host: bool = False) -> tuple[str, Figures]:
    """sha256 of the last policy, and what the run says of itself.

    `killed`: the flow ends by SIGKILL in the midst, and goes on.
    """
    rlpipe = Commands(where.folder / "runs")
    rlpipe.folder.mkdir(exist_ok=True)
    rows = [{"prompt": f"Spell {word} backward", "answer": word[::-1]} for word in map(_word, range(WORDS))]
    (rlpipe.folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gpu = f"gpu_ids = {where.gpu_ids}" if where.gpu_ids else ""
    config = RUN.format(shape=RUN_SHAPE[where.device], iterations=ITERATIONS, gpu=gpu)
    (rlpipe.folder / "first.toml").write_text(config)
    given = [f"store={rlpipe.store}", "tracking.uri=", *sets]
    arguments = ["run", "first.toml", "--run", name, *[part for entry in given for part in ("--set", entry)]]
    began = time.monotonic()
    helper = rlpipe.start("host", "--run", name, "--store", rlpipe.store) if host else None
    try:
        if killed:
            with rlpipe.running(*arguments) as flow:
                rlpipe.until_committed(flow, f"runs/{name}/{KILLED_AFTER}")
                kill(flow)
        rlpipe.complete(*arguments)
    finally:
        if helper is not None:
            kill(helper)
    seconds = time.monotonic() - began
    rlpipe.complete("verify", name, "--store", rlpipe.store)
    run = open_existing(open_store(rlpipe.store), name)
    files = stored_policy(open_store(rlpipe.store), run.policy(ITERATIONS)[0]).files
    records = [record for index in range(ITERATIONS) if (record := run.iteration(index)) is not None]
    mismatch = max(record.metrics["train/mismatch_abs_mean"] for record in records)
    assert math.isfinite(mismatch)
    tokens_per_s = max(record.metrics["throughput/rollout_tokens_per_s"] for record in records)
    figures: Figures = {
        "mismatch": f"{mismatch:.1e}",
        "rollout tokens/s": round(tokens_per_s),
        "took s": round(seconds),
    }
    return files["model.safetensors"].sha256, figures


def _word(index: int) -> str:
    """Four letters, another word for each index."""
    return "".join(chr(ord("a") + index // 8**place % 8) for place in range(4))


def undisturbed(where: Where) -> Figures:
    """SFT and three iterations of RL, trainer and engine in turns on one GPU."""
    sha256, figures = run_of(where, "undisturbed", "engines.colocate=true")
    (where.folder / "undisturbed.sha256").write_text(sha256)
    return figures


def again(where: Where, name: str, *sets: str, **how: Any) -> Figures:
    """The same run in another way, which must end with the same bits."""
    sha256, figures = run_of(where, name, *sets, **how)
    before = where.folder / "undisturbed.sha256"
    assert not before.exists() or before.read_text() == sha256, f"{name} ended with other bits than the undisturbed run"
    return figures | {"the undisturbed run's bits": "yes" if before.exists() else "that part did not run"}


PARTS: dict[str, Callable[[Where], Figures]] = {
    "kernels": kernels,
    "lora": lora,
    "offload": offload,
    **{name: lambda where, name=name: shape(where, name) for name in SHAPES},
    "run": undisturbed,
    "killed": lambda where: again(where, "killed", "engines.colocate=true", killed=True),
    "apart": lambda where: again(where, "apart", "engines.place=elsewhere", host=True),
}

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    part, device, folder = sys.argv[1:]
    figures = PARTS[part](Where(device, Path(folder)))
    (Path(folder) / f"{part}.json").write_text(json.dumps(figures))
