"""What runs of older code hold is what today's code asks for: `golden/` was made by
commit 50331dc (scripts/golden.py)."""

from __future__ import annotations

import json

import pytest

from rlpipe.base.hashing import sha256_of
from rlpipe.config.source import read_config
from tests.declared import stage_settings
from tests.paths import ROOT

SETTINGS: dict[str, dict[str, str]] = json.loads((ROOT / "tests" / "golden" / "settings.json").read_text())
THEN = [
    "rl.reward_fallback=0.0",
    "evaluation.pass_threshold=1.0",
    "model.control_tokens=as_written",
]  # defaults that have changed


@pytest.mark.parametrize("row", SETTINGS)
def test_the_settings_of_every_stage_are_those_of_older_code(row: str) -> None:
    preset, *changes = row.split()
    config = read_config(preset, [*THEN, *changes], ROOT / "flows" / "presets")
    now = {name: sha256_of(stage_settings(config, *name.split("/")))[:16] for name in SETTINGS[row]}
    assert now == SETTINGS[row]
