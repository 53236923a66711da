"""Distillation of `tiny` beside SFT on the teacher's samples: what a student reaches with at most a
third of the tokens that RL sampled to make its teacher.

    .venv/bin/python benchmarks/distillation.py [--seeds 0 1 2] [--folder /tmp/distillation]

For each seed: SFT and the 70 iterations of RL of the preset make a teacher. From the same SFT,
students learn from as many sampled tokens: 23 iterations by the reverse KL on sampled tokens, 23 by
the reverse KL over the vocabulary, and SFT on as many rollouts of the teacher itself, at two
learning rates. Prints pass@1 of the held-out words with its standard error, and the tokens. A
quarter of an hour a seed; runs that are in the folder are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.why_world import World
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.report.curves import evaluation_of
from rlpipe.store.artifacts import read_records
from rlpipe.store.opening import open_existing
from tests.prefect_stand import bare_server

RL, STUDENT, PROMPTS, GROUP, BATCH = 70, 23, 64, 8, 32
EVALUATED = ["evaluation.prompts_max=512", "evaluation.num_completions=4", "tracking.uri="]
DISTILLED = ["rl.rewards={}", "rl.filters={}", 'evaluation.rewards={"exact" = 1.0}']
SAMPLED = ["rl.group_size=1", "rl.estimator=reinforce_plus_plus", "rl.filters={}", "rl.num_steps=1",
           f"rl.num_prompts={PROMPTS * GROUP * STUDENT}", "rl.shard_prompts=512"]  # fmt: skip


def to_zero(steps: int, rate: float) -> list[str]:
    """So many optimizer steps an iteration, whose learning rate is zero after the last."""
    return [f"rl.num_steps={steps}", f"rl.learning_rate={rate}", "rl.schedule=cosine", "rl.warmup_steps=32",
            f"rl.decay_steps={steps * STUDENT}"]  # fmt: skip


BY = {  # student -> its settings
    "reverse KL, sampled tokens": to_zero(8, 2e-4),
    "reverse KL, whole vocabulary": ["rl.teacher_top_k=100000", "rl.teacher_beta=1.0", *to_zero(32, 3e-4)],
}
SFT = """
[model]
path = "{model}"
context_tokens_max = 128

[[data]]
name = "found"
use = "sft"
source = "rlpipe.extras.samples.rows:chosen"
args = {{ run = "{samples}", store = "{store}", first = {first}, last = {first} }}

[[data]]
name = "words"
use = "evaluation"
source = "reasoning_gym:spell_backward"
rows_max = 8000
part = "heldout"
args = {{ min_word_len = 3, max_word_len = 10 }}

[sft]
num_steps = {steps}
segment_steps = {steps}
batch_size = {batch}
learning_rate = {rate}
warmup_steps = 32
schedule = "cosine"
decay_steps = {steps}

[rl]
num_iterations = 0
completion_tokens_max = 16
rewards = {{ exact = 1.0 }}

[trainer]
threads = 2
tokens_max = 8192

[engines]
count = 2
threads = 1
"""


def tokens(world: World, run: str, iterations: range) -> int:
    """Sampled in these iterations."""
    opened, count = open_existing(world.folder.open_store(), run), 0
    for iteration in iterations:
        ref, _ = opened.committed("rl", iteration, "scores/round-0")
        count += sum(
            len(row.completion_tokens) for row in read_records(opened.store, ref, "scores.parquet", Rollout, SCORES)
        )
    return count


def printed(world: World, name: str, run: str, version: int, count: int) -> None:
    evaluation = evaluation_of(open_existing(world.folder.open_store(), run), version)
    assert evaluation is not None, f"{run} has no evaluation of version {version}"
    score, error = (evaluation.metrics[f"words_pass_at_1{end}"] for end in ("", "_stderr"))
    print(f"  {name:34s} {score:.3f} +- {error:.3f}   {count:8,d} tokens", flush=True)


def sets(*entries: str) -> list[str]:
    return [part for entry in entries for part in ("--set", entry)]


def one_seed(world: World, seed: int) -> None:
    store, teacher, samples = world.folder.store, f"teacher-{seed}", f"samples-{seed}"
    where = ["--store", store]
    if not world.has(teacher, RL):
        world.complete("run", "tiny", "--run", teacher, *sets(f"seed={seed}", f"store={store}", *EVALUATED,
                       f"rl.num_iterations={RL}", f"evaluation.every={RL}"))  # fmt: skip
    print(f"seed {seed}", flush=True)
    printed(world, "SFT, where all begin", teacher, 0, 0)
    printed(world, f"the teacher, {RL} iterations of RL", teacher, RL, tokens(world, teacher, range(RL)))
    for name, settings in BY.items():
        run = f"student-{seed}-{name.partition(', ')[2].partition(' ')[0]}"
        world.fork(teacher, "sft", run, f"rl.teacher=run:{teacher}", f"evaluation.every={STUDENT}", *DISTILLED,
                   *settings, iterations=STUDENT)  # fmt: skip
        printed(world, name, run, STUDENT, tokens(world, run, range(STUDENT)))
    # the newest policy samples as many rollouts; that it is trained on them is not used
    world.fork(teacher, RL - 1, samples, *SAMPLED, iterations=RL + 1)
    count, model = tokens(world, samples, range(RL, RL + 1)), world.path / f"model-{seed}"
    if not model.exists():
        world.complete("export", teacher, "--version", "0", "--to", str(model), *where)
    for rate in (3e-4, 1e-3):
        run = f"sft-{seed}-{rate:g}"
        config, steps = world.path / f"{run}.toml", PROMPTS * STUDENT * GROUP // BATCH
        config.write_text(SFT.format(model=model, samples=samples, store=store, first=RL, steps=steps, batch=BATCH,
                                     rate=rate))  # fmt: skip
        world.complete("run", str(config), "--run", run, *sets(f"seed={seed}", f"store={store}", *EVALUATED))
        printed(world, f"SFT on its samples, at {rate:g}", run, 0, count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/distillation"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with bare_server(arguments.folder) as stand:
        world = World(arguments.folder, stand.environment)
        for seed in arguments.seeds:
            one_seed(world, seed)


if __name__ == "__main__":
    main()
