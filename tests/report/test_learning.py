"""The presets learn what they say, from nothing: `make learning`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.store.opening import open_existing
from tests.paths import ROOT
from tests.pipeline import Folder

pytestmark = pytest.mark.learning
# preset: {metric of the evaluation: (at most before RL, at least after it, least rise)}
LEARNS = {
    "tiny": {
        "words_pass_at_1": (0.8, 0.85, 0.15),
        "words_greedy": (1.0, 0.85, 0.0),
        "words_format_rate": (1.0, 0.97, -0.03),
    },
    "calculator": {
        "products_environment_tool_used_mean": (0.5, 0.8, 0.3),
        "products_pass_at_1": (0.5, 0.6, 0.2),
        "products_greedy": (0.5, 0.6, 0.2),
    },
    "agent": {
        "products_environment_tool_used_mean": (0.5, 0.8, 0.3),
        "products_pass_at_1": (0.4, 0.8, 0.4),
        "products_greedy": (0.5, 0.8, 0.3),
    },
    "palindromes": {"letters_pass_at_1": (0.6, 0.6, 0.2), "letters_format_rate": (1.0, 0.97, -0.02)},
    "sums": {"sums_pass_at_1": (0.5, 0.55, 0.2), "sums_greedy": (0.8, 0.75, 0.1)},
}


@pytest.mark.parametrize("preset", LEARNS)
def test_a_preset_learns_and_shows_it(preset: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store", {"PYTHONPATH": str(ROOT)})  # examples/ is there
    output = folder.complete("a", preset=preset)
    num_iterations = open_existing(folder.open_store(), "a").config.rl.num_iterations
    before, after = folder.evaluation("a", 0), folder.evaluation("a", num_iterations)
    for name, (most, least, rise) in LEARNS[preset].items():
        assert before[name] <= most and after[name] >= least and after[name] - before[name] >= rise, (
            name,
            before,
            after,
        )
        assert name in output
    assert (tmp_path / "a-curves.png").stat().st_size > 10_000
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
