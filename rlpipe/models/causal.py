"""A causal language model of transformers, run by its own code: positions tell it where sequences
begin, and it makes its masks, windows and scales itself.

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

# what the code of a family raises at what it does not support
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
# layers, experts and heads cost time and memory before a model is built; no model has so many
COUNT, COUNT_MAX = re.compile(r"(\w+_)?(n|num)_(\w+_)?(layers?|experts|heads?)|(\w+_)?layers|depth"), 2048
PROBE_TOKENS = 32  # that are scored


def hf_config(value: JsonDict) -> PretrainedConfig:
    """A model's config from its JSON; UserError when it names no architecture that is known, more
    parts than any has, or quantized weights.
    """
    # how attention is computed is this machine's choice, not the folder's
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

    UserError naming a family that is no causal language model.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except MODEL_FAULTS as error:
        raise UserError(
            f"model config: {config.model_type} cannot be built as a causal language model ({error!s:.300})"
        ) from error


def hidden_states(lm: Any, tokens_RL: Tensor, positions_RL: Tensor, mask: AttentionMask | None = None) -> Tensor:
    """The hidden states that `lm` hands to its head, R x L x H. UserError when there is a mask and
    the model takes none.

    Without a mask a sequence begins wherever a position is not the one before plus 1.
    """
    base = base_of(lm)
    given: dict[str, Any] = {"position_ids": positions_RL, "use_cache": False}
    if mask is not None:
        if not (takes(base, "attention_mask") and takes(base, "position_ids")):
            raise UserError(f"model config: {lm.config.model_type} takes no mask and positions")
        given["attention_mask"] = mask
    return base(
        input_ids=tokens_RL, **{name: value for name, value in given.items() if takes(base, name)}
    ).last_hidden_state


def base_of(lm: Any) -> Any:
    """The module between tokens and hidden states. UserError naming a family that has none."""
    base = lm.base_model if lm.base_model is not lm else getattr(lm, "model", None)
    if not any(module is base for module in lm.children()):
        raise UserError(
            f"model config: {lm.config.model_type} has no base model below its head, and cannot be trained here"
        )
    return base


def takes(module: nn.Module, name: str) -> bool:
    """True when a module's forward has an argument of that name, or takes any name."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


class _Outputs(BaseModelOutputWithPast):
    """Hidden states and nothing else: what a model's own forward asks of its base besides (routers,
    states) is absent.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    """Stands where the base model stands, and hands on what it is given as hidden states."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._base = [base]  # in a list: it is no part of this module

    def __getattr__(self, name: str) -> Any:
        if name == "decoder":  # of models that were made to have an encoder beside
            return self
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)

    def forward(self, *arguments: Any, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> _Outputs:
        given = [value for value in (inputs_embeds, input_ids, *arguments) if value is not None]
        return _Outputs(last_hidden_state=given[0])


def head_of(lm: Any) -> Callable[[Tensor], Tensor]:
    """From hidden states [N, H] to logits [N, V] as `lm` itself makes them: scaled, capped, with
    whatever it does around its lm_head.

    It is `lm` with another base: the parameters are the same ones.
    """
    head = copy.copy(lm)
    base = base_of(lm)
    head._modules = {name: _Given(base) if module is base else module for name, module in lm._modules.items()}
    argument = "inputs_embeds" if takes(head, "inputs_embeds") else "input_ids"
    return lambda hidden_NH: head(**{argument: hidden_NH[None]}).logits[0]


def expert_layers(lm: Any) -> list[Any]:
    """The modules whose experts run in one call: (hidden states, which K, their weights), by what
    transformers sets on every such module.
    """
    return [
        module for module in lm.modules() if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed")
    ]


class ExpertUse:
    """Counts of the tokens that went to each expert, in the layers that have experts, added up over
    forward passes. Legend: N tokens, E experts, K chosen for a token."""

    def __init__(self, lm: Any) -> None:
        self._layers = expert_layers(lm)
        self._places_N: Tensor | None = None
        for index, module in enumerate(self._layers):
            module.register_forward_pre_hook(functools.partial(self._count, index))
        self.forget()

    def forget(self) -> None:
        # tokens of each, of none; entropy; all tokens
        self._sums = [torch.zeros(module.num_experts + 3) for module in self._layers]

    @contextlib.contextmanager
    def counting(self, places_N: Tensor) -> Iterator[None]:
        """The tokens at these flat positions of the batch are counted, in this forward pass and not
        where it is recomputed.
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
        """Means over layers; none for a model without experts.

        `add`: the sum over ranks of float64 on the host.

        `expert_load_max`: tokens of the busiest expert over the mean of all: 1 when even.
        `experts_unused`: the share of experts without a token. `router_entropy`: of the weights
        that a token gives to the experts chosen for it, nats.
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
    """Makes again what is in no file, rotary frequencies for example, and a model on the meta
    device has not; before it gets its weights.

    UserError naming a buffer that the family's code makes nowhere else than where it is built.
    """
    saved = lm.state_dict().keys()
    unsaved = {name: buffer for name, buffer in lm.named_buffers() if name not in saved}
    for buffer in unsaved.values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for tensor in (*lm.parameters(), *(buffer for name, buffer in lm.named_buffers() if name in saved)):
        tensor._is_hf_initialized = True  # transformers leaves such tensors as they are
    for (
        prefix,
        module,
    ) in lm.named_modules():  # others have nothing to make, and may not know parameters that are sharded
        module._is_hf_initialized = not any(name in unsaved for name, _ in module.named_buffers(prefix))
    lm.initialize_weights()
    lost = [
        name
        for name, buffer in lm.named_buffers()
        if name in unsaved and buffer.is_floating_point() and buffer.isnan().any()
    ]
    if lost:
        raise UserError(
            f"model config: {lm.config.model_type} cannot be loaded here: nothing makes its {', '.join(lost[:3])} again"
        )


def other_windows(config: PretrainedConfig) -> list[str]:
    """The config fields that bound attention, to judge by their names, and are none of WINDOWS: a
    family's own code reads them, perhaps to count places in a row."""
    values = config.get_text_config().to_dict()
    return [
        name
        for name, value in values.items()
        if name not in WINDOWS and OWN_WINDOW.search(name) and type(value) is int and value
    ]


@contextlib.contextmanager
def small_windows(config: PretrainedConfig) -> Iterator[None]:
    """Windows of WINDOW_TESTED tokens: short sequences are longer than any.

    Masks are made from the config at every forward pass.
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
    """A fixed text that looks random, so that many embeddings take part: its last PROBE_TOKENS lie
    beyond the smallest window of the model, where a text of `tokens_max` can be so long.
    """
    text = config.get_text_config()
    windows = [value for name in WINDOWS if isinstance(value := getattr(text, name, None), int)]
    beyond = PROBE_TOKENS + min(windows, default=0)
    length = beyond if beyond <= tokens_max else min(PROBE_TOKENS, tokens_max)
    digests = (hashlib.sha256(index.to_bytes(1 + (index > 255), "big")).digest() for index in range(length))
    return [int.from_bytes(digest[:4], "big") % text.vocab_size for digest in digests]
