"""Trainer and engines on the same GPUs (`engines.colocate`): its rules, and the split of a GPU's
memory.

The constants are in GiB, for one process on one GPU. They are estimates; none was measured on a GPU
yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlpipe.config.sections import Sections

CONTEXT_GIB = 0.7  # of CUDA and cuBLAS, which is only freed when the process ends
NCCL_GIB = 0.6  # with several ranks
SLACK_GIB = 0.5
# kept by a released engine: context, NCCL, CUDA graphs
ENGINE_REST_GIB = {"local": 0.7, "sglang": 3.0, "vllm": 3.0}
# of a GPU, for memory that SGLang's fraction does not include: activations and CUDA graphs
WORKING_SHARE = 0.12
GPU_GIB_SMALLEST = 24.0  # assumed for a GPU of unknown size


def trainer_rest_gib(config: Sections) -> float:
    """The GPU memory, in GiB, that a rank keeps while its weights and moments are on the host."""
    return CONTEXT_GIB + (NCCL_GIB if config.trainer.ranks * config.trainer.nodes > 1 else 0.0)


def engine_fraction(config: Sections, gpu_gib: float) -> float:
    """The fraction of a GPU with `gpu_gib` that is passed to an engine: in SGLang for weights and
    KV cache, in vLLM for everything.
    """
    left = 1 - (trainer_rest_gib(config) + SLACK_GIB) / gpu_gib
    return max(0.1, int(100 * (left - WORKING_SHARE if config.engines.kind == "sglang" else left)) / 100)


def broken_colocation(config: Sections) -> Iterator[str]:
    """Yields one line for each reason why trainer and engines cannot share their GPUs."""
    trainer, engines, rl = config.trainer, config.engines, config.rl
    for name, part in (("trainer", trainer), ("engines", engines)):
        if part.place == "deployment":
            yield (
                f"{name}.place='deployment': a work pool gives each flow run GPUs of its own, but with"
                f" engines.colocate trainer and engines share theirs; set {name}.place = 'process', or 'elsewhere' on"
                " nodes that run both, or engines.colocate = false"
            )
    places = {trainer.place, engines.place}
    if places == {"process", "elsewhere"}:
        yield (
            f"{engines.place=}: may be another machine than that of {trainer.place=}, but with engines.colocate both"
            " must be on the same GPUs; set both to 'process', or both to 'elsewhere' for nodes that each run a"
            " `rlpipe trainer` and a `rlpipe host`"
        )
    elif places == {"elsewhere"} and engines.nodes != trainer.nodes:
        yield (
            f"{engines.nodes=}: with engines.colocate engines are on the nodes of the trainer; set it to trainer.nodes,"
            f" {trainer.nodes}, or engines.colocate = false"
        )
    if rl.overlap != "none":
        yield (
            f"{rl.overlap=}: trains and samples at the same time, but with engines.colocate only the trainer or the"
            " engines can use the memory; set rl.overlap = 'none', or engines.colocate = false"
        )
    if sorted(trainer.gpu_ids) != sorted(engines.gpu_ids):
        yield (
            f"{engines.gpu_ids=}: with engines.colocate they are those of the trainer, {trainer.gpu_ids}; name the same"
            " for both, or set engines.colocate = false"
        )
    elif engines.kind != "local" and not engines.gpu_ids:
        yield (
            f"{engines.kind=}: frees only the memory of GPUs, and engines.gpu_ids names none; with engines.colocate"
            " set engines.gpu_ids, or kind = 'local'"
        )
