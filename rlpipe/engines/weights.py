"""A policy's files on local disk, and checks, by their headers, that they fit the model that an
engine serves.
"""

from __future__ import annotations

import contextlib
import filecmp
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import StrictFloat, StrictInt

from rlpipe.base.errors import StoreError
from rlpipe.models.folder import tensor_shapes

READ_BYTES_S = 200e6  # of the slowest supported disk
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Probe:
    """The logprobs (temperature 1) of the last tokens of a fixed text, by the trainer's own forward
    pass.

    Stored with each policy. Example: Probe([5, 17, 200], [-7.2, -8.2])
    """

    tokens: list[StrictInt]
    logprobs: list[StrictFloat]

    def __post_init__(self) -> None:
        assert 0 < len(self.logprobs) < len(self.tokens), "the first token is predicted by nothing"


@dataclass(frozen=True)
class Weights:
    """A policy that an engine can load: a local folder in HF format, its weight version, and the
    probe that proves that it is served.

    `adapter`: for engines that load adapters, the folder of the adapter of the base in `folder`,
    empty for the base alone; None where `folder` is the whole policy.
    """

    folder: Path
    version: int
    probe: Probe
    adapter: str | None = None
    # the folder from which `folder` was exported; the next version's base
    materialised: Path | None = None
    # the version that was served before, if its weights have other bytes
    differs_from: int | None = None
    # the sha256 of the whole policy's files of weights; empty where an adapter was merged
    files: dict[str, str] = field(default_factory=dict)


def reading_s(folder: Path) -> float:
    """The seconds that an engine may take to read a folder's weights: 5 per GB, on the slowest
    supported disk.
    """
    return round(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / READ_BYTES_S)


def same_weights(one: Path, other: Path) -> bool:
    """True when two folders have the same weights: files with the same names and bytes. Reads up to
    the first difference.
    """
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (one, other)]
    files = [(one / name, other / name) for name in names[0]]
    return names[0] == names[1] and all(
        file.samefile(same) or filecmp.cmp(file, same, shallow=False) for file, same in files
    )


def check_compatible(serving: Path, candidate: Path) -> None:
    """Raises StoreError naming the folder and tensors when `candidate` cannot replace the weights
    in `serving`.

    May differ: dtypes (engines cast), and tensors that are not trained (a copied tied head, rotary
    frequencies).
    """
    check_shapes(serving, tensor_shapes(candidate), str(candidate))


def check_shapes(serving: Path, new: dict[str, list[int]], name: str) -> None:
    """As `check_compatible`, for tensors with the shapes `new`; `name`: of their source, for the
    error.
    """
    old = tensor_shapes(serving)
    untrained = {key for key in old.keys() ^ new.keys() if key == HEAD or key.endswith("inv_freq")}
    differ = sorted(key for key in {*old, *new} - untrained if old.get(key) != new.get(key))
    if differ:
        raise StoreError(
            f"{name} does not fit the model that is served: {len(differ)} tensors differ, first {differ[:3]}"
        )


def folder_bytes(folder: Path) -> int:
    """The bytes of the files below a folder; files may be added and deleted meanwhile."""
    num_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            num_bytes += path.stat().st_size
    return num_bytes


def prune(folder: Path, kept: set[Path | None]) -> None:
    """Deletes all entries of a folder but `kept`; the store has them."""
    for entry in folder.iterdir():
        if entry not in kept:
            shutil.rmtree(entry)
