"""A policy's files on local disk, and whether they fit what an engine serves: read from the
headers.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import StrictFloat, StrictInt
from safetensors import safe_open

from rlpipe.base.errors import StoreError
from rlpipe.models.folder import INDEX, file_shapes, tensor_shapes
from rlpipe.store.disk import link

READ_BYTES_S = 200e6  # of the slowest disk that is waited for
BLOCK_BYTES = 1 << 22
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Probe:
    """The logprobs (temperature 1) that the trainer's own forward pass gives the last tokens of a
    fixed text.

    Kept with each policy. Example: Probe([5, 17, 200], [-7.2, -8.2])
    """

    tokens: list[StrictInt]
    logprobs: list[StrictFloat]

    def __post_init__(self) -> None:
        assert 0 < len(self.logprobs) < len(self.tokens), "the first token is predicted by nothing"


@dataclass(frozen=True)
class Weights:
    """A policy that an engine can load: a local folder in HF format, its weight version, and how to
    prove that it is served.

    `adapter`: where engines load adapters, the folder of the one beside `folder`, empty for none;
    None where `folder` is the whole policy.
    """

    folder: Path
    version: int
    probe: Probe
    adapter: str | None = None
    # the folder that `folder` was exported from, the next version's base
    materialised: Path | None = None
    # the version that was served before, where its weights have other bytes
    differs_from: int | None = None


def reading_s(folder: Path) -> float:
    """Seconds that an engine may take to read a folder's weights, beside all else: 5 a GB, on the
    slowest disk that is waited for.
    """
    return round(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / READ_BYTES_S)


def same_weights(one: Path, other: Path) -> bool:
    """True when two folders have the same weights: files of the same names, equal byte for byte.
    Reads up to the first difference."""
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (one, other)]
    return names[0] == names[1] and all(_same_bytes(one / name, other / name) for name in names[0])


def _same_bytes(one: Path, other: Path) -> bool:
    if one.samefile(other):
        return True
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while block := first.read(BLOCK_BYTES):
            if block != second.read(BLOCK_BYTES):
                return False
    return True


def check_compatible(serving: Path, candidate: Path) -> None:
    """StoreError naming the folder and tensors when `candidate` cannot replace what engines serve
    from `serving`.

    Number types may differ (engines cast), and what a model does not train: a copied tied head,
    rotary frequencies.
    """
    check_shapes(serving, tensor_shapes(candidate), str(candidate))


def check_shapes(serving: Path, new: dict[str, list[int]], name: str) -> None:
    """As `check_compatible`, of tensors with these shapes; `name`: what has them."""
    old = tensor_shapes(serving)
    untrained = {key for key in old.keys() ^ new.keys() if key == HEAD or key.endswith("inv_freq")}
    differ = sorted(key for key in {*old, *new} - untrained if old.get(key) != new.get(key))
    if differ:
        raise StoreError(
            f"{name} does not fit the model that is served: {len(differ)} tensors differ, first {differ[:3]}"
        )


def untied(folder: Path) -> Path:
    """`folder`, or beside it an export whose `lm_head.weight` is its own where `folder` has it tied
    to the embedding.

    vLLM 0.32 reloads a tied model without an error and then samples from the old lm_head. The other
    tensors are hard links. An export that is there is whole: it gets its name last.
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
        if not export.exists():  # else another process built the same at the same time
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return export


def _build_untied(folder: Path, building: Path) -> None:
    rewritten = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "config.json")
    shutil.copytree(folder, building, copy_function=link, ignore=rewritten, dirs_exist_ok=True)
    parts = sorted(folder.glob("*.safetensors"))
    # transformers reads no index beside a file named model.safetensors
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
    """A safetensors file with one tensor: the embedding of `part`, named lm_head.weight."""
    from safetensors.torch import save_file  # numpy has no bfloat16; here, as only this needs torch

    with safe_open(part, framework="pt") as source:
        save_file({HEAD: source.get_tensor(EMBEDDING)}, path, {"format": "pt"})


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder, some of which may be going as others come."""
    num_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            num_bytes += path.stat().st_size
    return num_bytes


def prune(folder: Path, kept: set[Path | None]) -> None:
    """Local disk holds what is served; the store has the rest."""
    for entry in folder.iterdir():
        if entry not in kept:
            shutil.rmtree(entry)
