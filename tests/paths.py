"""Where the files of the repository are that tests read."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
PRESETS = ROOT / "flows" / "presets"
