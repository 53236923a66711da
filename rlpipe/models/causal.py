"""Runs a causal language model of transformers by its own code: it finds the beginnings of
sequences from positions, and makes its masks, windows and scales itself.

Legend: R rows, L tokens of a row, N positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict, Metrics
from rlpipe.models.masks import AttentionMask

# the errors that a family's code raises for unsupported inputs
MODEL_FAULTS = (
    RuntimeError,
    ArithmeticError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    AssertionError,
)
WINDOWS = ("sliding_window", "attention_chunk_size")
OWN_WINDOW = re.compile("(window|chunk|block)(?!_layers|.*pattern)")
WINDOW_TESTED = 8
# layers, experts and heads cost time and memory already while a model is built; no real model has
# so many
COUNT, COUNT_MAX = re.compile(r"(\w+_)?(n|num)_(\w+_)?(layers?|experts|heads?)|(\w+_)?layers|depth"), 2048
PROBE_TOKENS = 32  # the number of tokens that are scored


def hf_config(value: JsonDict) -> PretrainedConfig:
    """A model's config from its JSON. UserError when it names an unknown architecture, more layers,
    experts or heads than any model has, or quantized weights.
    """
    # the attention implementation is chosen here, not by the folder
    value = {key: entry for key, entry in value.items() if key not in ("transformers_version", "attn_implementation")}
    _check_counts(value)
    try:
        config = AutoConfig.for_model(**PretrainedConfig._decode_special_floats(value))
        text = config.get_text_config()
    except (*MODEL_FAULTS, StrictDataclassError) as error:
        raise UserError(
            f"model config: model_type={value.get('model_type')!r} is not a known architecture ({error!s:.300})"
        ) from error
    if any(getattr(part, "quantization_config", None) for part in (config, text)):
        raise UserError(
            "model config: its weights are quantized (quantization_config); RL and SFT train a copy in bf16 or fp32"
        )
    return config


def _check_counts(value: dict[str, Any]) -> None:
    for name, entry in value.items():
        if isinstance(entry, dict):
            _check_counts(entry)
        elif isinstance(entry, int) and entry > COUNT_MAX and COUNT.fullmatch(name):
            raise UserError(f"model config: {name}={entry!s:.40} is more than any model has ({COUNT_MAX:,} at most)")


def empty_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The model without weights, on the meta device, in eval mode.

    UserError naming a family that is not a causal language model.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except MODEL_FAULTS as error:
        raise UserError(
            f"model config: {config.model_type} cannot be built as a causal language model ({error!s:.300})"
        ) from error


def hidden_states(lm: Any, tokens_RL: Tensor, positions_RL: Tensor, mask: AttentionMask | None = None) -> Tensor:
    """The hidden states that `lm` passes to its head, R x L x H. UserError when a mask is given and
    the model takes none.

    Without a mask a sequence begins at each position that is not the previous one plus 1.
    """
    base = base_of(lm)
    given: dict[str, Any] = {"position_ids": positions_RL, "use_cache": False}
    if mask is not None:
        if not (takes(base, "attention_mask") and takes(base, "position_ids")):
            raise UserError(
                f"model config: {lm.config.model_type} has a forward pass without attention_mask and position_ids,"
                " which rlpipe needs; use another model"
            )
        given["attention_mask"] = mask
    return base(
        input_ids=tokens_RL, **{name: value for name, value in given.items() if takes(base, name)}
    ).last_hidden_state


def base_of(lm: Any) -> Any:
    """The module that maps tokens to hidden states. UserError naming a family that has none."""
    base = lm.base_model if lm.base_model is not lm else getattr(lm, "model", None)
    if not any(module is base for module in lm.children()):
        raise UserError(
            f"model config: {lm.config.model_type} has no base model below its output layer, and cannot be trained"
            " here; use another model"
        )
    return base


def takes(module: nn.Module, name: str) -> bool:
    """True when a module's forward has an argument of that name, or **kwargs."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


