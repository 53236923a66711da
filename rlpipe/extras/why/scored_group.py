"""One group of a run, in the form that suspects read."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Group


@dataclass(frozen=True)
class ScoredGroup:
    """A group of an iteration, all of it scored, with its prompt."""

    iteration: int
    prompt: Prompt
    rollouts: Group
