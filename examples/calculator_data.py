"""Problems for the calculator agent, and conversations that show a new model both ways to answer them.

user       Calculate 37*4 with <tool_call>{"name": "calculator", "arguments": {"expression": "a*b"}}</tool_call> or <answer></answer>
assistant  <tool_call>{"name": "calculator", "arguments": {"expression": "37*4"}}</tool_call>
tool       148
assistant  <answer>148</answer>
"""

from __future__ import annotations

import json
import random
from typing import Any


def problems(seed: int, rows_max: int, low: int = 10, high: int = 999) -> list[dict[str, str]]:
    """Products of two numbers from `low` to `high`: rows with prompt and answer, for rl and evaluation."""
    draw = random.Random(seed)
    pairs = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(rows_max)]
    return [{"prompt": _question(a, b), "answer": str(a * b)} for a, b in pairs]


def demonstrations(
    seed: int, rows_max: int, tool_share: float = 0.35, low: int = 10, high: int = 999
) -> list[dict[str, list[Any]]]:
    """Conversations for SFT: a share of them uses the calculator, the others answer at once."""
    draw = random.Random(seed)
    rows = []
    for _ in range(rows_max):
        a, b = draw.randint(low, high), draw.randint(low, high)
        call = [{"role": "assistant", "content": _call(f"{a}*{b}")}, {"role": "tool", "content": str(a * b)}]
        used = call if draw.random() < tool_share else []
        answer = {"role": "assistant", "content": f"<answer>{a * b}</answer>"}
        rows.append({"messages": [{"role": "user", "content": _question(a, b)}, *used, answer]})
    return rows


def _question(a: int, b: int) -> str:
    return f"Calculate {a}*{b} with {_call('a*b')} or <answer></answer>"


def _call(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
