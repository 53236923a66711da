"""Measures how fast this machine's processor computes passes of a model, on its first layers,
before there are weights."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlpipe.base.values import size_text
from rlpipe.extras.plan.sizes import Speed
from rlpipe.models.amx import has_amx
from rlpipe.models.causal import empty_model
from rlpipe.trainer.model import PolicyModel

# of the two models that are timed: what a layer takes is half of what they differ by
LAYERS = (1, 3)
BYTES_MAX = 4 << 30  # of the larger one's weights and gradients
TIMED = 3  # passes, after one that is not counted
ENOUGH_S = 2.0  # of one kind of pass
FLOPS = 2e11  # of a forward and backward pass that is timed, about: seconds on any processor


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
