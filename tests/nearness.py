"""A reward of the runs of tests/why_world.py, in a module of its own: the processes that score
import it, and little else."""

from __future__ import annotations

from rlpipe.algorithms.answers import answer_text
from rlpipe.records.prompt import RewardPrompt


def near(prompt: RewardPrompt, completion: str) -> float:
    """The share of letters at their place."""
    answer, wanted = answer_text(completion), str(prompt["answer"])
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / len(wanted)
