"""Maps the tensors of safetensors files to the parameters of a module, and back, by transformers'
own conversion.

The two differ: a hub's files have one tensor per expert, the module one tensor for all experts.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rlpipe.base.errors import StoreError, UserError
from rlpipe.models.finite import NOT_FINITE, not_finite
from rlpipe.models.folder import file_shapes, weight_files

BLOCK = re.compile(r"(.*?\.\d+)\..*")
LENGTH_BYTES = 8  # at the start of a safetensors file: the length of its header
FILE_BYTES_MAX = 5 * 10**9  # of one file of weights


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file, on disk or in the store.

    `read`: (name, (first row, end row)) -> these rows in the stored dtype; with None all rows.
    """

    name: str
    shapes: dict[str, list[int]]
    read: Callable[[str, tuple[int, int] | None], Tensor]


def local_files(folder: Path) -> list[TensorFile]:
    """The files of a folder's weights. StoreError naming a file that is missing or torn."""
    return [
        TensorFile(str(path), file_shapes(path), functools.partial(_read_local, path)) for path in weight_files(folder)
    ]


def _read_local(path: Path, name: str, rows: tuple[int, int] | None) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name) if rows is None else file.get_slice(name)[slice(*rows)]


def check_weights(folder: Path, lm: Any) -> None:
    """Raises UserError naming the weights of `lm` that the folder lacks or has in another shape,
    tensors that `lm` does not know, or one with a value that is not finite.

    Reads all bytes once: 0.2 to 0.3 s per GB from memory, else at the speed of the disk.
    """
    if faults := Checkpoint(str(folder), local_files(folder), lm).faults():
        raise UserError(
            f"{len(faults)} of its tensors are not as config.json says ({type(lm).__name__}): {'; '.join(faults[:3])}"
        )
    for path in weight_files(folder):
        if name := not_finite(path):
            raise UserError(
                f"{name} of {path.name} holds values that are NaN or infinite, which no model has; get that file again"
            )


def finite(rows: Tensor, name: str, folder: str) -> Tensor:
    """Returns these fp32 rows of a tensor. StoreError naming the tensor when a value is NaN or
    infinite.
    """
    # aminmax allocates nothing of the tensor's size, and propagates NaN
    if rows.numel() and not all(math.isfinite(edge.item()) for edge in rows.aminmax()):
        raise StoreError(f"{folder}: {name} {NOT_FINITE}")
    return rows


@dataclass(frozen=True)
class _Extent:
    """The dtype, shape and byte range of a tensor, from the header of its file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


HEADER = TypeAdapter(dict[str, _Extent])


def ranged_file(name: str, size: int, read_bytes: Callable[[int, int], memoryview]) -> TensorFile:
    """A file of `size` bytes that is read in parts: its header now, later only the requested rows.
    StoreError naming a torn file.
    """
    try:
        first = LENGTH_BYTES + int.from_bytes(read_bytes(0, LENGTH_BYTES), "little")
        header = json.loads(bytes(read_bytes(LENGTH_BYTES, min(first, size))))
        extents = HEADER.validate_python({key: value for key, value in header.items() if key != "__metadata__"})
        sizes = {key: math.prod(extent.shape) * _dtype(extent.dtype).itemsize for key, extent in extents.items()}
    except (ValueError, AttributeError, SafetensorError) as error:
        raise StoreError(f"{name} is torn: its header is not understood ({error!s:.300})") from error
    spans = {key: (first + extent.data_offsets[0], first + extent.data_offsets[1]) for key, extent in extents.items()}
    ends = [end for start, end in spans.values() if first <= start <= end]
    if (
        len(ends) != len(spans)
        or max(ends, default=first) != size
        or any(sizes[key] != end - start for key, (start, end) in spans.items())
    ):
        raise StoreError(f"{name} is torn: it has {size} bytes, its header tells of others")

    def read(key: str, rows: tuple[int, int] | None) -> Tensor:
        (start, end), shape = spans[key], extents[key].shape
        if rows is not None:
            row = (end - start) // max(shape[0], 1)
            start, end, shape = start + rows[0] * row, start + rows[1] * row, [rows[1] - rows[0], *shape[1:]]
        dtype = _dtype(extents[key].dtype)
        if start == end:
            return torch.empty(shape, dtype=dtype)
        # bytearray: a copy of its own, aligned for any dtype
        return torch.frombuffer(bytearray(read_bytes(start, end)), dtype=dtype).reshape(shape)

    return TensorFile(name, {key: extent.shape for key, extent in extents.items()}, read)


@functools.cache
def _dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name in a header, found by letting safetensors load a file with an
    empty tensor.
    """
    header = json.dumps({"x": {"dtype": name, "shape": [0], "data_offsets": [0, 0]}}).encode()
    return load(len(header).to_bytes(LENGTH_BYTES, "little") + header)["x"].dtype


