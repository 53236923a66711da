"""Prints what rlpipe and its extra `cluster` need, one requirement a line: the layer of an image
that code changes leave alone."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["cluster"], sep="\n")
