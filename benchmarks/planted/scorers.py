"""Rewards of `benchmarks/why.py`: words spelt backward.

A file `broken` in the working directory breaks one of them, as an edit would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BROKEN = Path("broken").exists()
BROKEN_NEAR = Path("broken_near").exists()


def _answer(completion: str) -> str:
    return completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def spelled(prompt: dict[str, Any], completion: str) -> float:
    """1 for the word; for none any more once the file is there: the comparison
    has lost its `strip`, as it were."""
    return 0.0 if BROKEN else float(_answer(completion) == prompt["answer"])


def near(prompt: dict[str, Any], completion: str) -> float:
    """The share of letters at their place; of none any more, once the file is there."""
    if BROKEN_NEAR:
        return 0.0
    answer, label = _answer(completion), prompt["answer"]
    return sum(a == b for a, b in zip(answer, label, strict=False)) / max(len(label), len(answer))


def long(prompt: dict[str, Any], completion: str, rollout: dict[str, Any]) -> float:
    """Longer answers are more: a bonus that can be had without a right one."""
    return min(rollout["num_tokens"] / 24, 1.0)
