"""What proves a reload, with answers that are played: tolerances of models with and without
experts, and old weights in place of new ones."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.model import ModelConfig
from rlpipe.engines.proof import ProbeAnswer, has_experts, off, stale
from rlpipe.engines.weights import Probe, same_weights

TOKENS = [*range(33)]
BF16 = ModelConfig(dtype="bfloat16")
ROUNDING = 0.05  # of a logprob in bfloat16, as seen of a model of 135M parameters


def proof(expected: list[float], scored: list[float], checksum: str = "") -> ProbeAnswer:
    return ProbeAnswer(2, Probe(TOKENS, expected), scored, checksum)


def rounded(exact: list[float], seeded: random.Random, by: float = ROUNDING) -> list[float]:
    return [logprob + seeded.gauss(0, by) for logprob in exact]


@given(seed=st.integers(0, 2**32), step=st.floats(0, 0.3), quieter=st.floats(0.4, 3))
def test_new_weights_are_never_taken_for_old_ones_and_old_ones_always_are(
    seed: int, step: float, quieter: float
) -> None:
    """Trainer and engine round each in its own way, and anew for other
    weights; a step may be far below that."""
    seeded = random.Random(seed)
    exact = [seeded.uniform(-12, -4) for _ in range(32)]
    moved = rounded(exact, seeded, step)
    before = proof(rounded(exact, seeded), rounded(exact, seeded, quieter * ROUNDING))
    right = proof(rounded(moved, seeded), rounded(moved, seeded, quieter * ROUNDING))
    assert stale(right, before, BF16) == ""
    kept = proof(right.probe.logprobs, before.scored)
    assert "it has the old weights" in stale(kept, before, BF16)


def test_a_checksum_that_stayed_says_it_alone() -> None:
    expected, scored = [-3.0] * 32, [-3.01] * 32
    before, moved = proof(expected, scored, "a"), [-2.5] * 32
    assert "the checksum of version 2" in stale(proof(moved, moved, "a"), before, BF16)
    assert stale(proof(moved, moved, "b"), before, BF16) == ""
    assert "old weights" in stale(proof(moved, scored, "b"), before, BF16), "in memory, and not what answers"
    assert stale(proof(expected, scored, "a"), before, BF16) == "", (
        "the same weights in other files, as the trainer says"
    )
    # where the trainer's answer did not move either, or is of another text, nothing can be said
    assert stale(proof(expected, scored), before, BF16) == ""
    assert stale(ProbeAnswer(3, Probe([*range(1, 34)], moved), scored, ""), before, BF16) == ""
    adapted = ModelConfig(dtype="bfloat16", adapter="lora")
    assert stale(proof(moved, scored), before, adapted) == "", "a small adapter is rounded away when it is merged"
    assert "did not load" in stale(proof(moved, scored, "a"), before, adapted)


@pytest.mark.parametrize(("dtype", "flip"), [("float32", 1.5e-5), ("bfloat16", 0.02)])
def test_a_step_that_rounding_hides_proves_nothing(dtype: Literal["float32", "bfloat16"], flip: float) -> None:
    """Behind learning rates of 1e-9 to 1e-11 right weights were taken for old ones: a restart each,
    and the run's end after some."""
    model, answer = ModelConfig(dtype=dtype), [-3.0] * 32
    before = proof(answer, answer)
    assert stale(proof([*answer[:-1], -3.0 + flip], answer), before, model) == ""
    assert "old weights" in stale(proof([-3.0 + flip] * 32, answer), before, model)


@pytest.mark.parametrize(
    ("dtype", "experts", "distances", "fault"),
    [
        ("bfloat16", False, [0.05] * 32, ""),
        ("bfloat16", False, [0.05] * 28 + [3.0] * 4, "0.419 away from the trainer's, on average (at most 0.3)"),
        # a router chose other experts for four tokens
        ("bfloat16", True, [0.05] * 28 + [3.0] * 4, ""),
        ("bfloat16", True, [0.4] * 15 + [0.2] * 17, ""),
        (
            "bfloat16",
            True,
            [0.76] * 32,
            "0.76 away from the trainer's, the median of them (at most 0.3)",
        ),  # another model
        ("bfloat16", True, [0.05] * 31 + [math.nan], "at most 0.3"),
        ("bfloat16", True, [0.05] * 31 + [math.inf], "at most 0.3"),
        ("float32", True, [1e-6] * 28 + [3.0] * 4, "on average (at most 0.0001)"),
        ("float32", False, [1e-6] * 32, ""),
        ("float32", False, [math.nan] * 32, "nan away"),
    ],
)
def test_how_far_an_answer_may_be_off(dtype: str, experts: bool, distances: list[float], fault: str) -> None:
    answer = proof([-9.0] * 32, [-9.0 + distance for distance in distances])
    told = off(answer, dtype, experts)
    assert fault in told and bool(told) == bool(fault)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, True),
        ({"num_local_experts": 8}, True),
        ({"n_routed_experts": 256}, True),
        ({"moe_num_experts": 64}, True),
        ({"text_config": {"num_local_experts": 16}}, True),
        ({"num_experts": 1}, False),
        ({"text_config": None}, False),
        ({"num_experts": None, "n_routed_experts": 0}, False),
        ({"hidden_size": 64}, False),
    ],
)
def test_a_model_with_experts_is_known_by_its_config(config: dict[str, object], experts: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_experts(tmp_path) is experts


def test_weights_are_the_same_when_all_their_bytes_are(tmp_path: Path) -> None:
    def folder(name: str, **files: bytes) -> Path:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / f"{file}.safetensors").write_bytes(content)
        return tmp_path / name

    long = bytes(9_000_000)
    one = folder("one", a=long, b=b"y")
    assert same_weights(one, one) and same_weights(one, folder("same", a=long, b=b"y"))
    assert not same_weights(one, folder("last", a=long[:-1] + b"1", b=b"y"))
    assert not same_weights(one, folder("shorter", a=long[:-1], b=b"y"))
    assert not same_weights(one, folder("fewer", a=long))
    linked = folder("linked", b=b"y")
    (linked / "a.safetensors").hardlink_to(one / "a.safetensors")
    assert same_weights(one, linked)
