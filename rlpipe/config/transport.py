"""The rules of `engines.transport`, by which weights go from the trainer to engines: the settings
with which its memory cannot be the source.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlpipe.config.sections import Sections

# flags of SGLang and vLLM with which one engine uses several GPUs: tensor, pipeline and data
# parallelism
PARALLEL_FLAGS = (
    ("--tp-size", "--tp", "--tensor-parallel-size", "-tp"),
    ("--pp-size", "--pp", "--pipeline-parallel-size", "-pp"),
    ("--dp-size", "--dp", "--data-parallel-size", "-dp"),
)


def broken_transport(config: Sections) -> Iterator[str]:
    """Yields one line for each reason why engines cannot receive weights from the trainer's
    memory.
    """
    engines, or_disk = config.engines, "or engines.transport = 'disk'"
    if engines.transport == "disk":
        return
    if engines.kind != "sglang":
        yield (
            f"{engines.transport=}: {engines.kind} engines read weights from disk; set engines.kind = 'sglang',"
            f" {or_disk}"
        )
    if config.model.adapter != "none":
        yield (
            f"{engines.transport=}: engines load the adapter of model.adapter={config.model.adapter!r} from files; set"
            " engines.transport = 'disk'"
        )
    if engines.colocate:
        yield (
            f"{engines.transport=}: NCCL cannot connect two processes on one GPU ({engines.colocate=}); set"
            " engines.transport = 'disk'"
        )
    if config.trainer.place == "process" != engines.place:
        yield (
            f"{engines.transport=}: engines on other machines ({engines.place=}) cannot reach a trainer that is a"
            f" child process of the flow; set trainer.place = 'elsewhere', {or_disk}"
        )
    if bool(engines.gpu_ids) != bool(config.trainer.gpu_ids):
        yield (
            f"{engines.transport=}: trainer and engines must both have GPUs, or both have none; set trainer.gpu_ids"
            f" and engines.gpu_ids, {or_disk}"
        )
    _, *splits = PARALLEL_FLAGS
    words = {flag.split("=", 1)[0] for flag in engines.flags}
    for flag in sorted(words & {name for names in splits for name in names}):
        yield (f"{engines.flags=}: SGLang cannot receive tensors with {flag}; remove this flag, {or_disk}")
