"""A policy's files on local disk, and whether they fit what an engine serves: read from the headers, without torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from rlpipe.store.artifacts import materialise
from rlpipe.store.backend import Store
from rlpipe.types import ArtifactRef, JsonDict, StoreError

HEADER_BYTES_MAX = 100_000_000


@dataclass(frozen=True)
class Weights:
    """A policy that an engine can load: a local folder in HF format, and its weight version."""

    folder: Path
    version: int


def fetch_weights(store: Store, policy: ArtifactRef, version: int, local_dir: Path) -> Weights:
    """Brings a policy to local disk (hash-verified), once per node."""
    return Weights(materialise(store, policy, local_dir), version)


def tensor_shapes(folder: Path) -> dict[str, JsonDict]:
    """Name -> {dtype, shape} of all tensors of a folder; StoreError naming a file that is torn or no safetensors."""
    shapes: dict[str, JsonDict] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StoreError(f"{folder} has no .safetensors file")
    for path in files:
        header, data_bytes = _read_header(path)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if end != data_bytes:
            raise StoreError(f"{path} is torn: its header describes {end} bytes of data, it has {data_bytes}")
        for name, entry in header.items():
            if name != "__metadata__":
                shapes[name] = {"dtype": entry["dtype"], "shape": entry["shape"]}
    return shapes


def _read_header(path: Path) -> tuple[JsonDict, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_BYTES_MAX + 1
        if length > min(HEADER_BYTES_MAX, size - 8):
            raise StoreError(f"{path} is torn: no whole safetensors header")
        try:
            return json.loads(file.read(length)), size - 8 - length
        except ValueError as error:
            raise StoreError(f"{path} is torn: its safetensors header is no JSON") from error


def check_compatible(serving: Path, candidate: Path) -> None:
    """StoreError naming the folder and tensors when `candidate` cannot replace what engines serve from `serving`."""
    old, new = tensor_shapes(serving), tensor_shapes(candidate)
    differ = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if differ:
        raise StoreError(f"{candidate} does not fit the model that is served: {len(differ)} tensors differ, first {differ[:3]}")
