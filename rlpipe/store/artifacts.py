"""Artifacts: data files first, the manifest last and exclusively.

A result exists when its manifest does.

Layout of an artifact: `<folder>/<attempt>/<file>` and `<folder>/manifest.json`. Two attempts at one
stage write different files; the first manifest wins, and the other attempt returns the winner's.
Files are verified when they are read.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord, is_key
from rlpipe.records.columns import from_table, read_table, schema_of
from rlpipe.store.backend import Store
from rlpipe.store.documents import parse_document, sealed
from rlpipe.store.lease import Lease, fenced

Record = TypeVar("Record")
MANIFEST = "manifest.json"
# beside the manifest of an artifact whose files were deleted, or are about to be
PRUNED = "pruned.json"
# begins the name of an input from outside the run: known by its hash, not kept for it
SOURCE_INPUT = "source "
ATTEMPT = re.compile(r"(\d{6,18})l[0-9a-f]{12}")
BLOCK_BYTES = 1 << 20
HASHERS = 4  # threads that verify the blocks of what was read


@dataclass(frozen=True)
class Blocks:
    """The sha256 of every `size` bytes of a file, to verify a part of it that is read alone."""

    size: int
    sha256s: list[str]


def new_attempt(held: Lease | None = None) -> str:
    """A name that no other attempt has.

    It begins with the number of the lease under which the attempt is made, by which `rlpipe gc`
    knows its owner.
    """
    own = uuid.uuid4().hex[:12]
    return f"{held.number:06d}l{own}" if held else own


def lease_of(attempt: str) -> int | None:
    """The number of the lease under which an attempt was made; None where its name has no number
    (older code).
    """
    named = ATTEMPT.fullmatch(attempt)
    return int(named[1]) if named else None


def write_bytes(store: Store, folder: str, attempt: str, name: str, data: bytes) -> FileRecord:
    """Writes one data file of an attempt."""
    assert "/" not in name and name != MANIFEST, f"not a file name: {name!r}"
    store.put(f"{folder}/{attempt}/{name}", data)
    record = FileRecord(f"{attempt}/{name}", len(data), hashlib.sha256(data).hexdigest())
    store.cache.add(record.sha256, data)
    return record


def write_file(store: Store, folder: str, attempt: str, name: str, source: Path) -> FileRecord:
    """Uploads a local file as one data file of an attempt."""
    assert "/" not in name and name != MANIFEST, f"not a file name: {name!r}"
    content = store.put_file(f"{folder}/{attempt}/{name}", source)
    return FileRecord(f"{attempt}/{name}", content.bytes, content.sha256)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blocks_of(path: Path, size: int) -> Blocks:
    with path.open("rb") as file:
        return Blocks(size, [hashlib.sha256(block).hexdigest() for block in iter(lambda: file.read(size), b"")])


def commit(store: Store, folder: str, manifest: Manifest, held: Lease | None = None) -> tuple[ArtifactRef, Manifest]:
    """Creates the manifest exclusively.

    Returns the manifest that exists then: this one, or that of an earlier attempt. UserError when
    the existing one records other inputs or settings; TakenOver when `held` is superseded.
    """
    data = sealed(manifest)
    with fenced(held):
        created = store.create(f"{folder}/{MANIFEST}", data)
    if created:
        ref = ArtifactRef(folder, hashlib.sha256(data).hexdigest())
        store.cache.add(ref.sha256, data)
        return ref, manifest
    ref, standing = read_artifact(store, folder)
    check_same(folder, standing, manifest.inputs, manifest.settings)
    return ref, standing


def find(store: Store, folder: str) -> tuple[ArtifactRef, Manifest] | None:
    """The committed artifact of `folder`, or None."""
    return read_artifact(store, folder) if store.exists(f"{folder}/{MANIFEST}") else None


def read_manifest(store: Store, folder: str, sha256: str | None = None) -> Manifest:
    """The manifest of `folder`; StoreError when it is missing, malformed or (with `sha256`) another
    one. With `sha256`, from this node's cache where that has it.
    """
    if sha256 is not None and (data := store.cache.read(sha256)) is not None:
        return parse_manifest(store.address(f"{folder}/{MANIFEST}"), data)
    ref, manifest = read_artifact(store, folder)
    if sha256 not in (None, ref.sha256):
        raise StoreError(f"{store.address(folder)}/{MANIFEST} has sha256 {ref.sha256}, expected {sha256}")
    return manifest


def read_artifact(store: Store, folder: str) -> tuple[ArtifactRef, Manifest]:
    """The committed artifact of `folder`; StoreError when its manifest is missing or damaged."""
    data = store.read(f"{folder}/{MANIFEST}")
    manifest = parse_manifest(store.address(f"{folder}/{MANIFEST}"), data)
    ref = ArtifactRef(folder, hashlib.sha256(data).hexdigest())
    store.cache.add(ref.sha256, data)
    return ref, manifest


def parse_manifest(address: str, data: bytes) -> Manifest:
    """The manifest in a document; StoreError naming `address` when it is malformed, or names files
    outside of its artifact.
    """
    return parse_document(address, data, Manifest, _check)


def _check(manifest: Manifest) -> None:
    for record in manifest.files:
        if not is_key(record.name) or record.name.count("/") != 1:
            raise ValueError(f"the file name {record.name!r:.200} leads elsewhere")
    if wrong := [name for name, value in manifest.metrics.items() if not _fits(manifest.stage, name, value)]:
        raise ValueError(f"its metric {wrong[0]!r:.200} is {manifest.metrics[wrong[0]]!r:.80}")


def _fits(stage: str, name: str, value: Any) -> bool:
    """True when a metric has the type that its readers expect; True for metrics without readers.

    `losses` is a list of numbers, `dropped` of a batch a reason for each group index, and each
    metric of an evaluation a number.
    """
    if name == "losses":
        return isinstance(value, list) and all(map(_is_number, value))
    if name == "dropped" and stage.startswith("batch/"):
        return isinstance(value, dict) and all(
            group.isdecimal() and isinstance(why, str) for group, why in value.items()
        )
    return stage != "evaluation" or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 2.0**1023


def is_pruned(store: Store, folder: str) -> bool:
    """True when files of the committed artifact in `folder` may be missing: they were pruned.

    See rlpipe/store/retention.py.
    """
    return store.exists(f"{folder}/{PRUNED}")


def check_same(folder: str, standing: Manifest, inputs: dict[str, str], settings: dict[str, object]) -> None:
    """UserError naming the fields in which a committed stage differs from the present request."""
    pairs = {
        name: (standing.settings.get(name), settings.get(name)) for name in sorted({*standing.settings, *settings})
    }
    differ = [f"{name}: {old!r} -> {new!r}" for name, (old, new) in pairs.items() if old != new]
    names = sorted({*standing.inputs, *inputs})
    differ += [f"input {name}" for name in names if standing.inputs.get(name) != inputs.get(name)]
    if differ:
        raise UserError(
            f"{folder} was committed with other settings ({'; '.join(differ)}); run again with the old ones, "
            f"or branch off: rlpipe fork {standing.run} --at {max(standing.iteration - 1, 0)} --run NEW --set ..."
        )


def read_file(store: Store, folder: str, record: FileRecord) -> bytes:
    """One data file, verified against its record; StoreError naming the file."""
    data = store.read(f"{folder}/{record.name}")
    actual = hashlib.sha256(data).hexdigest()
    if len(data) != record.bytes or actual != record.sha256:
        raise StoreError(
            f"{store.address(folder)}/{record.name} has {len(data)} bytes and sha256 {actual}; "
            f"its manifest says {record.bytes} and {record.sha256}"
        )
    return data


def read_cached(store: Store, folder: str, record: FileRecord) -> bytes:
    """As `read_file`, from this node's cache where that has the file, which it has afterwards."""
    if (data := store.cache.read(record.sha256)) is None:
        data = read_file(store, folder, record)
        store.cache.add(record.sha256, data)
    return data


