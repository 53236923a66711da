"""JSON values, paths and sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.base.errors import UserError

JsonDict = dict[str, Any]
Metrics = dict[str, float]


def plain_json(value: Any) -> Any:
    """Converts a value to strict JSON: keys become strings, tuples and sets lists, NaN and
    infinities null, any other type its text.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain_json(entry) for entry in value), key=repr)
    return str(value)


def json_object(text: bytes | bytearray) -> JsonDict | None:
    """Parses the JSON object in an untrusted text; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: too many nested brackets
        return None
    return value if isinstance(value, dict) else None


def expanded(path: str) -> Path:
    """A path with `~` and `~USER` expanded, as in a shell. UserError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{path!r:.200}: there is no home folder of {path.split('/', 1)[0][:80]!r}; write the whole path"
        ) from error


def size_text(num_bytes: float) -> str:
    """Formats a number of bytes for people. Example: 1.61 GB."""
    return f"{num_bytes / 10**9:,.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 10**6:,.1f} MB"


def powers_of_two(largest: int) -> list[int]:
    """The powers of two from 1 up to `largest`. Example: 6 -> [1, 2, 4]."""
    return [2**power for power in range(largest.bit_length())]
