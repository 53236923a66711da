"""The files of a policy as differences to those of an earlier one: the numbers that changed, and
their new values. Rebuilt to the same bits, and verified by sha256.

A difference has one frame for every FRAME_BYTES of its file, compressed by zstd. A frame begins
with a bit for each number of the file: 1 where the number differs from the base's. The changed
numbers follow, as XOR with the base's: the lowest byte of all of them, then the next byte. Numbers
are `width` bytes of the file, whatever they mean. `delta.json`, a Delta, says how each file is
stored.

Legend: N numbers of a frame, M of them changed, W bytes of a number.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef, is_key
from rlpipe.store.disk import link
from rlpipe.store.documents import parse_document
from rlpipe.store.transfer import in_order

DELTA = "delta.json"
SUFFIX = ".xor.zst"  # of a file that is stored as a difference
FRAME_BYTES = 8 << 20
LEVEL = 1  # of zstd
THREADS = 4  # they hold a few frames each, whatever the size of the file


@dataclass(frozen=True)
class Frame:
    """A part of a difference: its bytes, and how many numbers changed."""

    bytes: int
    changed: int


@dataclass(frozen=True)
class DeltaFile:
    """A file of a whole policy, and how it is stored: "whole" (under its name), "base" (nothing
    stored: equal to the base's), or "xor" (its difference to the base's: `frames` of numbers of
    `width` bytes, under its name and SUFFIX).
    """

    name: str
    bytes: int
    sha256: str
    stored: Literal["whole", "base", "xor"]
    width: int = 1
    frames: list[Frame] = field(default_factory=list)


@dataclass(frozen=True)
class Delta:
    """The content of `delta.json`: `base` and `files` of a policy that is stored as a difference.

    `base`: the policy that the difference is to; `files`: all files of the whole policy.
    """

    base: ArtifactRef
    files: list[DeltaFile]
    frame_bytes: int
    schema_version: Literal[1] = 1  # of another, the document is refused


def parse_delta(address: str, data: bytes) -> Delta:
    """The Delta in the document at an address.

    StoreError when it is damaged, or names paths outside of its folder.
    """
    delta = parse_document(address, data, Delta)
    for file in delta.files:
        if "/" in file.name or not is_key(file.name):
            raise StoreError(f"{address} is damaged: the file name {file.name!r:.200} leads elsewhere")
    return delta


def write_difference(base: Path, whole: Path, target: Path, width: int) -> tuple[DeltaFile, str]:
    """Writes the difference of `whole` to `base`, a file of the same size, to `target`; returns the
    record of the whole file, and the sha256 of `base` as it was read.
    """
    size, frames = whole.stat().st_size, list[Frame]()
    digest, base_digest = hashlib.sha256(), hashlib.sha256()
    assert base.stat().st_size == size, f"{base} has not the {size} bytes of {whole}"
    with base.open("rb") as base_file, whole.open("rb") as whole_file, target.open("wb") as target_file:

        def made(start: int) -> tuple[bytes, bytes, bytes, int]:
            before, after = (os.pread(file.fileno(), FRAME_BYTES, start) for file in (base_file, whole_file))
            return before, after, *_packed(before, after, width)

        for before, after, data, changed in in_order(made, range(0, size, FRAME_BYTES), THREADS, 2 * THREADS):
            base_digest.update(before)
            digest.update(after)
            target_file.write(data)
            frames.append(Frame(len(data), changed))
    return DeltaFile(whole.name, size, digest.hexdigest(), "xor", width, frames), base_digest.hexdigest()


def rebuild(address: str, delta: Delta, stored: Path, base: Path, whole: Path) -> Path:
    """Makes the folder `whole` with the whole files of a policy, from its stored files and the
    whole files of its base.

    StoreError naming a file, below the policy's address, that has other bytes than were written.
    """
    whole.mkdir()
    for file in delta.files:
        target = whole / file.name
        if file.stored == "xor":
            if (size := (base / file.name).stat().st_size) != file.bytes:
                raise StoreError(f"{base / file.name} has {size} bytes, and is the base of {file.bytes}")
            digest = _apply(base / file.name, stored / f"{file.name}{SUFFIX}", file, delta.frame_bytes, target)
        else:
            link((base if file.stored == "base" else stored) / file.name, target)
            with target.open("rb") as target_file:
                digest = hashlib.file_digest(target_file, "sha256").hexdigest()
        if digest != file.sha256:
            raise StoreError(
                f"{address}/{file.name}, rebuilt from {delta.base.folder}, does not have the sha256 of its {DELTA}"
            )
    return whole


def _apply(base: Path, difference: Path, file: DeltaFile, frame_bytes: int, target: Path) -> str:
    """Writes the whole file; returns its sha256."""
    ends = [*accumulate(frame.bytes for frame in file.frames)]
    digest = hashlib.sha256()
    with base.open("rb") as base_file, difference.open("rb") as frames_file, target.open("wb") as target_file:

        def made(index: int) -> bytes:
            frame = file.frames[index]
            before = os.pread(base_file.fileno(), frame_bytes, index * frame_bytes)
            data = os.pread(frames_file.fileno(), frame.bytes, ends[index] - frame.bytes)
            return _unpacked(before, data, frame.changed, file.width)

        for data in in_order(made, range(len(file.frames)), THREADS, 2 * THREADS):
            digest.update(data)
            target_file.write(data)
    return digest.hexdigest()


def _packed(before: bytes, after: bytes, width: int) -> tuple[bytes, int]:
    """Returns a frame, and the number of changed numbers in it."""
    xor_N = _numbers(before, width) ^ _numbers(after, width)
    changed_N = xor_N != 0
    xor_M = xor_N[changed_N]
    bytes_WM = xor_M.view(np.uint8).reshape(-1, width).T
    data = np.packbits(changed_N).tobytes() + bytes_WM.tobytes()
    return pa.Codec("zstd", LEVEL).compress(data, asbytes=True), len(xor_M)


def _unpacked(before: bytes, frame: bytes, num_changed: int, width: int) -> bytes:
    """The inverse of `_packed`: returns the bytes `after`."""
    numbers_N = _numbers(before, width).copy()
    num_bits_bytes = -(-len(numbers_N) // 8)
    size = num_bits_bytes + num_changed * width
    data = np.frombuffer(pa.Codec("zstd").decompress(frame, decompressed_size=size, asbytes=True), dtype=np.uint8)
    changed_N = np.unpackbits(data[:num_bits_bytes], count=len(numbers_N)).view(bool)
    bytes_MW = np.ascontiguousarray(data[num_bits_bytes:].reshape(width, num_changed).T)
    numbers_N[changed_N] ^= bytes_MW.view(numbers_N.dtype).reshape(num_changed)
    return numbers_N.tobytes()[: len(before)]


def _numbers(data: bytes, width: int) -> npt.NDArray[np.unsignedinteger]:
    """The bytes as integers of `width` bytes; the last one is padded with zeros."""
    return np.frombuffer(data.ljust(-(-len(data) // width) * width, b"\0"), dtype=f"<u{width}")
