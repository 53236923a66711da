"""The policy as a sharded module that maps packed tokens to logprobs, and how its weights get in.

Legend: R rows, L tokens of a row, N scored positions, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlpipe.logprobs import chunk_size, chunked_logprobs
from rlpipe.trainer.gang import Gang
from rlpipe.types import JsonDict, StoreError, UserError

ReadRows = Callable[[str, list[int], int, int], Tensor]  # (HF name, whole shape, first row, end row) -> those rows


class PolicyModel(nn.Module):
    """A causal language model whose forward pass gives logprobs, so that lm_head is unsharded where it is used."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.chunk = chunk_size(lm.config.get_text_config().vocab_size)

    def forward(
        self, tokens_RL: Tensor, positions_RL: Tensor, mask_R1LL: Tensor, source_N: Tensor, target_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies, fp32, of `target_N`, each predicted at the flat position `source_N`."""
        hidden = self.lm.base_model(
            input_ids=tokens_RL, position_ids=positions_RL, attention_mask=mask_R1LL, use_cache=False
        ).last_hidden_state
        hidden_NH = hidden.flatten(0, 1).index_select(0, source_N)
        project = self.lm.get_output_embeddings()
        return chunked_logprobs(hidden_NH, target_N, project, temperature=temperature, chunk=self.chunk)

    def shards(self) -> Iterator[tuple[str, DTensor]]:
        """(HF name, sharded parameter), tied ones once."""
        for name, parameter in self.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            yield name.removeprefix("lm."), parameter


def row_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of dimension 0 that FSDP2 gives to a rank: equal chunks, the last ones shorter or empty."""
    chunk = -(-rows // size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def hf_config(value: JsonDict) -> PretrainedConfig:
    """A model's config from its JSON; UserError when it names no architecture that is known."""
    value = {key: entry for key, entry in value.items() if key != "transformers_version"}
    try:
        config = AutoConfig.for_model(**value)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"model config: model_type={value.get('model_type')!r} is not a known architecture ({error})"
        ) from error
    if getattr(config.get_text_config(), "final_logit_softcapping", None):
        raise UserError("model config: final_logit_softcapping is not supported by the chunked logprobs; use another model")
    return config


def build_policy(gang: Gang, config: PretrainedConfig, read_rows: ReadRows) -> PolicyModel:
    """The sharded policy, fp32 masters, each rank reading only its own rows. Faults of reading are common to all ranks."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = PolicyModel(lm).eval()
    layers = [module for module in lm.modules() if type(module).__name__ in (lm._no_split_modules or ())]
    dtype = getattr(torch, gang.options.dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        if gang.options.activation_checkpointing:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(layer, mesh=gang.mesh, mp_policy=precision)
    fully_shard(policy, mesh=gang.mesh, mp_policy=precision)
    policy.to_empty(device=gang.device)
    _restore_buffers(lm)
    with gang.together(), torch.no_grad():
        for name, parameter in policy.shards():
            start, end = row_range(parameter.shape[0], gang.rank, gang.size)
            local = parameter.to_local()
            assert local.shape[0] == end - start, f"{name}: this rank has {local.shape[0]} rows, not {start} to {end}"
            local.copy_(read_rows(name, [*parameter.shape], start, end))
    return policy


def _restore_buffers(lm: Any) -> None:
    """Rotary frequencies are in no file; a model made on the meta device has to make them again."""
    for module in lm.modules():
        if module._non_persistent_buffers_set:
            assert not list(module.parameters(recurse=False)), "would initialise weights anew"
            lm._init_weights(module)
    assert not [name for name, _ in lm.named_buffers() if name in lm.state_dict()], "persistent buffers are not saved"


def new_weights(config: PretrainedConfig, seed: int) -> ReadRows:
    """Rows of a newly initialised model: the same for any number of ranks."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = dict(lm.named_parameters())
    return lambda name, shape, start, end: parameters[name].detach()[start:end]


def folder_weights(folder: Path) -> ReadRows:
    """Rows of the safetensors of a folder in HF format; StoreError naming the folder and tensor that is missing."""
    paths = {name: path for path in sorted(folder.glob("*.safetensors")) for name in _names(path)}

    def read_rows(name: str, shape: list[int], start: int, end: int) -> Tensor:
        if name not in paths:
            raise StoreError(f"{folder} has no tensor {name}")
        with safe_open(paths[name], framework="pt") as file:
            stored = file.get_slice(name)
            # too many rows would be cut off silently by the slice
            if stored.get_shape() != shape:
                raise StoreError(f"{paths[name]}: {name} has the shape {stored.get_shape()}, config.json says {shape}")
            return stored[start:end].float()

    return read_rows


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def set_last(policy: PolicyModel, last: bool) -> None:
    """Gradients are reduced over the ranks only with the last microbatch of a step."""
    assert isinstance(policy, FSDPModule), "the policy is not sharded"
    policy.set_requires_gradient_sync(last)


def reshard(policy: PolicyModel) -> None:
    """Frees what a pass without gradients left unsharded: it would go stale with the next optimizer step."""
    assert isinstance(policy, FSDPModule), "the policy is not sharded"
    policy.reshard()
