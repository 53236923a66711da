"""Canonical bytes of JSON values, and their hashes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

SHA256 = re.compile("[0-9a-f]{64}")


def canonical_json(value: Any) -> bytes:
    """The canonical byte string of a JSON value, which may contain records; hashes are taken of
    it.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dataclasses.asdict
    ).encode()


def sha256_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
