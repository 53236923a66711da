"""The processes that a config would start, their places, and the work that they would do."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.overlap import broken_overlap
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.training import RlConfig
from rlpipe.store.limits import gpus_held


def process_lines(config: PipelineConfig) -> list[str]:
    """A line for each process: where it runs, on which GPUs."""

    def device(gpu_ids: list[int], threads: int) -> str:
        return f"GPU {', '.join(map(str, gpu_ids))}" if gpu_ids else f"CPU, {threads} threads"

    trainer, engines = config.trainer, config.engines
    lines = []
    for rank in range(trainer.nodes * trainer.ranks):
        gpu_ids = trainer.gpu_ids and [trainer.gpu_ids[rank % trainer.ranks]]
        lines.append(f"  train node {rank // trainer.ranks}: trainer rank {rank} on {device(gpu_ids, trainer.threads)}")
    if not config.samples:
        return lines
    share = len(engines.gpu_ids) // engines.count
    first_node = 0 if engines.colocate or (config.engines_here and trainer.nodes == 1) else trainer.nodes
    for engine in range(engines.nodes * engines.count):
        node, index = divmod(engine, engines.count)
        place = device(engines.gpu_ids[index * share : (index + 1) * share], engines.threads)
        lines.append(f"  sampling node {first_node + node}: {engines.kind} engine {engine} on {place}")
    return lines if config.engines_here else [*lines, "  on each sampling node: rlpipe host --store STORE --run RUN"]


@dataclass(frozen=True)
class PlannedWork:
    """The sizes that follow from a config. `rollouts`: of an iteration; `started`, `shards` and
    `tokens_max`: of a sampling round, 0 where nothing is sampled for training.
    """

    trainer_ranks: int
    engines: int
    reward_workers: int
    sft_steps: int
    sft_segments: int
    iterations: int
    steps: int  # of RL, of the optimizer
    rollouts: int
    started: int
    shards: int
    tokens_max: int


def planned_work(config: PipelineConfig) -> PlannedWork:
    """The sizes of a run."""
    sft, rl, trainer, engines = config.sft, config.rl, config.trainer, config.engines
    started = 0 if rl.rollouts_from else rl.round_groups * rl.group_size
    return PlannedWork(
        trainer_ranks=trainer.ranks * trainer.nodes,
        engines=engines.count * engines.nodes if config.samples else 0,
        reward_workers=rl.reward_workers,
        sft_steps=sft.num_steps,
        sft_segments=sft.num_segments,
        iterations=rl.num_iterations,
        steps=rl.num_iterations * rl.num_steps,
        rollouts=rl.num_prompts * rl.group_size,
        started=started,
        shards=-(-rl.round_groups // rl.shard_prompts) if started else 0,
        tokens_max=started * rl.completion_tokens_max,
    )


def plan_lines(config: PipelineConfig) -> list[str]:
    """The processes and the work of a run as lines of text."""
    sft, rl, work = config.sft, config.rl, planned_work(config)
    sampled = []
    if rl.rollouts_from:
        but = " but evaluations" if config.sets("evaluation") else ""
        iteration = f"rollouts from {rl.rollouts_from}; nothing is sampled{but}"
    else:
        iteration = (
            f"rollouts in {work.shards} shards, {work.started:,} started, at most {work.tokens_max:,} tokens sampled a"
            f" round, {rl.rounds_max} rounds at most"
        )
        sampled = [f"in all: at most {work.tokens_max * rl.num_iterations * rl.rounds_max:,} tokens sampled"]
    return [
        f"processes: 1 flow, {work.trainer_ranks} trainer ranks, {work.engines} engines, {work.reward_workers} reward"
        " workers"
        + (f", {work.reward_workers} environment workers" if rl.environment else "")
        + (f", at most {rl.agents_max} agents" if rl.agent else ""),
        *process_lines(config),
        (
            f"SFT: {work.sft_steps} steps x {sft.batch_size} conversations, {work.sft_segments} segments of"
            f" {sft.segment_steps}"
        ),
        f"RL: {work.iterations} iterations x {rl.num_steps} steps = {work.steps} optimizer steps",
        f"  an iteration: {rl.num_prompts} prompts x {rl.group_size} = {work.rollouts:,} {iteration}",
        (
            f"  a step: {work.rollouts // rl.num_steps:,} rollouts; training state every"
            f" {config.checkpoint.state_every} iterations"
        ),
        *overlap_lines(rl),
        *sampled,
        *price_lines(config),
    ]


def price_lines(config: PipelineConfig) -> list[str]:
    """The price of an hour of RL, and how long `budget.cost` lasts; nothing without a price or
    GPUs.
    """
    price, gpus = config.budget.price_per_gpu_h, gpus_held(config, "rl")
    if not price or not gpus:
        return []
    lasts = f"; budget.cost={config.budget.cost:g} lasts {config.budget.cost / price / gpus:.3g} h"
    return [f"price: an hour of RL holds {gpus} GPUs and costs {price * gpus:g}" + lasts * bool(config.budget.cost)]


def overlap_lines(rl: RlConfig) -> list[str]:
    """The lines that say what runs at the same time, and for each other `rl.overlap` what would, or
    what forbids it.
    """
    meaning = {
        "none": "sampling and training take turns",
        "iteration": "iteration k + 1 is sampled while k is trained, by the policy that k starts from",
    }
    lines = [f"  overlap {rl.overlap}: {meaning.pop(rl.overlap)}"]
    for mode, overlapped in meaning.items():
        refused = next(broken_overlap(rl.model_copy(update={"overlap": mode})), "")
        lines.append(
            f"  overlap {mode} would be refused: {refused}" if refused else f"  overlap {mode} would be: {overlapped}"
        )
    return lines
