"""A trial of a model that counts its sizes on its shapes, and times it
(`python -m rlpipe.extras.plan.trial`).

First line in: as of `rlpipe/checks/trial.py`, with "training": {"dtype", "tokens_max",
"activation_checkpointing", "context_ranks"} and, on a CPU, "timed": see `measured_speed`; out: the
fields of a SizedModel or {"error"}.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlpipe.base.values import JsonDict
from rlpipe.checks.trial import NEEDS_VALUES, ModelTrial, config_of, load, try_model
from rlpipe.extras.plan.sizes import ModelSizes, SizedModel, Speed
from rlpipe.extras.plan.speed import measured_speed
from rlpipe.models.causal import MODEL_FAULTS, empty_model
from rlpipe.models.context_parallel import ContextGroup, use_context_group
from rlpipe.processes.user_code import serve
from rlpipe.trainer.model import PolicyModel, layers_of, recompute


class PlannedTraining(TypedDict):
    """The settings of training on which the sizes of a plan depend."""

    dtype: str
    tokens_max: int
    activation_checkpointing: bool
    context_ranks: NotRequired[int]


class PlannedTrial(ModelTrial):
    """The first request, with what a plan counts for."""

    training: PlannedTraining
    timed: NotRequired[dict[str, int]]


def size_model(hello: PlannedTrial) -> JsonDict:
    """The answer of the process, the fields of a SizedModel; UserError as of `try_model`."""
    tried, config = try_model(hello), config_of(hello)
    sizes = sizes_of(empty_model(config), hello["context_tokens_max"], hello["training"])
    speed = _speed_of(config, hello) if "timed" in hello else "no GPU is tried by a plan"
    return asdict(SizedModel(**tried, sizes=replace(sizes, adapter=tried["num_adapted"]), speed=speed))


def _speed_of(config: PretrainedConfig, hello: ModelTrial) -> Speed | str:
    """The result of `measured_speed`, or the reason why the first layers alone are no model."""
    assert "training" in hello and "timed" in hello, "a speed is of a training"
    dtype, timing = getattr(torch, hello["training"]["dtype"]), hello["timed"]
    try:
        return measured_speed(config, dtype, min(hello["context_tokens_max"], timing["tokens_max"]), timing)
    except MODEL_FAULTS as error:
        return f"the first layers of family {config.model_type} alone are no model ({error!r:.120})"


class ShapesOfGroup(ContextGroup):
    """One rank of a context-parallel group whose other ranks do not exist: what it would receive
    has the right shape only.
    """

    def send(self, parts_C: Tensor) -> Tensor:
        return parts_C.clone()

    def add(self, values: Tensor) -> Tensor:
        return values

    def own(self, slice_N: Tensor) -> Tensor:
        return torch.arange(len(slice_N) // self.ranks)

    def is_single(self, positions_RL: Tensor) -> bool:
        return True


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make inside of the `with` block and that still
    exist. `known`: tensors that are not counted.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if (
                isinstance(tensor, Tensor)
                and (key := (storage := tensor.untyped_storage())._cdata) not in self._counted
            ):
                self._counted.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, key, storage.nbytes())
        return out

    def _forget(self, key: int, num_bytes: int) -> None:
        self._counted.discard(key)
        self.now -= num_bytes
        assert self.now >= 0, "a tensor was forgotten twice"


def sizes_of(lm: Any, context_tokens_max: int, training: PlannedTraining) -> ModelSizes:
    """The sizes that a plan needs of a model without weights."""
    text, layers = lm.config.get_text_config(), layers_of(lm)
    of_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    total = sum(parameter.numel() for parameter in lm.parameters())
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, getattr(text, "num_attention_heads", 1))
    ranks = training.get("context_ranks", 1)
    slots = training["tokens_max"] * ranks  # of a microbatch of all ranks that share its rows
    length = min(context_tokens_max, slots)
    rows, dtype = slots // length, getattr(torch, training["dtype"])
    taken = microbatch_bytes(lm.config, dtype, rows, length, training["activation_checkpointing"], ranks)
    return ModelSizes(
        parameters=total,
        layer=max(of_layers, default=0),
        rest=total - sum(of_layers),
        kv_token=2 * text.num_hidden_layers * heads * head_dim,
        microbatch=None if taken is None else round(taken * slots / (rows * length)),
        largest=max(parameter.numel() for parameter in lm.parameters()),
    )


def microbatch_bytes(
    config: PretrainedConfig, dtype: torch.dtype, rows: int, length: int, recomputed: bool, context_ranks: int = 1
) -> int | None:
    """The most bytes that activations, logits and gradients take at once in the forward and
    backward pass of a microbatch, on one of the ranks that share its rows: both passes are run on
    shapes. None where the family's code needs values. A gradient counts until it is complete, as it
    is reduced at once.
    """
    try:
        with FakeTensorMode():
            context = ShapesOfGroup(None, context_ranks, 0) if context_ranks > 1 else None
            # a copy: how attention is computed is written into it
            policy = PolicyModel(
                AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval(), context=context
            )
            if context:
                use_context_group(policy.lm, context)
            for layer in layers_of(policy.lm) if recomputed else []:
                recompute(layer)
            for parameter in policy.parameters():
                parameter.register_post_accumulate_grad_hook(lambda whole: setattr(whole, "grad", None))
            row = torch.zeros((rows, length), dtype=torch.long)
            with LiveBytes([*policy.parameters(), *policy.buffers()]) as live:
                logprobs_N, _ = policy(row, row, row.flatten(), row.flatten(), 1.0, entropy_trained=False)
                logprobs_N.sum().backward()
            assert live.most > 0, "a pass that makes no tensor"
            return live.most
    except (*NEEDS_VALUES, NotImplementedError):  # flex_attention has no backward pass on a CPU
        return None


if __name__ == "__main__":
    serve(partial(load, trial=size_model))
