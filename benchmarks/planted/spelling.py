"""The environment of `benchmarks/why.py`: one turn, and a tool that fails for two prompts of five
once there is a file `broken`."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from scorers import spelled  # pyright: ignore[reportMissingImports] (beside this file)

from rlpipe.extras.environments.protocol import Step

BROKEN = Path("broken_tool").exists()


class Spelling:
    """Is asked once, and done."""

    def start(self, prompt: Any) -> list[dict[str, str]]:
        self.prompt = prompt
        return prompt["messages"]

    def step(self, completion: str) -> Step:
        if BROKEN and zlib.crc32(self.prompt["prompt_id"].encode()) % 5 < 2:
            raise ConnectionError("the dictionary does not answer")
        return Step(done=True, reward=spelled(self.prompt, completion))
