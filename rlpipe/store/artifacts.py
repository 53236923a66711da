"""Artifacts: data files first, the manifest last and exclusively. A result exists when its manifest does.

Layout of an artifact: `<folder>/<attempt>/<file>` and `<folder>/manifest.json`. Two attempts at one stage write
different files; the first manifest wins, and the loser answers with the winner's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path

from rlpipe.store.backend import Store
from rlpipe.types import ArtifactRef, FileRecord, Manifest, StoreError, UserError, canonical_json

MANIFEST = "manifest.json"
SOURCE_INPUT = "source "  # begins the name of an input from outside the run: known by its hash, not kept for it


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
    digest = file_sha256(source)
    store.put_file(f"{folder}/{attempt}/{name}", source)
    return FileRecord(f"{attempt}/{name}", source.stat().st_size, digest)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(store: Store, folder: str, manifest: Manifest) -> tuple[ArtifactRef, Manifest]:
    """Creates the manifest exclusively. Answers with the one that stands: ours, or that of an earlier attempt.

    UserError when the standing one records other inputs or settings than ours.
    """
    data = canonical_json(manifest.as_json())
    if store.create(f"{folder}/{MANIFEST}", data):
        return ArtifactRef(folder, hashlib.sha256(data).hexdigest()), manifest
    found = _read(store, folder)
    check_same(folder, found[1], manifest.inputs, manifest.settings)
    return found


def reference_of_file(store: Store, key: str) -> ArtifactRef:
    """A file of the store that is no artifact, as an input to record."""
    return ArtifactRef(key, hashlib.sha256(store.read(key)).hexdigest())


def find(store: Store, folder: str) -> tuple[ArtifactRef, Manifest] | None:
    """The committed artifact of `folder`, or None."""
    return _read(store, folder) if store.exists(f"{folder}/{MANIFEST}") else None


def read_manifest(store: Store, folder: str, sha256: str | None = None) -> Manifest:
    """The manifest of `folder`; StoreError when missing, malformed or (with `sha256`) not the one meant."""
    ref, manifest = _read(store, folder)
    if sha256 not in (None, ref.sha256):
        raise StoreError(f"{store.address(folder)}/{MANIFEST} has sha256 {ref.sha256}, expected {sha256}")
    return manifest


def _read(store: Store, folder: str) -> tuple[ArtifactRef, Manifest]:
    data = store.read(f"{folder}/{MANIFEST}")
    try:
        return ArtifactRef(folder, hashlib.sha256(data).hexdigest()), Manifest.from_json(json.loads(data))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{store.address(folder)}/{MANIFEST} is not a manifest ({error})") from error


def check_same(folder: str, standing: Manifest, inputs: dict[str, str], settings: dict[str, object]) -> None:
    """UserError naming the fields in which a committed stage differs from what is asked for now."""
    differ = [
        f"{k}: {standing.settings.get(k)!r} -> {settings.get(k)!r}"
        for k in sorted({*standing.settings, *settings})
        if standing.settings.get(k) != settings.get(k)
    ]
    differ += [f"input {k}" for k in sorted({*standing.inputs, *inputs}) if standing.inputs.get(k) != inputs.get(k)]
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


def materialise(store: Store, ref: ArtifactRef, local_dir: Path) -> Path:
    """All files of an artifact under their plain names in a local folder, verified; made once, appears atomically."""
    manifest = read_manifest(store, ref.folder, ref.sha256)
    target = local_dir / f"{ref.folder.replace('/', '-')}-{ref.sha256[:12]}"
    if target.is_dir():
        return target
    partial = local_dir / f".{target.name}.{new_attempt()}"
    partial.mkdir(parents=True)
    try:
        for record in manifest.files:
            path = partial / record.plain_name
            store.get_file(f"{ref.folder}/{record.name}", path)
            if file_sha256(path) != record.sha256:
                raise StoreError(f"{store.address(ref.folder)}/{record.name} does not have the sha256 of its manifest")
        _rename_once(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    assert target.is_dir(), f"{target} was not materialised"
    return target


def _rename_once(partial: Path, target: Path) -> None:
    try:
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():  # else another process of this node was first: the same bytes
            raise
