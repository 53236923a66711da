"""Policies as differences: bytes and seconds of each over real training steps of a real model in
bf16, beside the whole policy and a raw copy.

    .venv/bin/python benchmarks/deltas.py [--iterations 6] [--steps 4] [--learning-rate 1e-6]
        [--model FOLDER] [--store FOLDER]

Trains the model of `make smollm2` with rlpipe's own trainer, on texts of this repository as
completions with random rewards. After each iteration the policy is stored as its difference to the
one before, as a run with `checkpoint.full_every = 100` does it. Printed are the numbers that
changed, the bytes of the policy and of what is stored, and the seconds: of making the difference
(read, XOR, compress, hash), of a whole file into the store (hash, write, fsync), of rebuilding the
policy beside its base as an engine's host does (fetch, check, rebuild, hash), and of a plain copy
of the whole file with fsync. At the end the newest policy is rebuilt through all differences and
compared with the trainer's own, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.processes.launch import THREADS

os.environ.update(THREADS)  # as all processes of rlpipe; read when torch is loaded

import numpy as np
from tokenizers import Tokenizer

from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.store.artifacts import write_file
from rlpipe.store.deltas import write_difference
from rlpipe.store.local_copy import materialise
from rlpipe.store.policy_files import dependencies
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world

MODEL = Path("~/.cache/rlpipe/smollm2-135m-instruct").expanduser()
PROMPT, COMPLETION, GROUP_SIZE = 32, 32, 4
WEIGHTS = "model.safetensors"


def rows(model: Path, num_groups: int, seed: int) -> list[JsonDict]:
    """Groups of pieces of this repository's pages, without logprobs of who wrote them."""
    pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    tokens = (
        Tokenizer.from_file(str(model / "tokenizer.json")).encode("\n".join(page.read_text() for page in pages)).ids
    )
    random = np.random.default_rng(seed)
    made = []
    for group in range(num_groups):
        starts = random.integers(0, len(tokens) - PROMPT - COMPLETION, GROUP_SIZE + 1)
        prompt, *completions = (tokens[start : start + PROMPT] for start in starts.tolist())
        for completion in completions:
            made.append(
                {
                    "group_index": group, "prompt_tokens": prompt, "completion_tokens": completion,
                    "loss_mask": [1] * COMPLETION,
                    "rollout_logprobs": [float("inf")] * COMPLETION, "reward": float(random.random()),
                }
            )  # fmt: skip
    return made


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy(source: Path, target: Path) -> None:
    """A plain copy that is on the disk."""
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())


def save(trainer: Trainer, folder: str, base: ArtifactRef | None) -> tuple[ArtifactRef, JsonDict]:
    job = world.save("any", folder, None) | {"base": base.as_json() if base else None, "is_base": True}
    result = world.run(trainer, "save", job)
    return world.saved(trainer.ranks.store, folder, result["policy"]), result["metrics"]


def measure(model: Path, iterations: int, steps: int, learning_rate: float, root: Path) -> None:
    trainer = Trainer(world.one_rank(root, dtype="bfloat16", tokens_max=512, threads=2))
    store, hosts = trainer.ranks.store, root / "host"
    files = {name: (model / name).read_bytes() for name in ("config.json", WEIGHTS)}
    world.run(trainer, "load", world.load_ref("start", "policy", world.artifact(store, "model", files)))
    ref, _ = save(trainer, "v0", None)
    before = materialise(store, ref, hosts)
    print("iteration  changed   policy MB  stored MB  ratio   difference s  whole file s  rebuild s  copy s")
    for iteration in range(iterations):
        batch = world.batch(store, f"batch-{iteration}", rows(model, 2 * steps, iteration))
        settings = {
            "num_steps": steps,
            "learning_rate": learning_rate,
            "warmup_steps": 0,
            "completion_tokens_max": COMPLETION,
        }
        job = world.train("a", "a", "rl", batch, settings | {"first_step": iteration * steps})
        world.run(trainer, "train", job)
        ref, metrics = save(trainer, f"v{iteration + 1}", ref)
        rebuild_s = seconds(lambda ref=ref: materialise(store, ref, hosts))
        (kept,) = trainer.ranks.scratch("kept").iterdir()
        old, new = before / WEIGHTS, kept / WEIGHTS
        difference_s = seconds(lambda old=old, new=new: write_difference(old, new, root / "difference", 2))
        whole_s = seconds(lambda new=new: write_file(store, "whole", "a", WEIGHTS, new))
        copy_s = seconds(lambda new=new: copy(new, root / "copy"))
        whole, stored = metrics["checkpoint/policy_bytes"], metrics["checkpoint/stored_bytes"]
        print(
            f"{iteration:9}  {metrics['checkpoint/changed_fraction']:7.3%}  {whole / 1e6:9.1f}  "
            f"{stored / 1e6:9.2f}  {whole / stored:5.1f}  {difference_s:12.2f}  {whole_s:12.2f}  "
            f"{rebuild_s:9.2f}  {copy_s:6.2f}",
            flush=True,
        )
        shutil.rmtree(before)
        (before,) = hosts.iterdir()
    alone_s = seconds(lambda: materialise(store, ref, root / "alone"))
    (folder,), (kept,) = (root / "alone").iterdir(), trainer.ranks.scratch("kept").iterdir()
    same = (folder / WEIGHTS).read_bytes() == (kept / WEIGHTS).read_bytes()
    print(
        f"rebuilt through {len(dependencies(store, ref))} differences in {alone_s:.1f} s: "
        f"{'the same bytes' if same else 'OTHER BYTES'}"
    )
    raise SystemExit(not same)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of an iteration")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--store", type=Path, help="a folder on the disk that is to be measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.store) as scratch:
        measure(arguments.model, arguments.iterations, arguments.steps, arguments.learning_rate, Path(scratch))
