"""A trial of a model that counts its sizes on its shapes, and times it
(`python -m rlpipe.extras.plan.trial`).

First line in: as of `rlpipe/checks/trial.py`, with "training": {"dtype", "tokens_max",
"activation_checkpointing", "context_ranks"} and, on a CPU, "timed": see `measured_speed`; out: the
fields of a SizedModel or {"error"}.
"""

from __future__ import annotations

import copy
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlpipe.base.values import JsonDict, size_text
from rlpipe.checks.trial import NEEDS_VALUES, ModelTrial, config_of, load, try_model
from rlpipe.extras.plan.sizes import ModelSizes, SizedModel, Speed
from rlpipe.models.amx import has_amx
from rlpipe.models.causal import MODEL_FAULTS, empty_model
from rlpipe.models.context_parallel import ContextGroup, use_context_group
from rlpipe.processes.user_code import serve
from rlpipe.trainer.model import PolicyModel, layers_of, recompute

# of the two models that are timed: what a layer takes is half of what they differ by
LAYERS = (1, 3)
BYTES_MAX = 4 << 30  # of the larger one's weights and gradients
TIMED = 3  # passes, after one that is not counted
ENOUGH_S = 2.0  # of one kind of pass
FLOPS = 2e11  # of a forward and backward pass that is timed, about: seconds on any processor


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


def measured_speed(config: PretrainedConfig, dtype: torch.dtype, length: int, timing: Mapping[str, int]) -> Speed | str:
    """The seconds of passes of the whole model, extrapolated from models with a few of its layers;
    the reason as text where even those are too large to try.

    `length`: tokens of a row of a microbatch. `timing`: `tokens_max` of a microbatch and `threads`
    that train, `places` of an engine and its `engine_threads`.
    """
    layers = config.get_text_config().num_hidden_layers
    few, more = (min(count, layers) for count in LAYERS)
    largest = _first_layers(config, more)
    size = 2 * 4 * sum(parameter.numel() for parameter in empty_model(largest).parameters())
    if size > BYTES_MAX:
        return f"a model of its first {more} layers would take {size_text(size)}, and is too large to be timed here"
    started, computed = time.perf_counter(), time.thread_time()
    small, large = (_passes(_first_layers(config, count), dtype, length, timing) for count in (few, more))
    bfloat16 = _passes(largest, torch.bfloat16, length, timing)[0] if dtype == torch.float32 and has_amx() else 0.0
    share = (time.thread_time() - computed) / (time.perf_counter() - started)
    steps = (layers - more) / (more - few) if more > few else 0.0
    train, forward, decode = (big + steps * max(0.0, big - little) for little, big in zip(small, large, strict=True))
    return Speed(train, forward, decode, min(1.0, share), large[0] / bfloat16 if bfloat16 else 0.0)


def _first_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The config of the same model with its first layers only."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:  # it has an entry for each layer
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return shorter


def _passes(
    config: PretrainedConfig, dtype: torch.dtype, length: int, timing: Mapping[str, int]
) -> tuple[float, float, float]:
    """The seconds of a forward and backward pass of a microbatch, of a forward pass alone, and of
    one token for each place of an engine.
    """
    torch.set_num_threads(timing["threads"])
    lm: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    policy, affordable = PolicyModel(lm), int(FLOPS / (6 * sum(parameter.numel() for parameter in lm.parameters())))
    tokens = max(1, min(timing["tokens_max"], affordable))
    length = min(length, tokens)
    rows = tokens // length
    tokens_RL = torch.randint(lm.config.get_text_config().vocab_size, (rows, length))
    positions_RL = torch.arange(length).expand(rows, length)
    source_N, target_N = torch.arange(rows * length), tokens_RL.flatten()

    def forward() -> torch.Tensor:
        return policy(tokens_RL, positions_RL, source_N, target_N, 1.0, entropy_trained=False)[0].sum()

    def train() -> None:
        forward().backward()
        policy.zero_grad()

    def decode() -> None:
        lm(input_ids=tokens_P1, use_cache=True, logits_to_keep=1)

    trained, passed = _seconds(train), _seconds(torch.inference_mode()(forward))
    torch.set_num_threads(timing["engine_threads"])
    tokens_P1 = torch.zeros((timing["places"], 1), dtype=torch.long)
    scale = timing["tokens_max"] / (rows * length)
    return scale * trained, scale * passed, _seconds(torch.inference_mode()(decode))


def _seconds(call: Callable[[], object]) -> float:
    """The median of a few calls without the first, which warms up; the first one's where that alone
    took long.
    """
    taken: list[float] = []
    while len(taken) <= TIMED and sum(taken) < ENOUGH_S:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:] or taken)


if __name__ == "__main__":
    serve(partial(load, trial=size_model))
