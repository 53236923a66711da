"""A policy's files on local disk, and whether they fit what an engine serves: read from the headers, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import StrictFloat, StrictInt
from safetensors import SafetensorError, safe_open

from rlpipe.types import JsonDict, StoreError

PROBE_TOKENS = 32
COPY_BYTES = 64 << 20
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Probe:
    """What the trainer's own forward pass says of a fixed text: the logprobs (temperature 1) of its last tokens.

    Kept with each policy. Example: Probe([5, 17, 200], [-7.2, -8.2])
    """

    tokens: list[StrictInt]
    logprobs: list[StrictFloat]

    def __post_init__(self) -> None:
        assert 0 < len(self.logprobs) < len(self.tokens), "the first token is predicted by nothing"


@dataclass(frozen=True)
class Weights:
    """A policy that an engine can load: a local folder in HF format, its weight version, and how to prove that it is served."""

    folder: Path
    version: int
    probe: Probe


def probe_tokens(vocab_size: int) -> list[int]:
    """A fixed text that any model of this vocabulary can score: tokens that look random, so that many embeddings take part."""
    return [int.from_bytes(hashlib.sha256(bytes([index])).digest()[:4], "big") % vocab_size for index in range(PROBE_TOKENS)]


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """The shapes of all tensors of a folder; StoreError naming a file that is torn or no safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StoreError(f"{folder} has no .safetensors file")
    return {name: shape for path in files for name, shape in _shapes(path).items()}


def _shapes(path: Path) -> dict[str, list[int]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StoreError(f"{path} is torn: {error}") from error


def check_compatible(serving: Path, candidate: Path) -> None:
    """StoreError naming the folder and tensors when `candidate` cannot replace what engines serve from `serving`.

    Number types may differ (engines cast), and what a model does not train: a copied tied head, rotary frequencies.
    """
    old, new = tensor_shapes(serving), tensor_shapes(candidate)
    untrained = {name for name in old.keys() ^ new.keys() if name == HEAD or name.endswith("inv_freq")}
    differ = sorted(name for name in {*old, *new} - untrained if old.get(name) != new.get(name))
    if differ:
        raise StoreError(f"{candidate} does not fit the model that is served: {len(differ)} tensors differ, first {differ[:3]}")


def untied(folder: Path) -> Path:
    """`folder`, or beside it an export whose `lm_head.weight` is its own where `folder` has it tied to the embedding.

    vLLM 0.32 reloads a tied model without an error and then samples from the old lm_head. The other tensors are hard links. An export
    that is there is whole: it gets its name last.
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
        _build_untied(folder, building, {**config, "tie_word_embeddings": False})
        building.rename(export)
    except OSError:
        if not export.exists():  # else another process built the same at the same time
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return export


def _build_untied(folder: Path, building: Path, config: JsonDict) -> None:
    rewritten = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "config.json")
    shutil.copytree(folder, building, copy_function=_link, ignore=rewritten, dirs_exist_ok=True)
    (building / "config.json").write_text(json.dumps(config, indent=2))
    parts = sorted(folder.glob("*.safetensors"))
    # transformers reads no index beside a file named model.safetensors
    names = [f"model-{index + 1:05d}-of-{len(parts) + 1:05d}.safetensors" for index in range(len(parts) + 1)]
    weight_map = {HEAD: names[-1]}
    for part, name in zip(parts, names, strict=False):
        shapes = _shapes(part)
        weight_map |= dict.fromkeys(shapes, name)
        _link(part, building / name)
        if EMBEDDING in shapes:
            _copy_as_head(part, building / names[-1])
    total = sum((building / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (building / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _copy_as_head(part: Path, path: Path) -> None:
    """A safetensors file with one tensor: the embedding of `part`, named lm_head.weight. Byte by byte: numpy has no bfloat16."""
    with part.open("rb") as source, path.open("wb") as target:
        (length,) = struct.unpack("<Q", source.read(8))
        entry = json.loads(source.read(length))[EMBEDDING]
        start, end = entry["data_offsets"]
        tensor = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [0, end - start]}
        text = json.dumps({"__metadata__": {"format": "pt"}, HEAD: tensor}).encode()
        text += b" " * (-len(text) % 8)
        target.write(struct.pack("<Q", len(text)) + text)
        source.seek(start, os.SEEK_CUR)
        for left in range(end - start, 0, -COPY_BYTES):
            target.write(source.read(min(left, COPY_BYTES)))


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
