"""The export of a policy with tied embeddings, for an engine that reloads those wrongly."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open

from rlpipe.base.errors import StoreError
from rlpipe.engines.weights import HEAD
from rlpipe.models.folder import INDEX, file_shapes, tensor_shapes
from rlpipe.store.disk import link

EMBEDDING = "model.embed_tokens.weight"


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
