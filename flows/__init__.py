"""The recipes as Prefect flows, the command line, and the presets."""

from pathlib import Path

PRESETS = Path(__file__).parent / "presets"
