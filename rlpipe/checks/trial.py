"""A model's config and its tensors' names, shapes and values, tried without the model in memory
(`python -m rlpipe.checks.trial`) before a run depends on them.

First line in: {"where", "folder" or "config", "context_tokens_max", "context_ranks", "training":
{"dtype", "tokens_max", "activation_checkpointing", "context_ranks"} for a plan, "timed": see
`measured_speed`, "adapter" where one is trained}; out: {"num_parameters", "rows": how sequences are
put into them, "sizes", "speed": what a plan counts with, or why it is not known} or {"error"}.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.checks.plan import ModelSizes
from rlpipe.checks.plan_cost import Speed, TriedModel
from rlpipe.checks.speed import measured_speed
from rlpipe.models.adapter import is_adapter, put_adapter
from rlpipe.models.causal import MODEL_FAULTS, empty_model, hf_config
from rlpipe.models.checkpoint import check_weights
from rlpipe.models.context_parallel import ContextGroup, check_context_group, use_context_group
from rlpipe.models.folder import check_generation_config, folder_config
from rlpipe.models.small import small_config, small_model
from rlpipe.processes.user_code import CodeRaised, Loaded, cause_of, serve, user_code
from rlpipe.store.adapter_files import ADAPTER
from rlpipe.trainer.model import PolicyModel, layers_of, recompute
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.selftest import prove

TOKENS = 8  # of the forward pass on shapes only
# the errors of a family's code that needs values, on tensors that are shapes only
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class PlannedTraining(TypedDict):
    """The settings of training on which the sizes of a plan depend."""

    dtype: str
    tokens_max: int
    activation_checkpointing: bool
    context_ranks: NotRequired[int]


class ModelTrial(TypedDict):
    """The first request: a model, by `folder` or `config`, and which facts of it are wanted."""

    where: str
    folder: NotRequired[str]
    config: NotRequired[dict[str, Any]]
    context_tokens_max: int
    context_ranks: NotRequired[int]
    training: NotRequired[PlannedTraining]
    timed: NotRequired[dict[str, int]]
    adapter: NotRequired[dict[str, Any]]


def try_model(hello: ModelTrial) -> JsonDict:
    """The answer of the process, the fields of a TriedModel. UserError when the config makes no
    model, its parts do not fit, it has too few positions, or its weights are those of another
    model.
    """
    folder, context_tokens_max = Path(hello.get("folder", "")), hello["context_tokens_max"]
    config = hf_config(hello.get("config") or folder_config(folder))
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < context_tokens_max:
        raise UserError(
            f"it has max_position_embeddings={positions}, which is less than"
            f" model.context_tokens_max={context_tokens_max}; lower model.context_tokens_max"
        )
    check_context_group(config, hello.get("context_ranks", 1))
    lm = empty_model(config)
    _try_shapes(config)
    if "folder" in hello:
        check_generation_config(folder)
        check_weights(folder, lm)
    num_parameters, num_adapted = sum(parameter.numel() for parameter in lm.parameters()), 0
    sizes = sizes_of(lm, context_tokens_max, hello["training"]) if "training" in hello else None
    if "adapter" in hello:
        put_adapter(lm, ADAPTER.validate_python(hello["adapter"]))
        num_adapted = sum(parameter.numel() for name, parameter in lm.named_parameters() if is_adapter(name))
    tried = TriedModel(num_parameters, rows_of(config), sizes and replace(sizes, adapter=num_adapted))
    return asdict(replace(tried, speed=_speed_of(config, hello)) if "timed" in hello else tried)


def _speed_of(config: PretrainedConfig, hello: ModelTrial) -> Speed | str:
    """The result of `measured_speed`, or the reason why the first layers alone are no model."""
    assert "training" in hello and "timed" in hello, "a speed is of a training"
    dtype, timing = getattr(torch, hello["training"]["dtype"]), hello["timed"]
    try:
        return measured_speed(config, dtype, min(hello["context_tokens_max"], timing["tokens_max"]), timing)
    except MODEL_FAULTS as error:
        return f"the first layers of family {config.model_type} alone are no model ({error!r:.120})"


def _try_shapes(config: PretrainedConfig) -> None:
    """A forward pass on shapes only.

    An error is the config's fault, unless the family's code needs values.
    """
    try:
        with FakeTensorMode(), torch.inference_mode():
            # bfloat16: the experts' product of other numbers has no shapes-only form
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            row = torch.zeros((1, TOKENS), dtype=torch.long)
            PolicyModel(lm).eval()(row, row, row[0], row[0], 1.0)
    except NEEDS_VALUES:
        return


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


def rows_of(config: PretrainedConfig) -> str:
    """Says how the trainer will put sequences into rows, tried on a small model of the family;
    UserError when the trainer cannot train it.
    """
    try:
        with user_code():  # a family's numbers go together in its own way
            proof = prove(PolicyModel(small_model(small_config(config))), torch.device("cpu"))
            assert proof.is_finite, "small numbers that do not go together"
    except CodeRaised as error:  # its weights are tried when they are loaded
        return f"not tried ({error.__cause__!r:.80})"
    return "packed" if proof.rows(config.model_type, "float32") >= Rows.PACKED else "one sequence a row"


def load(hello: ModelTrial) -> Loaded:
    """Tries the model; returns the answer of the process, and the function for its requests.
    UserError when the model is refused.
    """
    try:
        with user_code():
            answer = try_model(hello)
    except CodeRaised as error:
        raise UserError(f"{hello['where']}: {cause_of(error, 'config.json makes no model that runs')}") from error
    return answer, lambda request: request


if __name__ == "__main__":
    serve(load)
