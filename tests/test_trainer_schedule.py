"""The learning rate as a function of the step, and settings that are refused before any work."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from rlpipe.config_training import OptimizerConfig
from rlpipe.trainer.settings import RlSettings, SftSettings, learning_rate
from tests.trainer_world import RL, SFT


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 0.25), ("constant", 3, 1.0), ("constant", 10_000, 1.0),
        ("linear", 4, 1.0), ("linear", 9, 0.5), ("linear", 14, 0.0), ("linear", 99, 0.0),
        ("cosine", 4, 1.0), ("cosine", 9, 0.5), ("cosine", 6, 0.5 * (1 + math.cos(math.pi * 0.2))), ("cosine", 99, 0.0),
    ],
)  # fmt: skip
def test_learning_rate(schedule: str, step: int, expected: float) -> None:
    settings = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=4, decay_steps=14)  # pyright: ignore[reportArgumentType]
    assert learning_rate(settings, step) == pytest.approx(expected, abs=1e-12)


def test_bad_settings_name_the_field() -> None:
    with pytest.raises(ValidationError, match=r"objective\n.*'ppo', 'gspo', 'cispo', 'sapo', 'dppo' or 'reinforce'.*'trpo'"):
        RlSettings.model_validate({**RL, "objective": "trpo"})
    with pytest.raises(ValidationError, match=r"first_step\n  Field required[^\0]*betas\n  Extra inputs"):
        RlSettings.model_validate({**{name: value for name, value in RL.items() if name != "first_step"}, "betas": []})
    with pytest.raises(ValidationError, match=r"num_steps\n.*input_value=-1"):
        SftSettings.model_validate({**SFT, "num_steps": -1})
