"""Problems for the calculator agent, and conversations that show a new model both ways to answer
them: those of the environment `calculator`, with the tool called as OpenAI's clients know it.

user       Calculate 37*4 with <tool_call>{"name": "calculator", "arguments":
           {"expression": "a*b"}}</tool_call> or <answer></answer>
assistant  <tool_call>{"name": "calculator", "arguments": {"expression": "37*4"}}</tool_call>
tool       148
assistant  <answer>148</answer>
"""

from __future__ import annotations

import json
import re
from typing import Any

from rlpipe.extras.environments import calculator

CALL = re.compile("<tool>(.*?)</tool>")


def problems(seed: int, rows_max: int, low: int = 10, high: int = 999) -> list[dict[str, str]]:
    """Products of two numbers from `low` to `high`: rows with prompt and
    answer, for rl and evaluation."""
    return [row | {"prompt": _in_json(row["prompt"])} for row in calculator.problems(seed, rows_max, low, high)]


def demonstrations(
    seed: int, rows_max: int, tool_share: float = 0.35, low: int = 10, high: int = 999
) -> list[dict[str, list[Any]]]:
    """Conversations for SFT: a share of them uses the calculator, the others answer at once."""
    rows = calculator.demonstrations(seed, rows_max, tool_share, low, high)
    return [
        {"messages": [message | {"content": _in_json(message["content"])} for message in row["messages"]]}
        for row in rows
    ]


def _in_json(text: str) -> str:
    def call(match: re.Match[str]) -> str:
        return (
            f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': match[1] or 'a*b'}})}"
            "</tool_call>"
        )

    return CALL.sub(call, text)
