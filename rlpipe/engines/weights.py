"""A policy's files on local disk, and checks, by their headers, that they fit the model that an
engine serves.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import StrictFloat, StrictInt
from safetensors import safe_open

from rlpipe.base.errors import StoreError
from rlpipe.models.folder import INDEX, file_shapes, tensor_shapes
from rlpipe.store.disk import link

READ_BYTES_S = 200e6  # of the slowest supported disk
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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


def untied(folder: Path) -> Path:
    """Returns `folder`, or, where it ties `lm_head.weight` to the embedding, an export next to it
    with an `lm_head.weight` of its own.

    vLLM 0.32 reloads a tied model without an error, but then samples with the old lm_head. The
    other files are hard links. An export that exists is complete, as it gets its name last.
    """
    config = json.loads((folder / "config.json").read_text())
    shapes = tensor_shapes(folder)
    if not config.get("tie_word_embeddings", HEAD not in shapes):
        return folder
    export = folder.with_name(f"{folder.name}-untied")
    if export.exists():
        return export
    if HEAD in shapes or EMBEDDING not in shapes:
        raise StoreError(f"{folder} ties its embeddings: it should have a {EMBEDDING} and no {HEAD}")
    building = Path(tempfile.mkdtemp(prefix=f".{export.name}-", dir=folder.parent))
    try:
        (building / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))
        _build_untied(folder, building)
        building.rename(export)
    except OSError:
        if not export.exists():  # if it exists, another process has built it meanwhile
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return export


def _build_untied(folder: Path, building: Path) -> None:
    rewritten = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "config.json")
    shutil.copytree(folder, building, copy_function=link, ignore=rewritten, dirs_exist_ok=True)
    parts = sorted(folder.glob("*.safetensors"))
    # with a file named model.safetensors transformers would not read the index
    names = [f"model-{index + 1:05d}-of-{len(parts) + 1:05d}.safetensors" for index in range(len(parts) + 1)]
    weight_map = {HEAD: names[-1]}
    for part, name in zip(parts, names, strict=False):
        shapes = file_shapes(part)
        weight_map |= dict.fromkeys(shapes, name)
        link(part, building / name)
        if EMBEDDING in shapes:
            _copy_as_head(part, building / names[-1])
    total = sum((building / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (building / INDEX).write_text(json.dumps(index, indent=2))


def _copy_as_head(part: Path, path: Path) -> None:
    """Writes a safetensors file with one tensor: the embedding of `part`, named lm_head.weight."""
    # torch, as numpy has no bfloat16; imported here, as only this needs it
    from safetensors.torch import save_file

    with safe_open(part, framework="pt") as source:
        save_file({HEAD: source.get_tensor(EMBEDDING)}, path, {"format": "pt"})


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
