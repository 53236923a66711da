"""The processes that a config would start, their places, and their cost: sizes that follow from the
config and from the shapes of its model."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.colocation import ENGINE_REST_GIB, engine_fraction, trainer_rest_gib
from rlpipe.config.operational import PART_BYTES, PARTS_HERE
from rlpipe.config.overlap import broken_overlap
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.training import RlConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
CPU_TOKENS_MAX = 32768  # of the local engine, in all places of a bucket
# a parameter: fp32 weight and gradient, and AdamW's two moments, each rank its rows
SHARDED_BYTES = 16
MOMENTS_BYTES = 8  # the part of it that trainer.offload keeps on the host
OFFLOADED_BYTES = 12  # weight and moments: the part that goes to the host for colocated engines
GPUS_GIB = (24, 48, 80, 141)  # of common GPUs
GATHERED_LAYERS = 2  # the one that computes and the one that comes next


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, counted on its shapes as transformers builds them.
    Example: ModelSizes(5_000, 1_000, 1_000, 512, 70_000)."""

    parameters: int
    layer: int  # parameters of the largest layer
    rest: int  # and of what is in no layer: embeddings, head
    kv_token: int  # numbers that an engine keeps for a token
    # bytes that one takes beside weights, at the most; None where shapes alone do not say it
    microbatch: int | None
    # parameters of the adapter that is trained beside the model; none: all of the model is trained
    adapter: int = 0
    largest: int = 0  # numbers of the largest parameter


def memory_lines(config: PipelineConfig, sizes: ModelSizes) -> list[str]:
    """Estimated memory per training process and per engine."""
    trainer, dtype = config.trainer, config.model.dtype
    sharded, gathered, microbatch = (part / GIB for part in training_bytes(config, sizes))
    reference = ", and of the reference," if config.rl.kl != "none" else ""
    reference += ", and of the teacher," if config.rl.holds_teacher else ""
    how = "recomputed" if trainer.activation_checkpointing else "kept"
    slices = f" of rows that {trainer.context_ranks} ranks split" if trainer.context_ranks > 1 else ""
    activations = "not known" if sizes.microbatch is None else f"{microbatch:.2f}"
    return [
        *adapter_lines(sizes, BYTES[dtype]),
        f"model: {sizes.parameters / 1e6:,.1f}M parameters, {dtype}",
        (
            f"memory per training rank, estimated: its rows of weights, gradients and optimizer{reference}"
            f" {sharded:.2f} + gathered layers {gathered:.2f} + a microbatch of {trainer.tokens_max} tokens{slices}"
            f" {activations} (activations are {how}) = {peak_bytes(config, sizes) / GIB:.2f} GiB"
        ),
        *_offload_lines(config, sizes),
        *([_engine_line(config, sizes), *_colocated_lines(config, sizes)] if config.samples else []),
    ]


def adapter_lines(sizes: ModelSizes, width: int) -> list[str]:
    """The line with the size of a policy in the store where it is an adapter; `width`: bytes of a
    number."""
    if not sizes.adapter:
        return []
    size, share = sizes.adapter * width / 2**20, sizes.adapter / sizes.parameters
    return [
        f"adapter: {sizes.adapter / 1e6:,.2f}M parameters; a policy takes {size:,.1f} MiB, {share:.2%} of the base"
        " model"
    ]


def peak_bytes(config: PipelineConfig, sizes: ModelSizes) -> float:
    """The most bytes that a training rank needs: in a pass, or in an update that fetches
    moments.
    """
    sharded, gathered, microbatch = training_bytes(config, sizes)
    return sharded + max(gathered + microbatch, _fetched_bytes(config, sizes))


def share_of_rank(config: PipelineConfig) -> float:
    """The fraction of a copy of the model that a rank holds."""
    return config.trainer.copies / (config.trainer.ranks * config.trainer.nodes)


def host_bytes(config: PipelineConfig, sizes: ModelSizes) -> float:
    """Bytes that `trainer.offload` keeps on the host for a rank."""
    trained = sizes.adapter or sizes.parameters
    return trained * MOMENTS_BYTES * share_of_rank(config) if config.trainer.offload == "optimizer" else 0.0


def _fetched_bytes(config: PipelineConfig, sizes: ModelSizes) -> float:
    """The bytes of moments that are on the device at once in an update: a parameter is never
    split.
    """
    of_largest = 0 if sizes.adapter else sizes.largest * MOMENTS_BYTES * share_of_rank(config)
    return min(PARTS_HERE * max(PART_BYTES, of_largest), host_bytes(config, sizes))


def _offload_lines(config: PipelineConfig, sizes: ModelSizes) -> list[str]:
    if config.trainer.offload == "none":
        return []
    place = (
        "in memory of the host" if config.trainer.gpu_ids else "in a file of its scratch, as a CPU has no other memory"
    )
    on_host, fetched = host_bytes(config, sizes) / GIB, _fetched_bytes(config, sizes) / GIB
    return [
        f"  and {on_host:.2f} GiB a rank of AdamW's moments {place}; an update fetches them, at most {fetched:.2f} GiB"
        " at once"
    ]


