"""Derives numbers from names: the same on any machine and after any crash.

Trap: the bits of every run depend on them, so a change makes other runs of the same config.
"""

from __future__ import annotations

import hashlib
import json

from rlpipe.base.hashing import canonical_json


def first_bits(text: str, num_bits: int) -> int:
    """The first bits of the sha256 of a text, as an integer."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") >> (256 - num_bits)


def fraction(text: str) -> float:
    """A number in [0, 1), derived from a text."""
    return first_bits(text, 48) / 2**48


def uniform(*names: str | int) -> float:
    """A pseudorandom number in [0, 1), derived from the arguments."""
    return fraction(canonical_json(names).decode())


def data_seed(seed: int, name: str) -> int:
    """The seed of one data set.

    Not consecutive: generators use seed + index, so neighbouring seeds would share nearly all
    items.
    """
    return first_bits(canonical_json([seed, name]).decode(), 28)


def rollout_seed(*names: str | int) -> int:
    """A seed of 31 bits, derived from the run's seed, iteration, round, prompt id and rollout
    index.
    """
    return first_bits(json.dumps(names), 32) & 0x7FFFFFFF
