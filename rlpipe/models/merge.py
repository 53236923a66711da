"""Merges an adapter into its base: a whole model in HF format, on local disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlpipe.base.errors import StoreError
from rlpipe.models.adapter import merged
from rlpipe.models.causal import empty_model, hf_config
from rlpipe.models.checkpoint import FILE_BYTES_MAX, Checkpoint, block_of, hub_tensors, local_files, tensors_of
from rlpipe.models.folder import INDEX, folder_config
from rlpipe.store.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, PREFIX, Adapter, adapter_of
from rlpipe.store.disk import link


class AdapterFolder:
    """An adapter on local disk. StoreError naming a file that is torn, or not an adapter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: Adapter = adapter_of(f"{folder}/{ADAPTER_CONFIG}", folder_config(folder, ADAPTER_CONFIG))
        try:
            self._tensors = load_file(folder / ADAPTER_WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{folder}/{ADAPTER_WEIGHTS} is torn or missing: {error}") from error
        for name, tensor in self._tensors.items():
            other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
            # A without B, or B without A, changes nothing
            if other == name or other not in self._tensors:
                raise StoreError(f"{folder}/{ADAPTER_WEIGHTS}: {name} is no half of two matrices that are both there")
            if not tensor.isfinite().all():
                raise StoreError(f"{folder}/{ADAPTER_WEIGHTS}: {name} holds values that are NaN or infinite")

    def weights(self) -> list[str]:
        """The names of the weights that the adapter changes."""
        ends = ".lora_A.weight"
        return [
            name.removeprefix(PREFIX).removesuffix(ends) + ".weight" for name in self._tensors if name.endswith(ends)
        ]

    def merged(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight of the base with the adapter merged into it, in `dtype`; a weight without an
        adapter is only converted to `dtype`.
        """
        layer = f"{PREFIX}{name.removesuffix('.weight')}"
        a_RI, b_OR = (self._tensors.get(f"{layer}.lora_{half}.weight") for half in "AB")
        if a_RI is None or b_OR is None:
            return weight.to(dtype)
        if (b_OR.shape[0], a_RI.shape[1]) != (*weight.shape,):
            raise StoreError(
                f"{self.folder}: {name} has the shape {[*weight.shape]}, its adapter is for"
                f" {[len(b_OR), a_RI.shape[1]]}"
            )
        return merged(weight, a_RI, b_OR, self.settings.scale, dtype)


def merge(base: Path, adapter: Path, target: Path) -> None:
    """Writes into the empty folder `target` the model that `base` is with `adapter`. The adapter's
    config.json names the dtype of the weights.

    The layout is that of a policy which is trained whole. StoreError when the two do not fit each
    other.
    """
    config = folder_config(adapter)
    lm, matrices = empty_model(hf_config(config)), AdapterFolder(adapter)
    checkpoint = Checkpoint(str(base), local_files(base), lm)
    if faults := checkpoint.faults():
        raise StoreError(f"{base}: {'; '.join(faults[:3])}")
    if strange := sorted(set(matrices.weights()) - checkpoint.shapes.keys()):
        raise StoreError(f"{adapter}: it is of another model: {base} has no {strange[0]}")
    _write_weights(checkpoint, lm, matrices, getattr(torch, config["dtype"]), target)
    own = {path.name for path in adapter.iterdir()}
    # the adapter's documents, and the base's tokenizer
    for path in sorted({*base.iterdir(), *adapter.iterdir()}):
        weights = path.suffix == ".safetensors" or path.name in (INDEX, ADAPTER_CONFIG, BASE)
        if not weights and (path.parent == adapter or path.name not in own):
            link(path, target / path.name)


def _write_weights(checkpoint: Checkpoint, lm: Any, matrices: AdapterFolder, dtype: torch.dtype, target: Path) -> None:
    parameters, tensors = dict(lm.named_parameters()), tensors_of(lm)
    saved_as = {name: dtype if name in parameters else tensor.dtype for name, tensor in tensors.items()}
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():  # tensors that are converted together are in one file
        sizes[block_of(name)] = sizes.get(block_of(name), 0) + tensor.numel() * saved_as[name].itemsize
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=FILE_BYTES_MAX
    )
    index: dict[str, str] = {}
    for file_name, blocks in split.filename_to_tensors.items():
        names = [name for name in tensors if block_of(name) in blocks]
        whole = {name: matrices.merged(name, checkpoint.read(name), saved_as[name]) for name in names}
        stored = hub_tensors(lm, whole)
        save_file(stored, target / file_name, metadata={"format": "pt"})
        index |= dict.fromkeys(stored, file_name)
    if split.is_sharded:
        (target / INDEX).write_text(
            json.dumps({"metadata": split.metadata, "weight_map": index}, indent=2, sort_keys=True)
        )
