"""The artifacts of all runs of a store, for queries: each that a manifest names, and its run.

Reads manifests and records only; no config is checked, so runs of other versions are listed too.
Damaged artifacts are named in `faults`, and left out. An iteration belongs to the run that
committed it. An iteration that a fork redoes also has the artifacts that the fork shares of it,
under the fork's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.config.rules import is_run_name
from rlpipe.store.artifacts import MANIFEST, PRUNED, read_artifact
from rlpipe.store.audit import stage_of
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document
from rlpipe.store.progress import ITERATION
from rlpipe.store.run import read_iteration
from rlpipe.store.run_record import SHARED_BY_REDO, RunRecord, record_key

READERS = 16  # documents that are read at the same time
Entry = TypeVar("Entry")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Place:
    """The place of an artifact in the store: run, phase, iteration and stage."""

    run: str
    phase: str
    iteration: int
    stage: str  # with its number: scores/round-0

    @property
    def kind(self) -> str:
        return self.stage.split("/", 1)[0]

    @property
    def round_index(self) -> int:
        """The sampling round of a stage that has one."""
        return int(self.stage.split("round-", 1)[1].split("/", 1)[0])


@dataclass(frozen=True)
class StoredRun:
    """A run as stored in its folder."""

    name: str
    record: RunRecord
    places: dict[str, Place]  # folder -> the artifact whose manifest is in it
    iterations: list[int]  # those that this run committed
    keys: frozenset[str]
    pruned: frozenset[str]  # folders of artifacts whose files were deleted

    @property
    def redone(self) -> int | None:
        """The iteration that a fork redoes from its parent's stored artifacts."""
        fork = self.record.fork
        return fork.at if fork and fork.redo else None

    @property
    def first_own(self) -> int:
        """The first iteration that is not wholly its parent's."""
        fork = self.record.fork
        return 0 if fork is None else fork.at + (0 if fork.redo else 1)


@dataclass(frozen=True)
class StoredArtifact:
    """A committed artifact, and the run under which its rows are shown: not always the run that
    made it (`place.run`).
    """

    run: str
    place: Place
    folder: str
    sha256: str  # of the manifest
    manifest: Manifest