class _Outputs(BaseModelOutputWithPast):
    """Outputs of a base model with hidden states alone: all else that a model's forward reads
    (router logits, states) is None.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    """Takes the place of the base model, and returns its input as the hidden states."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._base = [base]  # in a list, so that torch does not register it as a submodule

    def __getattr__(self, name: str) -> Any:
        if name == "decoder":  # for families that can also have an encoder
            return self
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)

    def forward(self, *arguments: Any, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> _Outputs:
        given = [value for value in (inputs_embeds, input_ids, *arguments) if value is not None]
        return _Outputs(last_hidden_state=given[0])


def head_of(lm: Any) -> Callable[[Tensor], Tensor]:
    """Returns the function from hidden states [N, H] to logits [N, V] as `lm` itself computes them,
    with its scaling, soft-capping and all else around its lm_head.

    It is `lm` with another base module: the parameters are shared with `lm`.
    """
    head = copy.copy(lm)
    base = base_of(lm)
    head._modules = {name: _Given(base) if module is base else module for name, module in lm._modules.items()}
    argument = "inputs_embeds" if takes(head, "inputs_embeds") else "input_ids"
    return lambda hidden_NH: head(**{argument: hidden_NH[None]}).logits[0]


def expert_layers(lm: Any) -> list[Any]:
    """The modules that compute all experts in one call with (hidden states, the chosen K, their
    weights), found by the attributes that transformers sets on each of them.
    """
    return [
        module for module in lm.modules() if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed")
    ]


class ExpertUse:
    """Counts the tokens that are routed to each expert, per layer with experts, summed over forward
    passes. Legend: N tokens, E experts, K chosen for a token.
    """

    def __init__(self, lm: Any) -> None:
        self._layers = expert_layers(lm)
        self._places_N: Tensor | None = None
        for index, module in enumerate(self._layers):
            module.register_forward_pre_hook(functools.partial(self._count, index))
        self.forget()

    def forget(self) -> None:
        # tokens of each expert, tokens of none; entropy; all tokens
        self._sums = [torch.zeros(module.num_experts + 3) for module in self._layers]

    @contextlib.contextmanager
    def counting(self, places_N: Tensor) -> Iterator[None]:
        """Counts the tokens at these flat positions of the batch in a forward pass within the body,
        but not when it is recomputed in the backward pass.
        """
        self._places_N = places_N
        try:
            yield
        finally:
            self._places_N = None

    @torch.no_grad()
    def _count(self, index: int, _module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if self._places_N is None:
            return
        chosen_NK, weights_NK = (tensor.flatten(0, -2).index_select(0, self._places_N) for tensor in arguments[1:3])
        sums = self._sums[index] = self._sums[index].to(chosen_NK.device)
        sums.scatter_add_(0, chosen_NK.flatten(), torch.ones_like(chosen_NK, dtype=sums.dtype).flatten())
        sums[-2] += torch.special.entr(weights_NK.float() / weights_NK.float().sum(-1, keepdim=True)).sum()
        sums[-1] += len(chosen_NK)

    def metrics(self, add: Callable[[Tensor], Tensor]) -> Metrics:
        """The means over layers; empty for a model without experts.

        `add`: sums a float64 host tensor over ranks.

        `expert_load_max`: tokens of the busiest expert divided by the mean over experts; 1 when
        even. `experts_unused`: the share of experts without a token. `router_entropy`: the entropy,
        in nats, of a token's weights of its chosen experts.
        """
        sums = [add(sums.double().cpu()) for sums in self._sums]
        tokens = [layer[:-3] for layer in sums]
        named = {
            "expert_load_max": [layer.max() / layer.mean() for layer in tokens],
            "experts_unused": [(layer == 0).double().mean() for layer in tokens],
            "router_entropy": [layer[-2] / layer[-1] for layer in sums],
        }
        counted = bool(sums) and all(layer[-1] > 0 for layer in sums)
        return {f"train/{name}": float(torch.stack(values).mean()) for name, values in named.items()} if counted else {}


def restore_buffers(lm: Any) -> None:
    """Computes the buffers that no file has (rotary frequencies, for example), after the model was
    built on the meta device and before its weights are loaded.

    UserError naming a buffer that the family's code makes only in its constructor.
    """
    saved = lm.state_dict().keys()
    unsaved = {name: buffer for name, buffer in lm.named_buffers() if name not in saved}
    for buffer in unsaved.values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for tensor in (*lm.parameters(), *(buffer for name, buffer in lm.named_buffers() if name in saved)):
        tensor._is_hf_initialized = True  # transformers does not initialise such tensors again
    # other modules have no such buffer, and their code may fail on sharded parameters
    for prefix, module in lm.named_modules():
        module._is_hf_initialized = not any(name in unsaved for name, _ in module.named_buffers(prefix))
    lm.initialize_weights()
    lost = [
        name
        for name, buffer in lm.named_buffers()
        if name in unsaved and buffer.is_floating_point() and buffer.isnan().any()
    ]
    if lost:
        raise UserError(
            f"model config: {lm.config.model_type} cannot be loaded here: its code does not compute its buffers"
            f" {', '.join(lost[:3])}, which are not stored with the weights"
        )


def other_windows(config: PretrainedConfig) -> list[str]:
    """The config fields that limit attention by their names, but are not in WINDOWS: a family's own
    code reads them, and may count places in a row instead of positions.
    """
    values = config.get_text_config().to_dict()
    return [
        name
        for name, value in values.items()
        if name not in WINDOWS and OWN_WINDOW.search(name) and type(value) is int and value
    ]


@contextlib.contextmanager
def small_windows(config: PretrainedConfig) -> Iterator[None]:
    """Sets all attention windows to WINDOW_TESTED tokens within the body, so that short sequences
    exceed them.

    It is enough to change the config: masks are made from it at every forward pass.
    """
    text = config.get_text_config()
    before = {
        name: value for name in WINDOWS if isinstance(value := getattr(text, name, None), int) and value > WINDOW_TESTED
    }
    try:
        for name in before:
            setattr(text, name, WINDOW_TESTED)
        yield
    finally:
        for name, value in before.items():
            setattr(text, name, value)


def probe_tokens(config: PretrainedConfig, tokens_max: int) -> list[int]:
    """A fixed pseudorandom text, so that many embeddings are used. Its last PROBE_TOKENS tokens are
    beyond the model's smallest window, if `tokens_max` allows a text of that length.
    """
    text = config.get_text_config()
    windows = [value for name in WINDOWS if isinstance(value := getattr(text, name, None), int)]
    beyond = PROBE_TOKENS + min(windows, default=0)
    length = beyond if beyond <= tokens_max else min(PROBE_TOKENS, tokens_max)
    digests = (hashlib.sha256(index.to_bytes(1 + (index > 255), "big")).digest() for index in range(length))
    return [int.from_bytes(digest[:4], "big") % text.vocab_size for digest in digests]
