"""Findings of the suspects of `rlpipe why`. A suspect is a function from the data around an
iteration to its findings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import Shift

SHOWN = 3  # rollouts of a finding


@dataclass(frozen=True)
class WhatIf:
    """The fork that shows the reward without a suspect: `--at at`, with these settings."""

    at: int
    sets: list[str]
    redo: str = ""  # the stage that is redone; empty: the fork samples again
    num_iterations: int = 0  # of a fork that samples: where it ends
    stored: tuple[float, float] | None = (
        None  # the reward without the suspect, before and from it on, where stored parts say it
    )


@dataclass(frozen=True)
class Finding:
    """Something that changed at the iteration, and the part of the reward's change that it
    explains.

    `explains` None: it acts on the policy as a whole, so it explains what the other findings leave.
    A `symptom` may be the consequence of any other finding. A `certain` one is there without doubt;
    its p-value is that of the reward's change.
    """

    suspect: str
    title: str
    shift: Shift
    explains: float | None
    evidence: list[str]
    rows: list[int]  # rollouts to look at, by their place
    symptom: bool = False
    certain: bool = False
    proof: WhatIf | None = None


Findings: TypeAlias = "Iterable[Finding]"
Suspect = Callable[[Around], Findings]


def rows_to_show(around: Around, wanted_R: np.ndarray, order_R: np.ndarray | None = None) -> list[int]:
    """The first wanted rollouts from the iteration on, of different groups; the smallest in
    `order_R` first.
    """
    rows = np.flatnonzero(wanted_R & around.after_R)
    if order_R is not None:
        rows = rows[np.argsort(order_R[rows], kind="stable")]
    shown: dict[int, int] = {}
    for row in rows:
        shown.setdefault(int(around.group_R[row]), int(row))
        if len(shown) == SHOWN:
            break
    return list(shown.values())


def from_to(before: float, after: float) -> str:
    """Text on a change. Example: 0.63 -> 0.02."""
    return f"{before:.3g} -> {after:.3g}"


def as_toml(value: Any) -> str:
    """A value in the form of `--set`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {as_toml(entry)}" for key, entry in value.items()) + "}"
    return "none" if value is None else json.dumps(value)
