"""The score of a rollout, and the interface of all scorers, as the pool uses it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from pydantic import ConfigDict

from rlpipe.base.errors import PromptFault
from rlpipe.base.printable import printable
from rlpipe.processes.user_code import CodeLacks, CodeRaised, InvalidAnswer, user_code
from rlpipe.records.prompt import Messages, RewardPrompt
from rlpipe.records.rollout import OutcomeFields, Rollout

# of `rl.reward_args`
ARGUMENTS = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)
PART_CHARS_MAX = 200  # of a part's name, which is that of a metric: MLflow takes 250
# failures in a row, with nothing scored in between, after which a reward counts as broken
FAILURES_MAX = 32


class RolloutFacts(TypedDict):
    """The facts about a rollout that a reward gets beside its text."""

    num_tokens: int  # of the completion
    finish_reason: str
    environment: OutcomeFields | None  # its record; None without an environment
    turns: Messages  # who said what after the prompt; the completion alone where that is one turn


def facts_of(rollout: Rollout, turns: Messages) -> RolloutFacts:
    """The facts about a rollout that a reward gets beside its text. `turns`: see
    `rlpipe.records.turns.turns_of`.
    """
    return {
        "num_tokens": len(rollout.completion_tokens),
        "finish_reason": rollout.finish_reason,
        "environment": rollout.environment.as_json() if rollout.environment else None,
        "turns": turns,
    }


def unsampled_facts(completion: str) -> RolloutFacts:
    """The facts of a completion that no engine sampled."""
    return {
        "num_tokens": 0,
        "finish_reason": "stop",
        "environment": None,
        "turns": [{"role": "assistant", "content": completion}],
    }


class Item(TypedDict):
    """A rollout to score, as a process or a service gets it."""

    prompt: RewardPrompt
    completion: str
    rollout: RolloutFacts


@dataclass(frozen=True)
class Score:
    """A rollout's reward and its parts by name, or the reason why there is none.

    Examples: Score(1.0, {"math": 1.0}, None); Score(None, {}, "reward_timeout"). The reasons that
    begin with `reward_` are in rlpipe/config/faults.py, and docs/faults.md says when each comes.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    message: str = field(default="", compare=False)  # of a fault, for the log

    def __post_init__(self) -> None:
        assert (self.reward is None) == (self.reason is not None), self


@dataclass(frozen=True)
class Scored:
    """The answer of a process: one score an item, and a warning for a person; or, where it could
    not score, the error that all items met.
    """

    scores: list[Score] = field(default_factory=list)
    warning: str = ""
    error: str | None = None


def label(name: str) -> str:
    """The name of a reward's parts in metrics: its own name, the function's name of a path, the
    folder of a model."""
    kind, _, rest = name.rpartition(":")
    return rest.rstrip("/").rpartition("/")[2] if kind == "hf" else rest


def gives(reward: str, part: str) -> bool:
    """True when a reward has this part: the parts of a reward with several are named under its own
    label.
    """
    return part == label(reward) or part.startswith(f"{label(reward)}_")


def parts_matrix(rollouts: Sequence[Rollout], rewards: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """The parts of the rewards of R scored rollouts, [R, K], in the order of their names, and the
    weight of each, [K].

    A rollout that has none of them, as it got the number of a fault, has that as if each part gave
    the same; any other part that it lacks is 0.
    """
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    weights_K = np.array([rewards[_owner(rewards, name)] for name in names])
    parts_RK = np.zeros((len(rollouts), len(names)))
    for row, rollout in enumerate(rollouts):
        equal = (rollout.reward or 0.0) / (weights_K.sum() or 1.0)
        parts_RK[row] = [rollout.reward_parts.get(name, 0.0) for name in names] if rollout.reward_parts else equal
    return parts_RK, weights_K


def _owner(rewards: Iterable[str], part: str) -> str:
    """The reward that gave a part; of several whose label the part's name begins with, that with
    the longest.
    """
    return max((reward for reward in rewards if gives(reward, part)), key=lambda reward: len(label(reward)))


def score_of(name: str, value: Any, weight: float) -> Score:
    """The Score of a reward's answer, a number or several by name; InvalidAnswer when it is
    anything else.
    """
    values = _named(name, value) if isinstance(value, dict) else {label(name): value}
    if not values:
        raise InvalidAnswer(f"reward {name!r} gave no part at all")
    try:
        parts = {part: float(number) for part, number in values.items() if isinstance(number, numbers.Real)}
    except OverflowError as error:
        raise InvalidAnswer(f"reward {name!r} gave an integer that no float can hold") from error
    for part, number in values.items():
        if not math.isfinite(parts.get(part, math.nan)):
            raise InvalidAnswer(f"reward {name!r}: {part} is {number!r:.80}, and must be a finite number")
    total = weight * _sum(parts.values())
    if not math.isfinite(total):
        raise InvalidAnswer(f"reward {name!r}: the weighted sum of {parts} is {total}")
    return Score(total, parts)


def _named(reward: str, values: dict[Any, Any]) -> dict[str, Any]:
    """The parts of a reward under their names in metrics: unprintable characters are escaped;
    InvalidAnswer for a name that is too long.
    """
    names = [printable(str(name)).replace("\n", "\\n").replace("\t", "\\t") for name in values]
    if long := [name for name in names if len(name) > PART_CHARS_MAX]:
        raise InvalidAnswer(
            f"reward {reward!r}: the name of a part, {long[0]!r:.60}, has more than {PART_CHARS_MAX} characters"
        )
    return {f"{label(reward)}_{name}": number for name, number in zip(names, values.values(), strict=True)}


def _sum(values: Iterable[float]) -> float:
    """The exact sum, rounded once: the same in any order. Infinite where no float holds it."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def scored(name: str, weight: float, code: Callable[[], Any]) -> Score:
    """The Score of a user's code; a fault when it raises, or returns anything but finite
    numbers.
    """
    try:
        with user_code():
            return score_of(name, code(), weight)
    except InvalidAnswer as error:
        return Score(None, {}, "reward_invalid", str(error))
    except CodeRaised as error:
        is_prompt = isinstance(error.__cause__, PromptFault)
        kind = "unavailable" if isinstance(error, CodeLacks) else "prompt" if is_prompt else "error"
        return Score(None, {}, f"reward_{kind}", f"reward {name!r} raised {error}")


def combined(scores: list[Score]) -> Score:
    """The sum of several scorers' scores of one rollout, in any order, or the first fault among
    them.
    """
    fault = next((score for score in scores if score.reason is not None), None)
    if fault is not None:
        return fault
    total = _sum(score.reward for score in scores if score.reward is not None)
    parts = {name: part for score in scores for name, part in score.parts.items()}
    if not math.isfinite(total):
        return Score(None, {}, "reward_invalid", f"the weighted sum of {parts} is {total}")
    return Score(total, parts)
