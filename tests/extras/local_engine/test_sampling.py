"""The sampler and what surrounds it, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rlpipe.config.operational import LOCAL_THREADS
from rlpipe.extras.local_engine.model import SLOTS_MAX, SLOTS_MIN, PrefixBlock, slot_count
from rlpipe.extras.local_engine.protocol import ModelLimits
from rlpipe.extras.local_engine.scheduler import PREFIX_BYTES_MAX, PrefixStore
from rlpipe.extras.local_engine.server import Routes, app
from rlpipe.extras.local_engine.slots import no_settings, sample, uniforms
from rlpipe.processes.launch import free_port

SLOTS, VOCAB = 4096, 64


def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    seeds, index = np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64)
    by_seed, by_index = uniforms(seeds, index), uniforms(index, seeds)
    for values in (by_seed, by_index):
        assert values.min() >= 0 and values.max() < 1
        histogram = np.histogram(values, bins=20, range=(0, 1))[0]
        # chi-squared, 19 degrees of freedom, p = 0.0007
        assert ((histogram - 1000) ** 2 / 1000).sum() < 45
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert uniforms(seeds[77:78], index[:1])[0] == by_seed[77]


def test_sampling_follows_the_scaled_distribution_and_reports_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCAB).repeat(SLOTS, 1) * 2
    how = no_settings(SLOTS)
    how["temperature"] = 1.7
    tokens, logprobs = sample(
        logits, how, uniforms(np.arange(SLOTS, dtype=np.uint64), np.zeros(SLOTS, dtype=np.uint64))
    )
    expected = torch.log_softmax(logits[0].double() / 1.7, -1)
    np.testing.assert_allclose(logprobs, expected.numpy()[tokens], atol=1e-12)
    counts = np.bincount(tokens, minlength=VOCAB)
    np.testing.assert_allclose(counts / SLOTS, expected.exp().numpy(), atol=0.03)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, VOCAB), st.floats(0.01, 1.0), st.floats(0.2, 3.0))
def test_only_kept_tokens_are_drawn_and_logprobs_are_not_renormalised(
    top_k: int, top_p: float, temperature: float
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(top_k)).repeat(64, 1)
    how = no_settings(64)
    how["temperature"], how["top_p"], how["top_k"] = temperature, top_p, top_k
    tokens, logprobs = sample(logits, how, np.linspace(0, 1 - 2**-52, 64))
    probs = torch.softmax(logits[0].double() / temperature, -1).numpy()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    kept = order[: max(1, min(top_k, int((before <= top_p).sum())))]
    assert set(tokens) <= set(kept)
    np.testing.assert_allclose(np.exp(logprobs), probs[tokens], rtol=1e-9)


def test_a_neighbour_with_top_p_changes_no_bit() -> None:
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(1))
    how, mixed = no_settings(16), no_settings(16)
    mixed["top_p"][3], mixed["top_k"][5] = 0.3, 2
    uniform = np.linspace(0, 0.999, 16)
    (tokens, logprobs), (others, other_logprobs) = sample(logits, how, uniform), sample(logits, mixed, uniform)
    same = [row for row in range(16) if row not in (3, 5)]
    assert (tokens[same] == others[same]).all() and (logprobs[same] == other_logprobs[same]).all()


def test_slots_divide_evenly_among_threads() -> None:
    for bucket in range(64, 40_000, 64):
        slots = slot_count(bucket)
        assert SLOTS_MIN <= slots <= SLOTS_MAX and all(slots % threads == 0 for threads in LOCAL_THREADS)


def test_no_more_slots_than_requests_come_at_once() -> None:
    wanted = {1: 16, 16: 16, 17: 32, 64: 64, 100: 128, 5000: 128}
    assert {requests_max: slot_count(128, requests_max) for requests_max in wanted} == wanted
    assert slot_count(1024, 5000) == slot_count(1024) == 32


def test_a_row_has_the_same_bits_in_a_batch_of_any_size() -> None:
    logits = torch.randn(64, 640, generator=torch.Generator().manual_seed(2)) * 3
    uniform = np.linspace(0, 0.999, 64)
    tokens, logprobs = sample(logits, no_settings(64), uniform)
    for first in (0, 16, 48):
        some, their_logprobs = sample(logits[first : first + 16], no_settings(16), uniform[first : first + 16])
        assert (tokens[first : first + 16] == some).all() and (logprobs[first : first + 16] == their_logprobs).all()


def test_the_prefix_store_is_bounded() -> None:
    store = PrefixStore()
    big = PREFIX_BYTES_MAX // 4 // 3
    for index in range(10):
        store.add(PrefixBlock([(index, 0), (index, 1)], torch.empty(1, 2, 1, 1, big, 1), torch.empty(2, big)))
    kept = [index for index in range(10) if store.get((index, 1))]
    assert 0 < len(kept) < 3 and kept[-1] == 9 and store.get((9, 0)) and not store.get((0, 0))


def test_keys() -> None:
    scheduler: Any = SimpleNamespace(model=SimpleNamespace(folder="/a/model"))
    limits = ModelLimits(VOCAB, 512, ())
    both, one, none = (Routes(scheduler, limits, *keys) for keys in (("api", "admin"), ("api", ""), ("", "")))
    assert len(both.control) == 8
    for path in both.control:
        assert both.key_wanted(path) == "admin" and one.key_wanted(path) == "api"
    assert (
        both.key_wanted("/generate") == "api"
        and both.key_wanted("/health") == ""
        and none.key_wanted("/generate") == ""
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("threads", "3"), ("context_tokens_max", "0"), ("requests_max", "0"), ("device", "tpu"), ("port", "0")],
)
def test_bad_options_name_the_field(option: str, value: str) -> None:
    outcome = CliRunner().invoke(
        app, ["--model-path", "/no/model", "--port", str(free_port()), f"--{option.replace('_', '-')}", value]
    )
    assert outcome.exit_code == 2 and option in outcome.output and value in outcome.output
