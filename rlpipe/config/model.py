"""The section `model` of the config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from rlpipe.config.affects import Added
from rlpipe.config.operational import STRICT, TOKENS_MAX

Dtype = Literal["float32", "bfloat16"]


class ModelConfig(BaseModel, **STRICT):
    """The model that training starts from: a model in HF format, or a new Qwen3 of the given
    shape.
    """

    path: str = Field(
        default="",
        description=(
            "Model to start from: a folder (also s3://), a hub name or run:NAME (docs/models.md); empty: a new Qwen3"
        ),
    )
    context_tokens_max: Annotated[int, "data", "selection", "prompts if dropping", "evaluation if dropping"] = Field(
        default=512,
        ge=16,
        le=TOKENS_MAX,
        description="Longest prompt + completion, or conversation, in tokens; longer ones are truncated, and counted",
    )
    dtype: Dtype = Field(
        default="float32",
        description=(
            "Number type of the forward and backward pass, of the engines and of saved policies; master weights and"
            " moments are float32"
        ),
    )
    hidden_size: int = Field(
        default=128,
        ge=8,
        le=65_536,
        description="Hidden size of a new model (`rlpipe plan` also uses this shape for its estimates)",
    )
    intermediate_size: int = Field(default=384, ge=8, le=1 << 20, description="Hidden size of a new model's MLP")
    num_layers: int = Field(default=4, ge=1, le=1024, description="Layers of a new model")
    num_heads: int = Field(default=4, ge=1, le=1024, description="Attention heads of a new model")
    num_kv_heads: int = Field(default=2, ge=1, le=1024, description="Key-value heads of a new model")
    init_std: float = Field(default=0.02, gt=0, le=1, description="Standard deviation of a new model's initial weights")
    vocab_size: int = Field(
        default=0,
        ge=0,
        le=TOKENS_MAX,
        description="Vocabulary size for the estimates of `rlpipe plan`; 0: that of the tokenizer",
    )
    chat_template: str = Field(
        default="", description="Jinja chat template that replaces the tokenizer's; empty keeps it"
    )
    chat_template_args: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            'More variables of the chat template, for example `{"enable_thinking": false}`, or tools as JSON schemas'
        ),
    )
    control_tokens: Annotated[Literal["text", "as_written"], Added("as_written")] = Field(
        default="text",
        description=(
            "How the text of a control token is tokenized in prompts, environments' answers and tools. text: as"
            " ordinary text; as_written: as the control token itself"
        ),
    )
    adapter: Annotated[Literal["none", "lora"], Added("none")] = Field(
        default="none",
        description=(
            "What is trained. none: all weights; lora: a LoRA adapter, and the weights of the base model stay as"
            " they are"
        ),
    )
    adapter_rank: Annotated[int, Added(beside="adapter")] = Field(
        default=8, ge=1, le=4096, description="Rank of the adapter's matrices"
    )
    adapter_alpha: Annotated[float, Added(beside="adapter")] = Field(
        default=16.0,
        gt=0,
        le=1e6,
        description="The adapter's output is multiplied by adapter_alpha / adapter_rank",
    )
    adapter_targets: Annotated[list[str], Added(beside="adapter")] = Field(
        default_factory=list,
        description=(
            'Linear layers that get an adapter, by name or the end of it, for example `["q_proj", "v_proj"]`; empty:'
            " all but the output layer"
        ),
    )