@dataclass(frozen=True, eq=False)
class _Group:
    """Stored tensors that are converted together to tensors of the module.

    `parts`: (the pattern that matched a name, the name).
    """

    target: str
    transform: WeightRenaming | WeightConverter
    parts: list[tuple[str, str]]

    def converted(self, read: Callable[[str], Tensor], lm: Any) -> dict[str, Tensor]:
        """Converts the stored tensors; returns the module's tensors by name."""
        transform = copy.deepcopy(self.transform)
        for pattern, name in self.parts:
            transform.add_tensor(self.target, name, pattern, read(name))  # pyright: ignore[reportArgumentType]
        made = transform.convert(self.target, model=lm, config=lm.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class Checkpoint:
    """The tensors of files as weights of `lm`, which may be on the meta device.

    `shapes`: of the converted tensors, by the module's names.

    StoreError naming tensors that two files have, or that cannot be converted. `folder`: the place
    of the files, for error messages.
    """

    def __init__(self, folder: str, files: Sequence[TensorFile], lm: Any) -> None:
        self.folder = folder
        self._lm = lm
        self._files: dict[str, TensorFile] = {}
        stored: dict[str, list[int]] = {}
        for file in files:
            if twice := sorted(stored.keys() & file.shapes.keys()):
                raise StoreError(f"{file.name}: {twice[:3]} are also in another file of the folder")
            stored |= file.shapes
            self._files |= dict.fromkeys(file.shapes, file)
        self._groups: dict[str, _Group] = {}
        self.shapes: dict[str, list[int]] = {}
        for group in _grouped(lm, stored):
            try:
                made = group.converted(lambda name: torch.empty(stored[name], device="meta"), lm)
            # the shapes do not fit each other
            except (RuntimeError, ValueError, LookupError, TypeError) as error:
                raise StoreError(
                    f"{folder}: {group.target} cannot be made of {[name for _, name in group.parts][:3]}: {error}"
                ) from error
            self.shapes |= {name: [*tensor.shape] for name, tensor in made.items()}
            self._groups |= dict.fromkeys(made, group)
        self._stored_as = {
            name: alias for alias, name in tied_names(lm).items() if alias in self.shapes and name not in self.shapes
        }
        for name, alias in self._stored_as.items():
            self.shapes[name], self._groups[name] = self.shapes[alias], self._groups[alias]

    def faults(self) -> list[str]:
        """The reasons why these weights do not fit `lm`, one per tensor: missing, of another shape,
        or unknown to `lm`.
        """
        wanted = {name: [*tensor.shape] for name, tensor in tensors_of(self._lm).items()}
        faults = [f"{name} is missing" for name in wanted.keys() - self.shapes.keys()]
        faults += [
            f"{name} has the shape {self.shapes[name]}, config.json says {shape}"
            for name, shape in wanted.items()
            if self.shapes.get(name, shape) != shape
        ]
        ignored = [*(self._lm._keys_to_ignore_on_load_unexpected or ()), r"inv_freq$"]
        others = self.shapes.keys() - wanted.keys() - self._lm.state_dict().keys()
        faults += [f"{name} is unknown" for name in others if not any(re.search(pattern, name) for pattern in ignored)]
        return sorted(faults)

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor of the module, in the dtype of its file, as a copy."""
        # cloned: a mapped file that is truncated later would kill the process
        made = self._groups[name].converted(lambda stored: self._stored(stored).clone(), self._lm)
        return made[self._stored_as.get(name, name)]

    def rows(self, name: str, shape: list[int], start: int, end: int) -> Tensor:
        """Reads rows of a tensor of the module, fp32.

        StoreError naming a tensor that is missing, of another shape, or not finite.
        """
        return finite(self._rows(name, shape, start, end), name, self.folder)

    def _rows(self, name: str, shape: list[int], start: int, end: int) -> Tensor:
        if name not in self.shapes:
            raise StoreError(f"{self.folder} has no tensor {name}")
        if self.shapes[name] != shape:  # otherwise surplus rows would be dropped silently
            raise StoreError(f"{self.folder}: {name} has the shape {self.shapes[name]}, config.json says {shape}")
        group = self._groups[name]
        if _is_one_a_row(group):
            return self._merged_rows(group, name, start, end)
        if isinstance(group.transform, WeightConverter) or not shape:
            whole = self.read(name).float()
            return whole[start:end] if shape else whole
        stored = group.parts[0][1]
        return self._files[stored].read(stored, (start, end)).float()

    def _merged_rows(self, group: _Group, name: str, start: int, end: int) -> Tensor:
        """Reads rows `start` to `end`, fp32, of a tensor with one row per stored tensor (experts).
        Reads only the stored tensors of these rows.
        """
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, stored in group.parts:
            by_pattern.setdefault(pattern, []).append((pattern, stored))
        chosen = [part for parts in by_pattern.values() for part in parts[start:end]]
        if not chosen:  # this rank has no row of it
            return torch.empty([0, *self.shapes[name][1:]])
        rows = replace(group, parts=chosen).converted(self._stored, self._lm)[name].float()
        assert [*rows.shape] == [end - start, *self.shapes[name][1:]], (
            f"{name}: rows {start} to {end} have the shape {[*rows.shape]}"
        )
        return rows

    def _stored(self, name: str) -> Tensor:
        return self._files[name].read(name, None)


def _grouped(lm: Any, stored: Iterable[str]) -> list[_Group]:
    transforms = get_model_conversion_mapping(lm)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix = lm.state_dict(), lm.base_model_prefix
    groups: dict[str, _Group] = {}
    for name in sorted(stored, key=dot_natural_key):  # experts in numerical order
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        transform = by_pattern[pattern] if pattern is not None else WeightRenaming(name, target)
        groups.setdefault(target, _Group(target, transform, [])).parts.append((pattern or name, name))
    return list(groups.values())


def _is_one_a_row(group: _Group) -> bool:
    operations = getattr(group.transform, "operations", [])
    return bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0


def tensors_of(lm: Any) -> dict[str, Tensor]:
    """The tensors that a checkpoint of `lm` must have: its parameters (tied ones once) and its
    persistent buffers.
    """
    saved = lm.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in [*lm.named_parameters(), *lm.named_buffers()] if name in saved}


def tied_names(lm: Any) -> dict[str, str]:
    """Maps each further name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    every = [(name, first.setdefault(id(tensor), name)) for name, tensor in lm.named_parameters(remove_duplicate=False)]
    return {name: own for name, own in every if name != own}


def hub_tensors(lm: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts the tensors of whole blocks of `lm` back to the names and shapes of a hub's
    files.
    """
    made = revert_weight_conversion(lm, tensors)
    assert sum(tensor.numel() for tensor in made.values()) == sum(tensor.numel() for tensor in tensors.values()), (
        "a number was lost"
    )
    return {name: tensor.contiguous() for name, tensor in made.items()}


def block_of(name: str) -> str:
    """The block of layers that a tensor belongs to; tensors that are converted together are in one
    block.

    Example: model.layers.3
    """
    match = BLOCK.fullmatch(name)
    return match[1] if match else name
