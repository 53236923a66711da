"""The learning rate as a function of the step, and jobs that are refused before any work."""

from __future__ import annotations

import json
import math
import re

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.training import OptimizerConfig
from rlpipe.trainer.jobs import job_of
from rlpipe.trainer.step import learning_rate
from tests.trainer_world import load_new, train


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


def refusal(kind: str, body: JsonDict) -> str:
    with pytest.raises(UserError) as refused:
        job_of(kind, json.dumps(body).encode())
    return str(refused.value)


def test_a_job_that_makes_no_sense_names_the_field() -> None:
    data = ArtifactRef("runs/a/rl/00000/batch", "0" * 64)
    rl, sft = train("a", "b", "rl", data), train("a", "b", "sft", data)
    load = load_new()
    assert job_of("train", json.dumps(rl).encode()) == job_of("train", json.dumps(rl, sort_keys=True).encode())
    assert re.search(
        r"settings\.objective='trpo': .*'ppo', 'gspo', 'cispo', 'sapo', 'dppo' or 'reinforce'$",
        refusal("train", train("a", "b", "rl", data, {"objective": "trpo"})),
    )
    without = {name: value for name, value in rl.items() if name != "first_step"}
    assert re.search(r"^train: rl\.first_step=.*: Field required$", refusal("train", without))
    betas = {**rl, "settings": {**rl["settings"], "betas": []}}
    assert refusal("train", betas) == "train: rl.settings.betas=[]: Extra inputs are not permitted"
    assert re.search(r"first_step=-1: ", refusal("train", {**rl, "first_step": -1}))
    assert re.search(r"num_steps=-1: ", refusal("train", train("a", "b", "sft", data, {"num_steps": -1})))
    assert "'rl', 'sft'" in refusal("train", {**sft, "kind": "dpo"})
    assert "reference=None: Unexpected" in refusal("train", {**sft, "reference": None})
    assert "is not a reference to an artifact" in refusal(
        "train", {**rl, "data": {"folder": "../x", "sha256": "0" * 64}}
    )
    assert "settings.kl=loss needs a reference" in refusal(
        "train", train("a", "b", "rl", data, {"kl": "loss", "kl_coef": 0.1})
    )
    assert "exactly one of new, policy and state" in refusal("load", {**load, "state": data.as_json()})
    assert "exactly one of new, policy and state" in refusal("load", {**load, "new": None})
    assert re.search(
        r"policy=.*: Field required$", refusal("load", {"position": "a", "new": load["new"], "state": None})
    )
    for body in ("[" * 100_000, "{", "null", "[]"):
        with pytest.raises(UserError, match="save: "):
            job_of("save", body.encode())
