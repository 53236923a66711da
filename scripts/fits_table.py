"""What a training rank takes of its GPU, by model and number of ranks, as `rlpipe plan` counts it:
the table in docs/gpu.md.

`.venv/bin/python scripts/fits_table.py` prints it; `--write` puts it into the page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.config.operational import TrainerConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.extras.plan.memory import GIB, host_bytes, peak_bytes
from rlpipe.extras.plan.sizes import ModelSizes
from rlpipe.extras.plan.trial import PlannedTraining, sizes_of
from rlpipe.models.causal import empty_model, hf_config
from scripts.page_table import PageTable

ROOT = Path(__file__).parent.parent
TABLE = PageTable("docs/gpu.md", "<!-- what fits: scripts/fits_table.py -->", "<!-- end of what fits -->")
TOKENS = 8192  # of a microbatch
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**QWEN3, **dict(zip(SIZES, (1024, 3072, 28, 16), strict=True)), "tie_word_embeddings": True},
    "Qwen3-1.7B": {**QWEN3, **dict(zip(SIZES, (2048, 6144, 28, 16), strict=True)), "tie_word_embeddings": True},
    "Qwen3-4B": {**QWEN3, **dict(zip(SIZES, (2560, 9728, 36, 32), strict=True)), "tie_word_embeddings": True},
    "Qwen3-8B": {**QWEN3, **dict(zip(SIZES, (4096, 12288, 36, 32), strict=True)), "tie_word_embeddings": False},
    "Qwen3-14B": {**QWEN3, **dict(zip(SIZES, (5120, 17408, 40, 40), strict=True)), "tie_word_embeddings": False},
    "Qwen3-32B": {**QWEN3, **dict(zip(SIZES, (5120, 25600, 64, 64), strict=True)), "tie_word_embeddings": False},
    "Llama-3.3-70B": {**LLAMA, **dict(zip(SIZES, (8192, 28672, 80, 64), strict=True)), "tie_word_embeddings": False},
}
SPLITS: dict[str, dict[str, Any]] = {
    "1 rank": {"ranks": 1},
    "8 ranks": {"ranks": 8},
    "16 ranks": {"ranks": 8, "nodes": 2},
    '2 nodes of 8, `split_over = "node"`': {"ranks": 8, "nodes": 2, "split_over": "node"},
}


def config_of(offload: str, **layout: Any) -> PipelineConfig:
    """A run on GPUs in bf16 that recomputes activations."""
    config = read_config("one-gpu", [], ROOT / "flows" / "presets")
    trainer = TrainerConfig.model_validate(
        {
            "gpu_ids": [*range(layout["ranks"])],
            "tokens_max": TOKENS,
            "activation_checkpointing": True,
            "offload": offload,
            **layout,
        }
    )
    return config.model_copy(update={"trainer": trainer, "rl": config.rl.model_copy(update={"kl": "none"})})


def cells(sizes: ModelSizes) -> list[str]:
    """For each split: what a rank takes without and with `trainer.offload`, GiB, and what 8
    ranks then have on their host."""

    def of(layout: dict[str, Any]) -> str:
        return " / ".join(
            f"{peak_bytes(config_of(offload, **layout), sizes) / GIB:,.0f}" for offload in ("none", "optimizer")
        )

    on_host = 8 * host_bytes(config_of("optimizer", ranks=8), sizes) / GIB
    return [*map(of, SPLITS.values()), f"{on_host:,.0f}"]


def row(name: str) -> str:
    training: PlannedTraining = {"dtype": "bfloat16", "tokens_max": TOKENS, "activation_checkpointing": True}
    sizes = sizes_of(empty_model(hf_config(SHAPES[name])), TOKENS, training)
    return f"| {' | '.join([name, f'{sizes.parameters / 1e9:.2f}B', *cells(sizes)])} |"


def table() -> str:
    """All of it."""
    head = ["model", "parameters", *SPLITS, "host of a node of 8"]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *map(row, SHAPES)])


def in_page() -> list[str]:
    """The lines that the page has."""
    return TABLE.lines()


if __name__ == "__main__":
    TABLE.show(table())
