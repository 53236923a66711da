"""What a run has in the store: verify every hash, and sweep what no manifest names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from rlpipe.store.artifacts import MANIFEST, SOURCE_INPUT, read_file, read_manifest
from rlpipe.store.run import Run
from rlpipe.types import StoreError


def manifests(run: Run) -> list[str]:
    """The folders of all committed artifacts that belong to the run itself (not to the one it was forked from)."""
    return [key.removesuffix(f"/{MANIFEST}") for key in run.store.list(run.root) if key.endswith(f"/{MANIFEST}")]


def verify(run: Run) -> tuple[int, list[str]]:
    """Re-hashes every file, and checks that every input is a committed artifact: (number of artifacts, faults)."""
    lineage = [run]
    while (parent := lineage[-1].parent) is not None:
        lineage.append(parent)
    folders = [(each, folder) for each in lineage for folder in manifests(each)]
    known = {_sha256(each, folder) for each, folder in folders}
    faults = [fault for each, folder in folders for fault in _artifact_faults(each, folder, known)]
    return len(folders), faults + [fault for each in lineage for fault in _iteration_faults(each)]


def _sha256(run: Run, folder: str) -> str:
    return hashlib.sha256(run.store.read(f"{folder}/{MANIFEST}")).hexdigest()


def _artifact_faults(run: Run, folder: str, known: set[str]) -> Iterator[str]:
    try:
        manifest = read_manifest(run.store, folder)
    except StoreError as error:
        yield str(error)
        return
    for name, sha256 in manifest.inputs.items():
        if sha256 not in known and not name.startswith(SOURCE_INPUT):
            yield f"{folder}: input {name} ({sha256[:12]}) is no committed artifact"
    for record in manifest.files:
        try:
            read_file(run.store, folder, record)
        except StoreError as error:
            yield str(error)


def _iteration_faults(run: Run) -> list[str]:
    """Every committed iteration follows another, and names manifests that stand."""
    faults = []
    records = [key for key in run.store.list(f"{run.root}/rl") if key.endswith("/iteration.json")]
    numbers = sorted(int(key.split("/")[-2]) for key in records)
    first = run.fork_at + 1
    if numbers != list(range(first, first + len(numbers))):
        faults.append(f"{run.root}/rl: the committed iterations {numbers} have a gap")
    for key in records:
        record = json.loads(run.store.read(key))
        for name, ref in record["artifacts"].items():
            if not run.store.exists(f"{ref['folder']}/{MANIFEST}") or _sha256(run, ref["folder"]) != ref["sha256"]:
                faults.append(f"{run.store.address(key)}: its {name} ({ref['folder']}) is missing or another one")
    return faults


def unreferenced(run: Run) -> list[str]:
    """The keys below the run that no manifest names: data of attempts that lost or died, and temporary files."""
    kept = {f"{run.root}/run.json"}
    for folder in manifests(run):
        kept.add(f"{folder}/{MANIFEST}")
        kept |= {f"{folder}/{record.name}" for record in read_manifest(run.store, folder).files}
    others = (f"{run.root}/lease/", f"{run.root}/hosts/")  # who holds the run, who samples for it
    return [
        key
        for key in run.store.list(run.root)
        if key not in kept and not key.endswith("/iteration.json") and not key.startswith(others)
    ]
