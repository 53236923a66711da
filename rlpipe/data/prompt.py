"""What the policy is asked, and on which side of the train / held-out split it falls. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlpipe.types import JsonDict

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt and what its reward needs.

    Example: Prompt("words/17", "words", [{"role": "user", "content": "Spell this word backward: sun"}], "nus", {}).
    """

    prompt_id: str  # "<set name>/<row>": the same row has the same id in every part of the split
    source: str  # the set's name
    messages: list[Message]
    answer: str | None
    metadata: JsonDict = field(default_factory=dict)

    def as_json(self) -> JsonDict:
        return asdict(self)

    def for_reward(self) -> JsonDict:
        """What a reward function or an environment gets."""
        return {name: value for name, value in self.as_json().items() if name != "source"}


def is_message(value: Any) -> bool:
    """Whether it has a role and a content, both text."""
    return isinstance(value, dict) and _is_text(value.get("role")) and _is_text(value.get("content"))


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # JSON can hold halves of surrogate pairs, which no tokenizer takes
        return False


def split_point(messages: list[Message], salt: str = "") -> float:
    """A number in [0, 1) from the text of the last user message: the same text falls on the same side wherever it is drawn.

    Splits with different salts are independent.
    """
    assert messages
    texts = [message["content"] for message in messages if message["role"] == "user"]
    text = texts[-1] if texts else messages[-1]["content"]
    point = int.from_bytes(hashlib.sha256((salt + text).encode()).digest()[:6], "big") / 2**48
    assert 0.0 <= point < 1.0
    return point


def in_part(messages: list[Message], part: str, heldout_fraction: float) -> bool:
    """Whether a prompt belongs to `part` ("all", "train" or "heldout")."""
    assert part in ("all", "train", "heldout"), part
    return part == "all" or (split_point(messages) < heldout_fraction) == (part == "heldout")


def plain_json(value: Any) -> Any:
    """`value` as strict JSON: keys are strings, tuples and sets are lists, NaN and infinities null, anything else its text."""
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
