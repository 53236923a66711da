"""The worked example: an environment in which the policy may use a calculator, and problems and
demonstrations for it.

user       Calculate 37*4 with <tool></tool> or <answer></answer>
assistant  <tool>37*4</tool>
tool       148
assistant  <answer>148</answer>
"""

from __future__ import annotations

import math
import random
import re

from rlpipe.extras.environments.protocol import Message, Step
from rlpipe.records.prompt import Messages, RewardPrompt

EXPRESSION_CHARS_MAX = 100
TAG = re.compile(r"<(tool|answer)>([^<]*)</\1>")
INTEGER = r"\s*(?:-\s*)?[0-9]+\s*"
PRODUCT = rf"{INTEGER}(?:\*{INTEGER})*"
SUM = re.compile(rf"{PRODUCT}(?:[+-]{PRODUCT})*")


class Calculator:
    """`<tool>EXPRESSION</tool>` is answered with its value or "error"; `<answer>` ends the rollout:
    reward 1 if it is right.
    """

    roles = ("tool",)

    def __init__(self) -> None:
        self._answer = ""
        self._used = False

    def start(self, prompt: RewardPrompt) -> list[Message]:
        """The prompt's own messages."""
        self._answer = str(prompt["answer"]).strip()
        return prompt["messages"]

    def step(self, completion: str) -> Step:
        """Answers the first of several tags; without a tag the rollout is over."""
        match = TAG.search(completion)
        if match is None:
            return Step(done=True)
        if match[1] == "answer":
            return Step(done=True, reward=float(match[2].strip() == self._answer))
        metrics = {"tool_calls": 1.0} | ({} if self._used else {"tool_used": 1.0})
        self._used = True
        try:
            result = str(calculate(match[2]))
        except ValueError:
            result = "error"
        return Step([{"role": "tool", "content": result}], metrics=metrics)


def calculate(expression: str) -> int:
    """The value of integers joined by + - *, * first.

    ValueError for anything else. Example: calculate("2+3*-4") is -10.
    """
    if len(expression) > EXPRESSION_CHARS_MAX or SUM.fullmatch(expression) is None:
        raise ValueError(f"it is no sum of products of integers, or longer than {EXPRESSION_CHARS_MAX} characters")
    terms = re.findall(rf"([+-]?)({PRODUCT})", "".join(expression.split()))
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, factors.split("*"))) for sign, factors in terms)


def problems(seed: int, rows_max: int, low: int = 10, high: int = 999) -> list[dict[str, str]]:
    """Products of two numbers from `low` to `high`: rows with prompt and answer, for rl and
    evaluation.
    """
    draw = random.Random(seed)
    pairs = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(rows_max)]
    return [{"prompt": _question(a, b), "answer": str(a * b)} for a, b in pairs]


def demonstrations(
    seed: int, rows_max: int, tool_share: float = 0.35, low: int = 10, high: int = 999
) -> list[dict[str, Messages]]:
    """Conversations for SFT: a share of them uses the calculator, the others answer at once."""
    draw = random.Random(seed)
    rows = []
    for _ in range(rows_max):
        a, b = draw.randint(low, high), draw.randint(low, high)
        call: Messages = [
            {"role": "assistant", "content": f"<tool>{a}*{b}</tool>"},
            {"role": "tool", "content": str(a * b)},
        ]
        used = call if draw.random() < tool_share else []
        answer = {"role": "assistant", "content": f"<answer>{a * b}</answer>"}
        rows.append({"messages": [{"role": "user", "content": _question(a, b)}, *used, answer]})
    return rows


def _question(a: int, b: int) -> str:
    return f"Calculate {a}*{b} with <tool></tool> or <answer></answer>"
