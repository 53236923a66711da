"""The engines that load an adapter beside the base that they were started on. All others load the
adapter merged into the base, as whole weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.kind import kind_of

ADAPTER = "adapter"  # the name of the one that an engine has loaded
# of which SGLang and vLLM adapt all linear layers but the head
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # those
RANK_MAX = 512  # the largest of vLLM's


def loads_adapters(config: PipelineConfig, base: Path) -> bool:
    """True when the engines of a run load the adapters of the model in the folder `base`. False
    with `engines.colocate`: there they lose the base in every turn."""
    model, engines = config.model, config.engines
    if model.adapter == "none" or engines.colocate or not kind_of(engines.kind).loads_adapters:
        return False
    family = json.loads((base / "config.json").read_text()).get("model_type")
    return family in FAMILIES and {*model.adapter_targets} <= {*LAYERS} and model.adapter_rank <= RANK_MAX
