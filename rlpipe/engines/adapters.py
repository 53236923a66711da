"""The engines that load an adapter beside the base that they were started on. All others load the
adapter merged into the base, as whole weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlpipe.config.pipeline import PipelineConfig

ADAPTER = "adapter"  # the name of the one that an engine has loaded
# of which SGLang and vLLM adapt all linear layers but the head
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # those
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of --max-lora-rank


def loads_adapters(config: PipelineConfig, base: Path) -> bool:
    """True when the engines of a run load the adapters of the model in the folder `base`. False
    with `engines.colocate`: there they lose the base in every turn."""
    model, engines = config.model, config.engines
    if model.adapter == "none" or engines.kind == "local" or engines.colocate:
        return False
    family = json.loads((base / "config.json").read_text()).get("model_type")
    return family in FAMILIES and {*model.adapter_targets} <= {*LAYERS} and model.adapter_rank <= VLLM_RANKS[-1]


def adapter_flags(config: PipelineConfig, base: Path) -> list[str]:
    """With what an engine on `base` is started, so that it loads adapters; nothing where it does
    not.
    """
    if not loads_adapters(config, base):
        return []
    rank = config.model.adapter_rank
    if config.engines.kind == "vllm":
        return [
            "--enable-lora",
            "--max-loras",
            "1",
            "--max-lora-rank",
            str(next(size for size in VLLM_RANKS if size >= rank)),
        ]
    on_device = [] if config.engines.gpu_ids else ["--lora-backend", "torch_native"]
    # two at a time: a request for the base alone takes the place of one
    several = ["--max-loras-per-batch", "2", "--max-lora-rank", str(rank)]
    return ["--enable-lora", *several, "--lora-target-modules", *(config.model.adapter_targets or LAYERS), *on_device]