class Catalogue:
    """The requested runs of a store, and those that they were forked from.

    Each document is read once.
    """

    def __init__(self, store: Store, names: Sequence[str] = ()) -> None:
        """All runs, or those called `names`; UserError when there is none of that name."""
        self.store = store
        self.faults: list[str] = []
        known = [name for name in store.folders("runs") if is_run_name(name)]
        if missing := [name for name in names if name not in known]:
            raise UserError(f"no run {missing[0]!r} in {store.url} (runs: {', '.join(known) or 'none'})")
        self._runs: dict[str, StoredRun] = {}
        wanted, tried = list(names or known), set[str]()
        while wanted:
            tried |= {*wanted}
            loaded = self._each(self._load, wanted)
            self._runs |= {run.name: run for run in loaded if run is not None}
            parents = {run.record.fork.run for run in loaded if run is not None and run.record.fork}
            wanted = [name for name in sorted(parents) if name not in tried and name in known]
        # named in `faults`
        self._unread = {name for name in tried - self._runs.keys() if store.exists(record_key(name))}
        self.runs = [self._runs[name] for name in (names or known) if name in self._runs]
        self._artifacts: dict[str, StoredArtifact | None] = {}
        self._records: dict[tuple[str, int], IterationRecord | None] = {}

    def _each(self, read: Callable[[Entry], Value], entries: Iterable[Entry]) -> list[Value | None]:
        """Returns `read(entry)` of each; None for a damaged one, which is named in `faults`."""

        def guarded(entry: Entry) -> Value | None:
            try:
                return read(entry)
            except StoreError as error:
                self.faults.append(str(error))
                return None

        with ThreadPoolExecutor(READERS, "reading") as threads:
            return list(threads.map(guarded, entries))

    def _load(self, name: str) -> StoredRun | None:
        """The run in a folder; None where no run was begun."""
        root = f"runs/{name}/"
        keys = self.store.list(f"runs/{name}")
        if record_key(name) not in keys:
            return None
        record = read_document(self.store, record_key(name), RunRecord)
        if record.config["run"] != name:
            raise StoreError(
                f"{self.store.address(record_key(name))} is the record of run {record.config['run']!r:.100}"
            )
        places = {}
        for folder in (key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")):
            try:
                places[folder] = Place(name, *stage_of(folder))
            except StoreError as error:
                self.faults.append(str(error))
        committed = (
            ITERATION.fullmatch(key.removeprefix(f"{root}rl/")) for key in keys if key.endswith("/iteration.json")
        )
        pruned = frozenset(key.removesuffix(f"/{PRUNED}") for key in keys if key.endswith(f"/{PRUNED}"))
        return StoredRun(
            name, record, places, sorted(int(match[1]) for match in committed if match), frozenset(keys), pruned
        )

    def owner(self, run: StoredRun, iteration: int, kind: str = "") -> StoredRun | None:
        """The run that made an RL iteration, or a kind of artifact of it; None when the run that it
        was forked from is missing.
        """
        passed: set[str] = set()
        while run.record.fork is not None:
            fork = run.record.fork
            if iteration >= run.first_own and not (iteration == run.redone and kind in SHARED_BY_REDO[fork.redo]):
                return run
            passed.add(run.name)
            if fork.run not in self._runs or fork.run in passed:
                fault = (
                    f"{self.store.address(record_key(run.name))}: the run that it was forked from, {fork.run}, is not"
                    " there"
                )
                if fault not in self.faults and fork.run not in self._unread:
                    self.faults.append(fault)
                return None
            run = self._runs[fork.run]
        return run

    def maker(self, artifact: StoredArtifact, kind: str) -> str:
        """The name of the run that made this kind of artifact, for the iteration of `artifact`."""
        owner = self.owner(self._runs[artifact.run], artifact.place.iteration, kind)
        return owner.name if owner else artifact.run

    def artifacts(self, *kinds: str) -> list[StoredArtifact]:
        """The committed artifacts of these kinds (without: of all), in order."""
        wanted = [
            (run.name, place, folder)
            for run in self.runs
            for folder, place in [*run.places.items(), *self._shared(run, kinds)]
            if not kinds or place.kind in kinds
        ]
        read = list(dict.fromkeys((folder, place) for _, place, folder in wanted if folder not in self._artifacts))
        for (folder, _), artifact in zip(read, self._each(self._artifact, read), strict=True):
            self._artifacts[folder] = artifact
        entries = ((name, self._artifacts[folder]) for name, _, folder in wanted)
        return [replace(artifact, run=name) for name, artifact in entries if artifact]

    def _shared(self, run: StoredRun, kinds: Sequence[str]) -> list[tuple[str, Place]]:
        """The folders and places of the artifacts that a fork shares of the iteration that it
        redoes.
        """
        if run.redone is None:
            return []
        fork, shared = run.record.fork, []
        assert fork is not None
        for kind in (kind for kind in SHARED_BY_REDO[fork.redo] if kind in kinds):
            maker = self.owner(run, run.redone, kind)
            places = maker.places.items() if maker else ()
            shared += [
                (folder, place)
                for folder, place in places
                if (place.phase, place.iteration, place.kind) == ("rl", run.redone, kind)
            ]
        return shared

    def _artifact(self, entry: tuple[str, Place]) -> StoredArtifact:
        folder, place = entry
        ref, manifest = read_artifact(self.store, folder)
        if place != Place(manifest.run, manifest.phase, manifest.iteration, manifest.stage):
            raise StoreError(
                f"{self.store.address(folder)}: its manifest is that of {manifest.stage} of {manifest.phase} "
                f"{manifest.iteration} of run {manifest.run}"
            )
        return StoredArtifact(place.run, place, folder, ref.sha256, manifest)

    def file(self, artifact: StoredArtifact, plain_name: str) -> tuple[str, int] | None:
        """(key, bytes) of one of its files; None when the file is missing, which is named in
        `faults`.
        """
        try:
            record = artifact.manifest.file(plain_name)
        except StoreError as error:
            self.faults.append(str(error))
            return None
        key = f"{artifact.folder}/{record.name}"
        if key not in self._runs[artifact.place.run].keys:
            self.faults.append(f"{self.store.address(key)} is missing from the store")
            return None
        return key, record.bytes

    def is_pruned(self, artifact: StoredArtifact) -> bool:
        """True when the artifact's files were deleted, or are about to be."""
        return artifact.folder in self._runs[artifact.place.run].pruned

    def iterations(self) -> list[tuple[str, IterationRecord]]:
        """(run, record) of all committed iterations of RL; a fork's with those that it shares."""
        # the run it is shown under, the one that made it, iteration
        shown: list[tuple[str, str, int]] = []
        for run in self.runs:
            shared = [(self.owner(run, iteration), iteration) for iteration in range(run.first_own)]
            shown += [
                (run.name, maker.name, iteration)
                for maker, iteration in shared
                if maker and iteration in maker.iterations
            ]
            shown += [(run.name, run.name, iteration) for iteration in run.iterations if iteration >= run.first_own]
        read = list(
            dict.fromkeys(
                (maker, iteration) for _, maker, iteration in shown if (maker, iteration) not in self._records
            )
        )
        records = self._each(lambda entry: read_iteration(self.store, *entry), read)
        self._records |= dict(zip(read, records, strict=True))
        entries = ((name, self._records[maker, iteration]) for name, maker, iteration in shown)
        return [(name, record) for name, record in entries if record is not None]
