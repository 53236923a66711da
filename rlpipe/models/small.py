"""A small model of the same family, to test the family's code in a second, without its weights."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlpipe.models.causal import empty_model

VOCABULARY, HEADS = 96, 4
# (pattern of field names, the new number); the first match counts
SIZES: list[tuple[str, int]] = [
    (r"\w*vocab_size\w*|\w*_vocab", VOCABULARY),
    (r"\w+_token_(id|index)", 2),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers", 4),
    (r"num_attention_heads|swa_num_attention_heads|n_heads?|\w*coder_attention_heads", HEADS),
    (r"num_key_value_heads|swa_num_key_value_heads|num_kv_heads|key_value_heads", 2),
    (r"hidden_size|d_model|n_embd|embedding_size|word_embed_proj_dim", 32),
    (r"\w*intermediate_size|\w*ffn_dim|ffn_hidden_size|dff|dim_ff|intermediate_size_mlp|n_inner", 48),
    (r"qk_head_dim", 16),
    (r"rotary_dim", 4),
    (r"\w*head_dim|dim_head|kv_channels|d_kv", 8),
    (r"\w*_lora_rank", 16),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|n_experts", 4),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length", 256),
    (r"sliding_window(_size)?|attention_window_size|local_attention|attention_chunk_size|window_size", 8),
    (r"(mamba_)?chunk_size", 16),  # texts are padded to whole chunks
]
LAYERS_MAX, PARAMETERS_MAX = 12, 20_000_000
# the scale of new weights: with the default scale all tokens are about equally likely in any
# context
LOUDNESS = 2.0


def small_config(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """The text model's config with small numbers, and just enough layers to include each kind of
    layer.

    Its other fields are unchanged.
    """
    text = config.get_text_config()
    fields = {name: value for name, value in text.to_dict().items() if name != "transformers_version"}
    by_layer = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == text.num_hidden_layers and _are_kinds(value)
    }
    layers = max([4, *(_first_of_all(value) for value in by_layer.values())])
    # otherwise each head has keys of its own, and must have them in the small model, too
    shared = fields.get("num_key_value_heads") != getattr(text, "num_attention_heads", None)
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool):
            fields[name] = (
                HEADS
                if name == "num_key_value_heads" and not shared
                else next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
            )
    layers = min(layers, LAYERS_MAX, text.num_hidden_layers)
    by_index = fields.get("per_layer_config")  # has entries for some layers, by their index
    if isinstance(by_index, dict):
        fields["per_layer_config"] = {index: value for index, value in by_index.items() if int(index) < layers}
    fields |= {name: value[:layers] for name, value in by_layer.items()}
    names = {"num_hidden_layers", text.attribute_map.get("num_hidden_layers")} & fields.keys()
    return AutoConfig.for_model(str(fields.pop("model_type")), **(fields | dict.fromkeys(names, layers) | changes))


def small_model(config: PretrainedConfig) -> Any:
    """A new model of a small config, fp32, in eval mode, whose logprobs depend visibly on earlier
    tokens. ValueError when it is not small.
    """
    size = sum(parameter.numel() for parameter in empty_model(config).parameters())
    if size > PARAMETERS_MAX:
        raise ValueError(f"{config.model_type} has {size:,} parameters when it is made small")
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(LOUDNESS)
    return lm


def _are_kinds(entries: list[Any]) -> bool:
    """True when a list has an entry for every layer. Trap: a list of the indices of all layers has
    the same length, but is not such a list.
    """
    return all(isinstance(entry, str | int | float) for entry in entries) and entries != list(range(len(entries)))


def _first_of_all(kinds: list[Any]) -> int:
    """The number of first layers that include each kind of layer."""
    return 1 + max(kinds.index(kind) for kind in set(kinds))
