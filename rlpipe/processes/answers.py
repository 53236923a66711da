"""The checks of the numbers with which a user's environment or agent answers."""

from __future__ import annotations

import math
import numbers
from typing import Any

from rlpipe.processes.user_code import InvalidAnswer


def checked_numbers(reward: Any, metrics: Any) -> tuple[float, dict[str, float]]:
    """A reward and metrics as plain JSON has them; InvalidAnswer when one is not a finite number,
    or a metric has no name.
    """
    if not isinstance(metrics, dict) or not all(map(_is_name, metrics)):
        raise InvalidAnswer(f"metrics must be numbers by name (not 'reward'), and are {metrics!r:.200}")
    for name, value in {"reward": reward, **metrics}.items():
        if not _is_finite(value):
            raise InvalidAnswer(f"{name} is {value!r:.200}, and must be a finite number")
    return float(reward), {name: float(value) for name, value in metrics.items()}


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and value.isascii() and value != "reward"
