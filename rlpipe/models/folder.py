"""A folder in Hugging Face format: the files of its weights, and the shapes in their headers.

Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlpipe.base.errors import StoreError, UserError

GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights: those in its index, else model.safetensors, else all
    safetensors. StoreError when one is missing.

    The folder may have other safetensors as well: adapters, or the same weights in Mistral's own
    format.
    """
    index, whole = folder / INDEX, folder / "model.safetensors"
    if whole.is_file():  # the same choice as in transformers
        return [whole]
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{index} is no index of weights ({error!r})") from error
    missing = [path for path in files if path.parent != folder or not path.is_file()]
    if missing or not files:
        raise StoreError(f"{folder} has no {missing[0].name if missing else '.safetensors file'}")
    return files


def folder_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The content of a JSON file of a folder, not validated. UserError when there is no such file,
    or it is not a JSON object.
    """
    try:
        value = json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        raise UserError(f"it has no {name}; give a folder in Hugging Face format") from error
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"its {name} is not understood ({error!s:.300})") from error
    if not isinstance(value, dict):
        raise UserError(f"its {name} is not understood (it holds {str(value)[:40]!r}, not an object)")
    return value


def check_generation_config(folder: Path) -> None:
    """Raises UserError when generation_config.json names end-of-text tokens that are not numbers: a
    saved policy has the same ones.
    """
    if (folder / GENERATION).is_file():
        ends = folder_config(folder, GENERATION).get("eos_token_id")
        for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            if type(end) is not int or abs(end) >= 2**31:
                raise UserError(
                    f"its {GENERATION} has eos_token_id={ends!r:.80}: a token's number or a list of these ends a text"
                )


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """The shapes of all tensors of a folder. StoreError naming a file that is missing, torn or not
    safetensors.
    """
    return {name: shape for path in weight_files(folder) for name, shape in file_shapes(path).items()}


def file_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of the tensors of one file. StoreError when it is torn."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StoreError(f"{path} is torn: {error}") from error
