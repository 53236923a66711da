"""An artifact as a folder on this machine, complete and verified, whether it is stored as all of
its files or as its difference to another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.store.artifacts import is_pruned, new_attempt, read_file
from rlpipe.store.backend import Store
from rlpipe.store.deltas import rebuild
from rlpipe.store.policy_files import DeltaPolicy, WholePolicy, stored_policy
from rlpipe.store.transfer import PART_BYTES, FileContent

log = logging.getLogger(__name__)
FILES = 8  # that are fetched at the same time


def way_to_remake(manifest: Manifest) -> str:
    """The commands that make a pruned policy of RL again, as text."""
    run, iteration = manifest.run, manifest.iteration
    return (
        f"`rlpipe export {run} --version {iteration + 1} --to DIR` makes it again in a folder, "
        f"`rlpipe fork {run} --at {iteration} --run NEW` in the store"
    )


@contextlib.contextmanager
def made_once(target: Path) -> Iterator[Path]:
    """Yields a new folder beside `target`, which is renamed to `target` after the block: it is
    there complete or not at all. The first process wins.
    """
    partial = target.with_name(f".{target.name}.{new_attempt()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():  # else another process of this node was first: the same bytes
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def materialise(store: Store, ref: ArtifactRef, local_dir: Path) -> Path:
    """All files of an artifact under their plain names in a local folder, complete and verified;
    made once, appears atomically.

    An artifact that is stored as a difference is rebuilt from its base, which is read from the
    store where `local_dir` does not have it.
    """
    policy = stored_policy(store, ref)
    target = local_folder(ref, local_dir)
    if target.is_dir():
        return target
    try:
        with (
            made_once(target) as whole,
            TemporaryDirectory(prefix=f"{whole.name}.", dir=local_dir, ignore_cleanup_errors=True) as scratch,
        ):
            os.rename(_whole_folder(policy, Path(scratch), local_dir), whole)
    except StoreError as error:
        if not is_pruned(store, ref.folder):
            raise
        raise StoreError(f"{store.address(ref.folder)} was pruned; {way_to_remake(policy.manifest)}") from error
    assert target.is_dir(), f"{target} was not materialised"
    return target


def local_folder(ref: ArtifactRef, local_dir: Path) -> Path:
    """The folder below `local_dir` into which `materialise` puts an artifact."""
    return local_dir / f"{ref.folder.replace('/', '-')}-{ref.sha256[:12]}"


def _whole_folder(policy: WholePolicy, scratch: Path, local_dir: Path) -> Path:
    """A new folder in `scratch` with the whole files of an artifact."""
    store, ref = policy.store, policy.ref
    stored, whole = (scratch / f"{ref.sha256[:12]}-{name}" for name in ("stored", "whole"))
    stored.mkdir()
    fetch(store, ref.folder, policy.manifest.files, stored)
    if not isinstance(policy, DeltaPolicy):
        return stored
    address, base = store.address(ref.folder), local_folder(policy.base, local_dir)
    if base.is_dir():
        try:
            return rebuild(address, policy.delta, stored, base, whole)
        except (StoreError, OSError) as error:
            log.warning("%s was damaged on this disk (%s): it is read from the store again", base, error)
            shutil.rmtree(whole)
    base = _whole_folder(stored_policy(store, policy.base), scratch, local_dir)
    rebuild(address, policy.delta, stored, base, whole)
    shutil.rmtree(base)  # of a chain, two policies are on the disk at a time
    return whole


def fetch(store: Store, folder: str, records: list[FileRecord], local_dir: Path) -> None:
    """Fetches files under their plain names into a local folder, verified; StoreError naming one
    that does not match its record.

    FILES are fetched at a time, small ones first; each large one in parts, and hashed by a thread
    of its own.
    """
    assert len({record.plain_name for record in records}) == len(records), f"{folder}: two files of one name"

    def get(record: FileRecord) -> None:
        key, target = f"{folder}/{record.name}", local_dir / record.plain_name
        if record.bytes <= PART_BYTES:
            target.write_bytes(read_file(store, folder, record))
        elif store.get_file(key, target) != FileContent(record.bytes, record.sha256):
            raise StoreError(f"{store.address(key)} does not have the sha256 of its manifest")

    with ThreadPoolExecutor(FILES, "fetching") as threads:
        fetches = [threads.submit(get, record) for record in sorted(records, key=lambda record: record.bytes)]
        try:
            for fetched in fetches:
                fetched.result()
        finally:
            threads.shutdown(cancel_futures=True)
