"""Makes tests/golden/settings.json: the settings of every stage, hashed, as the code of a checkout
gives them for its rows of presets and changes.

usage: PYTHONPATH=CHECKOUT .venv/bin/python scripts/golden.py FILE
    (CHECKOUT: `git worktree add --detach /tmp/old 50331dc`)

The rows are the keys of FILE, which is written again. It imports the checkout's own
tests/declared.py, which knows its stages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import rlpipe.config.source as source
from rlpipe.base.hashing import sha256_of
from tests.declared import RL_KINDS, stage_settings

THEN = [
    "rl.reward_fallback=0.0",
    "evaluation.pass_threshold=1.0",
]  # as in tests/config/test_golden.py, but for fields that are newer
STAGES = [
    *(("base", stage) for stage in ("tokenizer", "policy", "probe", "evaluation")),
    ("data", "data"), ("data", "selection"),
    *(("sft", stage) for stage in ("policy", "state", "evaluation")), *(("rl", stage) for stage in RL_KINDS),
]  # fmt: skip


def main() -> None:
    """Writes the file."""
    file, presets = Path(sys.argv[1]), Path(source.__file__).parents[2] / "flows" / "presets"
    rows: dict[str, dict[str, str]] = {}
    for row in json.loads(file.read_text()):
        preset, *changes = row.split()
        config = source.read_config(preset, [*THEN, *changes], presets)
        rows[row] = {
            f"{phase}/{stage}": sha256_of(stage_settings(config, phase, stage))[:16] for phase, stage in STAGES
        }
    file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
