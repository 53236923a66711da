"""Artifacts: data files first, the manifest last and exclusively. A result exists when its manifest does.

Layout of an artifact: `<folder>/<attempt>/<file>` and `<folder>/manifest.json`. Two attempts at one stage write
different files; the first manifest wins, and the loser answers with the winner's. Files are read verified.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from rlpipe.records.columns import from_table, read_table, schema_of
from rlpipe.store.backend import Store
from rlpipe.store.deltas import DELTA, Delta, parse_delta, rebuild
from rlpipe.store.documents import parse_document, sealed
from rlpipe.store.transfer import PART_BYTES, FileContent
from rlpipe.types import ArtifactRef, FileRecord, Manifest, StoreError, UserError, is_key

log = logging.getLogger(__name__)
Record = TypeVar("Record")
MANIFEST = "manifest.json"
PRUNED = "pruned.json"  # beside the manifest of an artifact whose files were deleted, or are about to be
SOURCE_INPUT = "source "  # begins the name of an input from outside the run: known by its hash, not kept for it


BLOCK_BYTES = 1 << 20
SMALL_FILES = 8  # of at most a part, that are fetched at the same time
HASHERS = 4  # threads that verify the blocks of what was read


@dataclass(frozen=True)
class Blocks:
    """The sha256 of every `size` bytes of a file: they verify a part of it that is read alone."""

    size: int
    sha256s: list[str]


def new_attempt() -> str:
    """A name no other attempt has."""
    return uuid.uuid4().hex[:12]


def write_bytes(store: Store, folder: str, attempt: str, name: str, data: bytes) -> FileRecord:
    """Writes one data file of an attempt."""
    assert "/" not in name and name != MANIFEST, f"not a file name: {name!r}"
    store.put(f"{folder}/{attempt}/{name}", data)
    return FileRecord(f"{attempt}/{name}", len(data), hashlib.sha256(data).hexdigest())


def write_file(store: Store, folder: str, attempt: str, name: str, source: Path) -> FileRecord:
    """Uploads a local file as one data file of an attempt."""
    assert "/" not in name and name != MANIFEST, f"not a file name: {name!r}"
    content = store.put_file(f"{folder}/{attempt}/{name}", source)
    return FileRecord(f"{attempt}/{name}", content.bytes, content.sha256)


def write_file_in_blocks(store: Store, folder: str, attempt: str, name: str, source: Path) -> tuple[FileRecord, Blocks]:
    """As `write_file`; and the blocks by which parts of it are verified, hashed while it is uploaded."""
    with ThreadPoolExecutor(1, "blocks") as beside:
        blocks = beside.submit(blocks_of, source)
        return write_file(store, folder, attempt, name, source), blocks.result()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blocks_of(path: Path) -> Blocks:
    with path.open("rb") as file:
        return Blocks(BLOCK_BYTES, [hashlib.sha256(block).hexdigest() for block in iter(lambda: file.read(BLOCK_BYTES), b"")])


def commit(store: Store, folder: str, manifest: Manifest) -> tuple[ArtifactRef, Manifest]:
    """Creates the manifest exclusively. Answers with the one that stands: ours, or that of an earlier attempt.

    UserError when the standing one records other inputs or settings than ours.
    """
    data = sealed(manifest)
    if store.create(f"{folder}/{MANIFEST}", data):
        return ArtifactRef(folder, hashlib.sha256(data).hexdigest()), manifest
    ref, standing = read_artifact(store, folder)
    check_same(folder, standing, manifest.inputs, manifest.settings)
    return ref, standing


def find(store: Store, folder: str) -> tuple[ArtifactRef, Manifest] | None:
    """The committed artifact of `folder`, or None."""
    return read_artifact(store, folder) if store.exists(f"{folder}/{MANIFEST}") else None


def read_manifest(store: Store, folder: str, sha256: str | None = None) -> Manifest:
    """The manifest of `folder`; StoreError when missing, malformed or (with `sha256`) not the one meant."""
    ref, manifest = read_artifact(store, folder)
    if sha256 not in (None, ref.sha256):
        raise StoreError(f"{store.address(folder)}/{MANIFEST} has sha256 {ref.sha256}, expected {sha256}")
    return manifest


def read_artifact(store: Store, folder: str) -> tuple[ArtifactRef, Manifest]:
    """The committed artifact of `folder`; StoreError when its manifest is missing or damaged."""
    data = store.read(f"{folder}/{MANIFEST}")
    manifest = parse_document(store.address(f"{folder}/{MANIFEST}"), data, Manifest)
    for record in manifest.files:
        if not is_key(record.name) or record.name.count("/") != 1:
            raise StoreError(
                f"{store.address(folder)}/{MANIFEST} is damaged: the file name {record.name!r:.200} leads elsewhere"
            )
    return ArtifactRef(folder, hashlib.sha256(data).hexdigest()), manifest


def is_pruned(store: Store, folder: str) -> bool:
    """Whether files of the committed artifact in `folder` may be missing because they were pruned (rlpipe/store/retention.py)."""
    return store.exists(f"{folder}/{PRUNED}")


def check_same(folder: str, standing: Manifest, inputs: dict[str, str], settings: dict[str, object]) -> None:
    """UserError naming the fields in which a committed stage differs from what is asked for now."""
    pairs = {name: (standing.settings.get(name), settings.get(name)) for name in sorted({*standing.settings, *settings})}
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


def check_file(store: Store, folder: str, record: FileRecord) -> None:
    """Reads a data file of any size once, keeping nothing of it; StoreError when it is not what its record says."""
    key, digest = f"{folder}/{record.name}", hashlib.sha256()
    if (size := store.size(key)) != record.bytes:
        raise StoreError(f"{store.address(key)} has {size} bytes; its manifest says {record.bytes}")
    for part in store.parts(key, 0, record.bytes):  # the next ones are under way meanwhile
        digest.update(part)
    if digest.hexdigest() != record.sha256:
        raise StoreError(f"{store.address(key)} does not have the sha256 of its manifest")


def read_range(store: Store, folder: str, record: FileRecord, blocks: Blocks | None, start: int, end: int) -> memoryview:
    """Bytes of one data file, verified where its blocks are known; StoreError naming the file.

    Whole blocks are read then: up to one more at each end.
    """
    key = f"{folder}/{record.name}"
    if blocks is None:
        return store.read_range(key, start, end)
    first, last = start // blocks.size * blocks.size, min(-(-end // blocks.size) * blocks.size, record.bytes)
    data = store.read_range(key, first, last)
    starts = range(first, last, blocks.size)
    for at, sha256 in zip(starts, _sha256s([data[at - first : at - first + blocks.size] for at in starts]), strict=True):
        if sha256 != blocks.sha256s[at // blocks.size]:
            raise StoreError(f"{store.address(key)} is damaged between the bytes {at} and {min(at + blocks.size, last)}")
    return data[start - first : end - first]


def _sha256s(blocks: list[memoryview]) -> list[str]:
    """Of each block; of many, by several threads."""
    if len(blocks) <= HASHERS:
        return [hashlib.sha256(block).hexdigest() for block in blocks]
    with ThreadPoolExecutor(HASHERS, "hashing") as threads:
        return list(threads.map(lambda block: hashlib.sha256(block).hexdigest(), blocks))


def read_records(
    store: Store, ref: ArtifactRef, name: str, record: type[Record], columns: Sequence[str] | None = None
) -> list[Record]:
    """All records of one Parquet file of an artifact, of the record's columns, all or these; StoreError when it has them not."""
    file = read_manifest(store, ref.folder, ref.sha256).file(name)
    data = read_file(store, ref.folder, file)
    try:
        return from_table(read_table(data, schema_of(record, columns).names), record)
    except (pa.ArrowInvalid, KeyError) as error:
        raise StoreError(
            f"{store.address(ref.folder)}/{file.name} is no file of {record.__name__} records ({error})"
        ) from error