def training_bytes(config: PipelineConfig, sizes: ModelSizes) -> tuple[float, int, int]:
    """The bytes that a training rank needs: for its rows, for gathered layers, and for a
    microbatch.
    """
    width = BYTES[config.model.dtype]
    # reference and teacher are frozen, and of about the policy's size; with an adapter the
    # reference is the policy itself, but where it is named
    reference = config.rl.kl != "none" and (not sizes.adapter or bool(config.rl.reference))
    others = sizes.parameters * (reference + config.rl.holds_teacher)
    frozen, trained = (sizes.parameters, sizes.adapter) if sizes.adapter else (0, sizes.parameters)
    total = (frozen + others) * width + trained * SHARDED_BYTES
    sharded = total * share_of_rank(config) - host_bytes(config, sizes)
    # a layer's gradient is whole, and in fp32, until it is reduced
    gradient = 0 if sizes.adapter else sizes.layer * BYTES["float32"]
    gathered = (sizes.rest + GATHERED_LAYERS * sizes.layer) * width + gradient
    return sharded, gathered, sizes.microbatch or 0


def _engine_line(config: PipelineConfig, sizes: ModelSizes) -> str:
    engines, width = config.engines, BYTES[config.model.dtype]
    if engines.gpu_ids:
        share = len(engines.gpu_ids) // engines.count
        assert share > 0, "the rules refuse an engine without a GPU"
        weights, token = sizes.parameters * width / share / GIB, sizes.kv_token * width / share / 2**10
        return (
            f"memory per engine GPU, estimated: weights {weights:.2f} GiB, the rest is KV cache, {token:.1f} KiB a"
            " token"
        )
    # weights, and keys and values of all places at the longest context
    weights, token = (part * width / GIB for part in (sizes.parameters, sizes.kv_token))
    cache = min(engines.in_flight_max * config.model.context_tokens_max, CPU_TOKENS_MAX) * token
    # rlpipe/models/packed.py; whether the processor has AMX is known to a process with torch alone
    is_packed = engines.kind == "local" and config.model.dtype == "bfloat16"
    packed, copy = (weights, f" + their packed copy, with AMX, {weights:.2f}") if is_packed else (0.0, "")
    return (
        f"memory per engine, estimated: weights {weights:.2f}{copy} + keys and values {cache:.2f} ="
        f" {weights + packed + cache:.2f} GiB"
    )


def _colocated_lines(config: PipelineConfig, sizes: ModelSizes) -> list[str]:
    """The lines about the memory that trainer and engines share: what each holds in its turn, and
    the GPUs on which that fits.
    """
    trainer, engines, width = config.trainer, config.engines, BYTES[config.model.dtype]
    if not engines.colocate:
        return []
    if not engines.gpu_ids:
        return [
            "colocated: trainer and engines take turns in this memory; what a trainer on a CPU holds goes to disk"
            " meanwhile, for tests"
        ]
    peak, rest = peak_bytes(config, sizes) / GIB, ENGINE_REST_GIB[engines.kind]
    bytes_away = OFFLOADED_BYTES + (width if config.rl.kl != "none" else 0)
    away = sizes.parameters * bytes_away * share_of_rank(config) * trainer.ranks / GIB
    where = "the host's memory" if trainer.nodes == 1 else f"the memory of each of {trainer.nodes} hosts"
    share = len(engines.gpu_ids) // engines.count
    weights, token = (part * width / share / GIB for part in (sizes.parameters, sizes.kv_token))
    lines = [
        f"colocated, a GPU estimated: while training {peak:.2f} + {rest:.2f} that a released engine keeps ="
        f" {peak + rest:.2f} GiB; while sampling the trainer keeps {trainer_rest_gib(config):.2f} GiB, and {away:.2f}"
        f" GiB of {where}"
    ]
    for gpu_gib in GPUS_GIB:
        fraction = engine_fraction(config, gpu_gib)
        cache = fraction * gpu_gib - weights
        held = f"an engine gets {fraction:.2f} of it: weights, and {max(0, cache) / token:,.0f} tokens of KV cache"
        lines.append(f"  on {gpu_gib} GiB: {held if peak + rest < gpu_gib and cache > 0 else 'does not fit'}")
    return lines


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
    ]


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


def warning_lines(config: PipelineConfig) -> list[str]:
    """Warnings about settings that are allowed but hardly meant."""
    samples_rewards = config.rl.num_iterations and not config.rl.rollouts_from
    if config.model.path or config.sft.num_steps or not samples_rewards:
        return []
    return [
        "RL of a new model without SFT: random weights write noise, no rollout gets a reward, and there is nothing to"
        " learn from; set sft.num_steps and give SFT data, or name a trained model as model.path"
    ]
