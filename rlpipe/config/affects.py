"""Marks of config fields, beside their types: `num_prompts: Annotated[int, "prompts", ...]`.

A mark is "operational" (may change between two starts), "plan" (fixed for a run, but in no
settings: which artifacts there are, or what their inputs are), or the kind of an artifact that the
field affects, as in "rollouts if over-sampled" with a condition of settings.py. The policy is that
of the field's own section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
ENDS_ROUND = "rollouts if over-sampled"
Operational = Annotated[T, "operational"]
Draws = Annotated[T, "prompts"]
Trains = Annotated[T, "policy"]


@dataclass(frozen=True)
class Added:
    """The mark of a field that newer versions added. A stored config lacks it where it has the
    value `before`, which older runs used, or where it lacks the field `beside`.
    """

    before: Any = None
    beside: str = ""