def read_records_if_any(
    store: Store, ref: ArtifactRef, name: str, record: type[Record], columns: Sequence[str] | None = None
) -> list[Record]:
    """As `read_records`; none where the artifact has no such file."""
    files = read_manifest(store, ref.folder, ref.sha256).files
    return read_records(store, ref, name, record, columns) if name in [file.plain_name for file in files] else []


def way_to_remake(manifest: Manifest) -> str:
    """How a policy of RL that was pruned can be had again."""
    run, iteration = manifest.run, manifest.iteration
    return (
        f"`rlpipe export {run} --version {iteration + 1} --to DIR` makes it again in a folder, "
        f"`rlpipe fork {run} --at {iteration} --run NEW` in the store"
    )


def read_delta(store: Store, folder: str, manifest: Manifest) -> Delta | None:
    """How a policy is stored as a difference; None for an artifact that is stored whole."""
    records = [record for record in manifest.files if record.plain_name == DELTA]
    return parse_delta(store.address(f"{folder}/{records[0].name}"), read_file(store, folder, records[0])) if records else None


def is_delta(store: Store, ref: ArtifactRef) -> bool:
    """Whether an artifact is stored as a difference."""
    return any(record.plain_name == DELTA for record in read_manifest(store, ref.folder, ref.sha256).files)


