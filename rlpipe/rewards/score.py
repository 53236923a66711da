"""What scoring a rollout comes to, and what anything that scores looks like to the pool."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlpipe.types import JsonDict

FAILURES_MAX = 32  # failures in a row, with nothing scored in between, after which a reward counts as broken


@dataclass(frozen=True)
class Score:
    """A rollout's reward and its parts by name, or the reason why there is none.

    Examples: Score(1.0, {"math": 1.0}, None); Score(None, {}, "reward_timeout").
    Reasons: reward_error (raised, or a service refused), reward_timeout, reward_crash (its process died),
    reward_invalid (no finite number), reward_unavailable (a service is down).
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    message: str = field(default="", compare=False)  # of a fault, for the log

    def __post_init__(self) -> None:
        assert (self.reward is None) == (self.reason is not None), self


class Scorer(Protocol):
    """Scores rollouts for one or several of `rl.rewards`. An item is {"prompt": Prompt.as_json(), "completion": str,
    "rollout": facts}."""

    def start(self) -> None:
        """UserError when it cannot."""
        ...

    def score(self, items: list[JsonDict]) -> list[Score]:
        """One Score per item, in order, within bounded time."""
        ...

    def close(self) -> None: ...


class InvalidReward(Exception):
    """A reward answered, but not with finite numbers."""


def label(name: str) -> str:
    """What the parts of a reward are called in metrics: its name, the function's name of a path, the folder of a model."""
    kind, _, rest = name.rpartition(":")
    return rest.rstrip("/").rpartition("/")[2] if kind == "hf" else rest


def score_of(name: str, value: Any, weight: float) -> Score:
    """The Score of what a reward answered, a number or several by name; InvalidReward when it is anything else."""
    values = {f"{label(name)}_{key}": part for key, part in value.items()} if isinstance(value, dict) else {label(name): value}
    if not values:
        raise InvalidReward(f"reward {name!r} gave no part at all")
    try:
        parts = {part: float(number) for part, number in values.items() if isinstance(number, numbers.Real)}
    except OverflowError as error:
        raise InvalidReward(f"reward {name!r} gave an integer that no float can hold") from error
    for part, number in values.items():
        if not math.isfinite(parts.get(part, math.nan)):
            raise InvalidReward(f"reward {name!r}: {part} is {number!r:.80}, and must be a finite number")
    total = weight * math.fsum(parts.values())
    if not math.isfinite(total):
        raise InvalidReward(f"reward {name!r}: the weighted sum of {parts} is {total}")
    return Score(total, parts)


def combined(scores: list[Score]) -> Score:
    """The sum of what several scorers said of one rollout, or the first fault among them."""
    fault = next((score for score in scores if score.reason is not None), None)
    if fault is not None:
        return fault
    total = sum(score.reward for score in scores if score.reward is not None)
    parts = {name: part for score in scores for name, part in score.parts.items()}
    if not math.isfinite(total):
        return Score(None, {}, "reward_invalid", f"the weighted sum of {parts} is {total}")
    return Score(total, parts)
