"""Prints what rlpipe, its extras and a cluster need, one requirement a line: the layer of an image
that code changes leave alone."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
optional = project["optional-dependencies"]
wanted = [name for extra in ("view", "queries", "why", "cluster") for name in optional[extra]]
print(*project["dependencies"], *wanted, sep="\n")