def bases_of(store: Store, ref: ArtifactRef) -> list[ArtifactRef]:
    """The policies that are needed to rebuild this one, nearest first: its base, the base of that, down to one that is stored whole."""
    bases: list[ArtifactRef] = []
    while delta := read_delta(store, ref.folder, read_manifest(store, ref.folder, ref.sha256)):
        ref = delta.base  # its sha256 is in the manifest that names it: no chain can close
        bases.append(ref)
    return bases


def whole_files(store: Store, ref: ArtifactRef) -> dict[str, FileRecord]:
    """The files that `materialise` gives, by plain name: the same bytes and sha256 however the artifact is stored."""
    manifest = read_manifest(store, ref.folder, ref.sha256)
    delta = read_delta(store, ref.folder, manifest)
    if delta is None:
        return {record.plain_name: record for record in manifest.files}
    attempt = manifest.files[0].name.split("/", 1)[0]
    return {file.name: FileRecord(f"{attempt}/{file.name}", file.bytes, file.sha256) for file in delta.files}


def read_small_file(store: Store, ref: ArtifactRef, name: str) -> bytes:
    """One small file of an artifact, a JSON or a template, also where it is stored with a base alone; StoreError when there is none."""
    manifest = read_manifest(store, ref.folder, ref.sha256)
    delta = read_delta(store, ref.folder, manifest)
    if delta is not None and any(file.name == name and file.stored == "base" for file in delta.files):
        return read_small_file(store, delta.base, name)
    return read_file(store, ref.folder, manifest.file(name))


def materialise(store: Store, ref: ArtifactRef, local_dir: Path) -> Path:
    """All files of an artifact under their plain names in a local folder, whole and verified; made once, appears atomically.

    What is stored as a difference is rebuilt from its base, which is read from the store where `local_dir` does not have it.
    """
    manifest = read_manifest(store, ref.folder, ref.sha256)
    target = _local_folder(ref, local_dir)
    if target.is_dir():
        return target
    partial = local_dir / f".{target.name}.{new_attempt()}"
    partial.mkdir(parents=True)
    try:
        os.rename(_whole_folder(store, ref, manifest, partial, local_dir), target)
    except StoreError as error:
        if not is_pruned(store, ref.folder):
            raise
        raise StoreError(f"{store.address(ref.folder)} was pruned; {way_to_remake(manifest)}") from error
    except OSError:
        if not target.is_dir():  # else another process of this node was first: the same bytes
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    assert target.is_dir(), f"{target} was not materialised"
    return target


def _local_folder(ref: ArtifactRef, local_dir: Path) -> Path:
    return local_dir / f"{ref.folder.replace('/', '-')}-{ref.sha256[:12]}"


def _whole_folder(store: Store, ref: ArtifactRef, manifest: Manifest, scratch: Path, local_dir: Path) -> Path:
    """A new folder in `scratch` with the whole files of an artifact."""
    stored, whole = (scratch / f"{ref.sha256[:12]}-{name}" for name in ("stored", "whole"))
    stored.mkdir()
    _fetch(store, ref.folder, manifest.files, stored)
    delta = read_delta(store, ref.folder, manifest)
    if delta is None:
        return stored
    address, base = store.address(ref.folder), _local_folder(delta.base, local_dir)
    if base.is_dir():
        try:
            return rebuild(address, delta, stored, base, whole)
        except (StoreError, OSError) as error:
            log.warning("%s was damaged on this disk (%s): it is read from the store again", base, error)
            shutil.rmtree(whole)
    of_base = read_manifest(store, delta.base.folder, delta.base.sha256)
    base = _whole_folder(store, delta.base, of_base, scratch, local_dir)
    rebuild(address, delta, stored, base, whole)
    shutil.rmtree(base)  # of a chain, two policies are on the disk at a time
    return whole


def _fetch(store: Store, folder: str, records: list[FileRecord], local_dir: Path) -> None:
    """Puts files under their plain names into a local folder, verified; StoreError naming one that is not what its record says.

    The small ones come several at a time, while the large ones come one after the other, each in parts.
    """

    assert len({record.plain_name for record in records}) == len(records), f"{folder}: two files of one name"

    def small(record: FileRecord) -> None:
        (local_dir / record.plain_name).write_bytes(read_file(store, folder, record))

    with ThreadPoolExecutor(SMALL_FILES, "fetching") as threads:
        fetches = [threads.submit(small, record) for record in records if record.bytes <= PART_BYTES]
        for record in records:
            if record.bytes > PART_BYTES:
                key = f"{folder}/{record.name}"
                if store.get_file(key, local_dir / record.plain_name) != FileContent(record.bytes, record.sha256):
                    raise StoreError(f"{store.address(key)} does not have the sha256 of its manifest")
        for fetch in fetches:
            fetch.result()
