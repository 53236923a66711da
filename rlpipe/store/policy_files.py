"""The files of a policy, however it is stored: whole, as its difference to an earlier policy (a
delta), or as an adapter on a whole policy. Of each: the files that it has, and its base, the policy
that it needs beside its own files.

Artifacts that are no policies are stored whole. rlpipe/store/local_copy.py makes a local folder of
the files, rlpipe/models/whole.py one with adapters merged, rlpipe/stored/remaking.py one of a
policy that was pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.store.adapter_files import BASE, AdapterBase
from rlpipe.store.artifacts import read_file, read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.deltas import DELTA, Delta, parse_delta
from rlpipe.store.documents import parse_document

# the small documents that say how the other files are stored; a pruned policy keeps them
DOCUMENTS = (DELTA, BASE)


@dataclass(frozen=True)
class WholePolicy:
    """A policy that is stored as all of its files.

    `form`: as text for a person. `is_rebuilt`: True when its files cannot be read where they are
    stored, only after they were rebuilt.
    """

    form, is_rebuilt = "", False
    store: Store
    ref: ArtifactRef
    manifest: Manifest

    @property
    def base(self) -> ArtifactRef | None:
        """The policy without which this one cannot be built."""
        return None

    @property
    def files(self) -> dict[str, FileRecord]:
        """The files that `materialise` makes, by plain name."""
        return {record.plain_name: record for record in self.manifest.files}

    def read(self, name: str) -> bytes:
        """One small file, a JSON or a template, also where only the policy that this one needs
        stores it; StoreError when there is none.
        """
        return read_file(self.store, self.ref.folder, self.manifest.file(name))

    def _document(self, name: str) -> tuple[str, bytes]:
        """A document that says how the files are stored: its address, and its content."""
        record = self.manifest.file(name)
        return self.store.address(f"{self.ref.folder}/{record.name}"), read_file(self.store, self.ref.folder, record)


class DeltaPolicy(WholePolicy):
    """A policy that is stored as its difference to an earlier one. Its `files` have the bytes and
    the sha256 of a policy that is stored whole.
    """

    form, is_rebuilt = "a difference", True

    @cached_property
    def delta(self) -> Delta:
        return parse_delta(*self._document(DELTA))

    @property
    def base(self) -> ArtifactRef:
        return self.delta.base

    @property
    def files(self) -> dict[str, FileRecord]:
        attempt = self.manifest.files[0].name.split("/", 1)[0]
        return {file.name: FileRecord(f"{attempt}/{file.name}", file.bytes, file.sha256) for file in self.delta.files}

    def read(self, name: str) -> bytes:
        if any(file.name == name and file.stored == "base" for file in self.delta.files):
            return stored_policy(self.store, self.base).read(name)
        return super().read(name)


class AdapterPolicy(WholePolicy):
    """A policy that is stored as an adapter on its base, a whole policy; `files`: the adapter's."""

    form = "an adapter"

    @cached_property
    def _adapted(self) -> ArtifactRef:
        return parse_document(*self._document(BASE), AdapterBase).policy

    @property
    def base(self) -> ArtifactRef:
        return self._adapted

    def read(self, name: str) -> bytes:
        if name not in self.files:
            return stored_policy(self.store, self.base).read(name)
        return super().read(name)


def stored_policy(store: Store, ref: ArtifactRef, manifest: Manifest | None = None) -> WholePolicy:
    """A policy as it is stored; `manifest`: its own, where that was read before."""
    manifest = manifest or read_manifest(store, ref.folder, ref.sha256)
    names = {record.plain_name for record in manifest.files}
    kind = DeltaPolicy if DELTA in names else AdapterPolicy if BASE in names else WholePolicy
    return kind(store, ref, manifest)


def dependencies(store: Store, ref: ArtifactRef) -> list[ArtifactRef]:
    """The policies that are needed to build this one, nearest first: its base, the base of that,
    down to one that is stored whole.
    """
    bases: list[ArtifactRef] = []
    while base := stored_policy(store, bases[-1] if bases else ref).base:
        bases.append(base)  # its sha256 is in the manifest that names it: no chain can close
    return bases


def base_of(store: Store, ref: ArtifactRef) -> ArtifactRef | None:
    """The base of a policy that is stored as an adapter; None for any other."""
    policy = stored_policy(store, ref)
    return policy.base if isinstance(policy, AdapterPolicy) else None
