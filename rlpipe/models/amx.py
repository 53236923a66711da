"""Tells if this processor has AMX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def has_amx() -> bool:
    """True on a processor that multiplies matrices of bfloat16 by AMX, if torch has oneDNN."""
    known: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)  # an older torch has none
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and bool(known().get("amx_bf16"))
