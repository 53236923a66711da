"""Engines that load an adapter onto the base that they were started with. All others load it merged
into the base, as whole weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.kind import kind_of

ADAPTER = "adapter"  # the name of the loaded adapter in the engine
# families in which SGLang and vLLM support adapters on all linear layers but the head: LAYERS
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK_MAX = 512  # vLLM's largest rank


def loads_adapters(config: PipelineConfig, base: Path) -> bool:
    """True when the engines of a run load adapters of the model in the folder `base`. False with
    `engines.colocate`, where they lose the base at every release.
    """
    model, engines = config.model, config.engines
    if model.adapter == "none" or engines.colocate or not kind_of(engines.kind).loads_adapters:
        return False
    family = json.loads((base / "config.json").read_text()).get("model_type")
    return family in FAMILIES and {*model.adapter_targets} <= {*LAYERS} and model.adapter_rank <= RANK_MAX
