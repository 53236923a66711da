"""The memory of training processes and engines, from the config and from the shapes of its
model."""

from __future__ import annotations

from rlpipe.config.colocation import ENGINE_REST_GIB, engine_fraction, trainer_rest_gib
from rlpipe.config.operational import PART_BYTES, PARTS_HERE
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.extras.plan.sizes import BYTES, ModelSizes

GIB = 2**30
CPU_TOKENS_MAX = 32768  # of the local engine, in all places of a bucket
# a parameter: fp32 weight and gradient, and AdamW's two moments, each rank its rows
SHARDED_BYTES = 16
MOMENTS_BYTES = 8  # the part of it that trainer.offload keeps on the host
OFFLOADED_BYTES = 12  # weight and moments: the part that goes to the host for colocated engines
GPUS_GIB = (24, 48, 80, 141)  # of common GPUs
GATHERED_LAYERS = 2  # the one that computes and the one that comes next


def memory_lines(config: PipelineConfig, sizes: ModelSizes) -> list[str]:
    """Estimated memory per training process and per engine."""
    trainer, dtype = config.trainer, config.model.dtype
    sharded, gathered, microbatch = (part / GIB for part in training_bytes(config, sizes))
    reference = ", and of the reference," if config.rl.kl != "none" else ""
    if num_teachers := _teachers_held(config):
        reference += ", and of the teacher," if num_teachers == 1 else f", and of {num_teachers} teachers,"
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


def _teachers_held(config: PipelineConfig) -> int:
    """The number of teachers in the trainer's memory."""
    return 0 if config.rl.teacher_engine else len(config.teachers)


def training_bytes(config: PipelineConfig, sizes: ModelSizes) -> tuple[float, int, int]:
    """The bytes that a training rank needs: for its rows, for gathered layers, and for a
    microbatch.
    """
    width = BYTES[config.model.dtype]
    # reference and teachers are frozen, and of about the policy's size; with an adapter the
    # reference is the policy itself, but where it is named
    reference = config.rl.kl != "none" and (not sizes.adapter or bool(config.rl.reference))
    others = sizes.parameters * (reference + _teachers_held(config))
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
    # whether the processor has AMX is known to a process with torch alone
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