def check_file(store: Store, folder: str, record: FileRecord) -> None:
    """Reads a data file of any size once, without keeping it in memory; StoreError when it does not
    match its record.
    """
    key, digest = f"{folder}/{record.name}", hashlib.sha256()
    if (size := store.size(key)) != record.bytes:
        raise StoreError(f"{store.address(key)} has {size} bytes; its manifest says {record.bytes}")
    for part in store.parts(key, 0, record.bytes):  # the next parts are read meanwhile
        digest.update(part)
    if digest.hexdigest() != record.sha256:
        raise StoreError(f"{store.address(key)} does not have the sha256 of its manifest")


def read_range(
    store: Store, folder: str, record: FileRecord, blocks: Blocks | None, start: int, end: int
) -> memoryview:
    """Bytes of one data file, verified where its blocks are known; StoreError naming the file.

    To verify, whole blocks are read: up to one more at each end.
    """
    key = f"{folder}/{record.name}"
    if blocks is None:
        return store.read_range(key, start, end)
    first, last = start // blocks.size * blocks.size, min(-(-end // blocks.size) * blocks.size, record.bytes)
    data = store.read_range(key, first, last)
    starts = range(first, last, blocks.size)
    for at, sha256 in zip(
        starts, _sha256s([data[at - first : at - first + blocks.size] for at in starts]), strict=True
    ):
        if sha256 != blocks.sha256s[at // blocks.size]:
            raise StoreError(
                f"{store.address(key)} is damaged between the bytes {at} and {min(at + blocks.size, last)}"
            )
    return data[start - first : end - first]


def _sha256s(blocks: list[memoryview]) -> list[str]:
    """The sha256 of each block; more than HASHERS blocks are hashed by several threads."""
    if len(blocks) <= HASHERS:
        return [hashlib.sha256(block).hexdigest() for block in blocks]
    with ThreadPoolExecutor(HASHERS, "hashing") as threads:
        return list(threads.map(lambda block: hashlib.sha256(block).hexdigest(), blocks))


def read_records(
    store: Store, ref: ArtifactRef, name: str, record: type[Record], columns: Sequence[str] | None = None
) -> list[Record]:
    """All records of one Parquet file of an artifact, with all columns of the record or those
    given; StoreError when the file lacks one.
    """
    file = read_manifest(store, ref.folder, ref.sha256).file(name)
    data = read_cached(store, ref.folder, file)
    try:
        return from_table(read_table(data, schema_of(record, columns).names), record)
    except (pa.ArrowException, KeyError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{store.address(ref.folder)}/{file.name} is no file of {record.__name__} records ({error})"
        ) from error


def read_records_if_any(store: Store, ref: ArtifactRef, name: str, record: type[Record]) -> list[Record]:
    """As `read_records`; none where the artifact has no such file."""
    files = read_manifest(store, ref.folder, ref.sha256).files
    return read_records(store, ref, name, record) if name in [file.plain_name for file in files] else []
