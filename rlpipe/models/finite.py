"""Finds weights that are not finite by their bits, in one pass over the bytes of a file, without
torch.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from rlpipe.base.errors import StoreError
from rlpipe.models.folder import weight_files

NOT_FINITE = "holds values that are NaN or infinite, which no trained policy has"
LENGTH_BYTES = 8  # at the start of a safetensors file: the length of its header
PIECE_BYTES = 1 << 18  # fits into the cache of a core
# by dtype: the numpy type to read it as, the mask of the bits to compare, and the smallest masked
# value that means NaN, infinite, or above the range of fp32. The other types have no such value:
# integers, types of four and six bits, and two of eight bits that no file on a hub has
PATTERNS: dict[str, tuple[str, int, int]] = {
    "F64": ("<u8", (1 << 63) - 1, struct.unpack("<Q", struct.pack("<d", float(np.finfo(np.float32).max)))[0] + 1),
    "F32": ("<u4", 0x7F80_0000, 0x7F80_0000),
    "C64": ("<u4", 0x7F80_0000, 0x7F80_0000),
    "F16": ("<u2", 0x7C00, 0x7C00),
    "BF16": ("<u2", 0x7F80, 0x7F80),
    "F8_E5M2": ("u1", 0x7C, 0x7C),
    "F8_E4M3": ("u1", 0x7F, 0x7F),
    "F8_E8M0": ("u1", 0xFF, 0xFF),
}


def check_finite(folder: Path) -> Path:
    """Returns the folder. StoreError naming a tensor of its weights with a value that is not
    finite.
    """
    for path in weight_files(folder):
        if name := not_finite(path):
            raise StoreError(f"{path}: {name} {NOT_FINITE}")
    return folder


def not_finite(path: Path) -> str:
    """The name of the first tensor of a file with a value that is not finite in fp32; empty where
    there is none. StoreError when the file is torn.
    """
    try:
        with safe_open(path, framework="numpy"):  # safe_open checks that the header fits the file
            pass
    except SafetensorError as error:
        raise StoreError(f"{path} is torn: {error}") from error
    with path.open("rb", buffering=0) as file:
        first = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(first - LENGTH_BYTES))
        piece = memoryview(bytearray(PIECE_BYTES))
        for name, tensor in header.items():
            if name == "__metadata__" or tensor["dtype"] not in PATTERNS or not math.prod(tensor["shape"]):
                continue
            kind, mask, least = PATTERNS[tensor["dtype"]]
            start, end = tensor["data_offsets"]
            file.seek(first + start)
            for at in range(start, end, PIECE_BYTES):
                read = file.readinto(piece[: min(PIECE_BYTES, end - at)])
                bits = np.frombuffer(piece[:read], dtype=kind)
                if int((bits & bits.dtype.type(mask)).max()) >= least:
                    return name
    return ""
