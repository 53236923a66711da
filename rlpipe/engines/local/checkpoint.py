"""A folder of safetensors into a model that serves: everything is read and checked before anything is changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from rlpipe.types import UserError

# differ between folders of one architecture without changing what is computed
CONFIG_FREE = {"transformers_version", "_name_or_path", "dtype", "use_cache", "architectures",
               "bos_token_id", "eos_token_id", "pad_token_id"}  # fmt: skip


def read_config(folder: Path) -> PretrainedConfig:
    """The config of a folder in HF format; UserError when it has none that is known."""
    if not (folder / "config.json").is_file():
        raise UserError(f"model_path={str(folder)!r}: it has no config.json; give a folder in Hugging Face format")
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"model_path={str(folder)!r}: its config.json is not understood ({error})") from error


def read_checkpoint(folder: Path, lm: Any) -> dict[str, Tensor]:
    """All tensors of a folder, by the names of `lm`'s parameters; UserError naming what is torn, missing, extra or misshapen."""
    tensors = _read_files(folder)
    wanted = dict(lm.named_parameters()) | {name: buffer for name, buffer in lm.named_buffers() if name in lm.state_dict()}
    for alias, name in _tied_names(lm, wanted).items():
        if alias in tensors:  # a tied tensor may be stored twice, but not with two values
            twin = tensors.pop(alias)
            if name in tensors and not torch.equal(twin, tensors[name]):
                raise UserError(f"{folder}: {alias} and {name} differ, but the model ties them")
            tensors.setdefault(name, twin)
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise UserError(f"{folder}: missing tensors {missing[:3]} ({len(missing)}), unknown tensors {extra[:3]} ({len(extra)})")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(f"{folder}: {name} has the shape {[*tensor.shape]}, the model needs {[*wanted[name].shape]}")
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise UserError(f"{folder}: {name} holds values that are not finite floating-point numbers")
    return tensors


def check_same_architecture(serving: PretrainedConfig, folder: Path) -> None:
    """UserError naming the fields in which a folder's config computes something else than what is served."""
    old, new = serving.to_dict(), read_config(folder).to_dict()
    differ = sorted(key for key in old.keys() | new.keys() if key not in CONFIG_FREE and old.get(key) != new.get(key))
    if differ:
        raise UserError(f"{folder}: its config differs from the served model's in {differ}")


def copy_into(lm: Any, tensors: dict[str, Tensor]) -> None:
    """Overwrites the parameters in place, so that memory stays flat over any number of reloads."""
    wanted = dict(lm.named_parameters()) | dict(lm.named_buffers())
    for name, tensor in tensors.items():
        wanted[name].data.copy_(tensor)


def checksums(lm: Any) -> tuple[dict[str, str], str]:
    """sha256 of every tensor that serves, by name, and one over all of them."""
    each: dict[str, str] = {}
    overall = hashlib.sha256()
    for name, parameter in sorted(lm.named_parameters()):
        each[name] = hashlib.sha256(parameter.data.contiguous().view(-1).view(torch.uint8).cpu().numpy()).hexdigest()
        overall.update(name.encode() + each[name].encode())
    return each, overall.hexdigest()


def _read_files(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no .safetensors file")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                if twice := sorted(tensors.keys() & set(names)):
                    raise UserError(f"{path}: {twice[:3]} are also in another file of the folder")
                # clone: a mapped file that is truncated later would kill the process
                tensors |= {name: file.get_tensor(name).clone() for name in names}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is torn or unreadable: {error}") from error
    return tensors


def _tied_names(lm: Any, wanted: dict[str, Tensor]) -> dict[str, str]:
    """Name of each tied duplicate -> the name under which the tensor is wanted."""
    by_tensor = {id(tensor): name for name, tensor in wanted.items()}
    every = lm.named_parameters(remove_duplicate=False)
    return {name: by_tensor[id(tensor)] for name, tensor in every if name not in wanted}
