"""Audit of a run in the store: verifies every hash, and sweeps the files that no manifest names."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import Manifest
from rlpipe.store.artifacts import (
    MANIFEST,
    PRUNED,
    SOURCE_INPUT,
    check_file,
    is_pruned,
    lease_of,
    read_artifact,
    read_manifest,
)
from rlpipe.store.backend import Store
from rlpipe.store.documents import is_sealed
from rlpipe.store.lease import fenced, held_by, numbers, unreleased
from rlpipe.store.policy_files import dependencies, stored_policy
from rlpipe.store.progress import Progress
from rlpipe.store.pruned import delete, is_prunable, pruned_folders, read_pruned
from rlpipe.store.run import AT_SFT, Run
from rlpipe.store.run_record import last_started

ORDER = {"base": 0, "data": 1, "sft": 2, "rl": 3}  # the phases, as a run goes through them
PLACE = re.compile(
    r"(?P<phase>base|sft)/(?P<first>[^/\d][^/]*)|(?P<numbered>sft|rl)/(?P<iteration>\d{5,})/(?P<stage>.+)"
)
FAULTS_MAX = 20  # of one kind: a foreign folder of a far number would make a gap of thousands
CALLS = "calls"  # beside a shard: the replies to its agents, until it is committed
DOCUMENTS = (MANIFEST, PRUNED, "iteration.json", "run.json", "start.json")
UNCOMMITTED = ("lease", "services", "approval")  # its holder, its services, its approvals


def manifests(run: Run) -> list[str]:
    """The folders of all committed artifacts of the run itself, without those of the run that it
    was forked from.
    """
    return [key.removesuffix(f"/{MANIFEST}") for key in run.store.list(run.root) if key.endswith(f"/{MANIFEST}")]


def verify(run: Run) -> tuple[int, list[str]]:
    """Re-hashes every file, checks that every input is a committed artifact and that nothing is
    missing: (number of artifacts, faults).
    """
    lineage = _lineage(run)
    folders = [folder for member in lineage for folder in manifests(member)]
    known = {_sha256(run.store, folder) for folder in folders}
    faults_of = {folder: [*_artifact_faults(run.store, folder, known)] for folder in folders}
    faults = [fault for faults in faults_of.values() for fault in faults]
    if damaged := {folder for folder, faults in faults_of.items() if faults}:
        faults += _lost_with(run.store, damaged, [folder for folder in folders if folder not in damaged])
    for member in lineage:
        faults += [*_missing(member), *_iteration_faults(member)]
    return len(folders), [*faults, *_start_faults(run), *_unknown(run)]


def files(run: Run, kind: str) -> list[str]:
    """The keys of all committed files of one kind of artifact ("scores", "policy", ...) in the
    order in which they were made, without pruned ones.

    For a fork's shared iterations, the files of the run that it was forked from. UserError listing
    the kinds when there is none.
    """
    entries = []
    for folder in (folder for member in _lineage(run) for folder in manifests(member)):
        phase, iteration, stage = stage_of(folder)
        if run.folder(phase, iteration, stage) == folder:  # not the parent's after the fork
            entries.append((ORDER[phase], iteration, by_number(stage), stage.split("/", 1)[0], folder))
    folders = [folder for *_, stage_kind, folder in sorted(entries) if stage_kind == kind]
    if not folders:
        kinds = ", ".join(sorted({entry[-2] for entry in entries})) or "none"
        raise UserError(f"run {run.name} has no files of kind {kind!r}; it has: {kinds}")
    pruned = pruned_folders(run)
    there = (folder for folder in folders if folder not in pruned)
    return [f"{folder}/{record.name}" for folder in there for record in read_manifest(run.store, folder).files]


def _below_run(folder: str) -> str:
    """A folder without runs/NAME/; empty for the run's own."""
    return f"{folder}//".split("/", 2)[2].strip("/")


def stage_of(folder: str) -> tuple[str, int, str]:
    """Phase, iteration and stage of an artifact's folder; StoreError when it is not the folder of a
    stage.

    Example: rl, 12, scores/round-0 of runs/a/rl/00012/scores/round-0.
    """
    match PLACE.fullmatch(_below_run(folder)):
        case None:
            raise StoreError(f"{folder}: no stage of a run has this folder; one of a newer rlpipe may")
        case place if place["first"]:
            return ("base" if place["phase"] == "base" else "data"), 0, place["first"]
        case place:
            return place["numbered"], int(place["iteration"]), place["stage"]


def by_number(name: str) -> list[tuple[int, str]]:
    """Sorts round-2 before round-10, and pass_at_2 before pass_at_16."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _lineage(run: Run) -> list[Run]:
    """The run, the one it was forked from, and so on."""
    return [run, *(_lineage(run.parent) if run.parent else [])]


def _sha256(store: Store, folder: str) -> str:
    return hashlib.sha256(store.read(f"{folder}/{MANIFEST}")).hexdigest()


def _artifact_faults(store: Store, folder: str, known: set[str]) -> Iterator[str]:
    try:
        manifest = read_manifest(store, folder)
        place = (folder.split("/", 2)[1], *stage_of(folder))
    except StoreError as error:
        yield str(error)
        return
    if place != (manifest.run, manifest.phase, manifest.iteration, manifest.stage):
        yield (
            f"{folder}: its manifest is that of {manifest.stage} of {manifest.phase} {manifest.iteration} of run"
            f" {manifest.run}"
        )
    for name, sha256 in manifest.inputs.items():
        if sha256 not in known and not name.startswith(SOURCE_INPUT):
            yield f"{folder}: input {name} ({sha256[:12]}) is no committed artifact"
    for record in manifest.files:
        try:
            check_file(store, folder, record)
        except StoreError as error:
            pruned = is_prunable(folder) and is_pruned(store, folder) and not store.exists(f"{folder}/{record.name}")
            yield from [] if pruned else [str(error)]
    if is_prunable(folder):
        yield from _prune_faults(store, folder, manifest)


def _prune_faults(store: Store, folder: str, manifest: Manifest) -> Iterator[str]:
    try:
        record = read_pruned(store, folder)
    except StoreError as error:
        yield str(error)
        return
    if record and (record.run, record.iteration, record.stage) != (manifest.run, manifest.iteration, manifest.stage):
        yield f"{folder}: its {PRUNED} is that of {record.stage} of iteration {record.iteration} of run {record.run}"


def _lost_with(store: Store, damaged: set[str], folders: list[str]) -> Iterator[str]:
    """Yields a line for each policy that cannot be built without another one that is damaged.

    `folders`: artifacts whose own files are intact; `damaged`: the folders of the others.
    """
    for folder in folders:
        form = "a policy"
        try:
            policy = stored_policy(store, *read_artifact(store, folder))
            form = policy.form
            needed = dependencies(store, policy.ref)
            fault = next((f"{other.folder} is damaged" for other in needed if other.folder in damaged), "")
        except StoreError as error:
            fault = str(error)
        if fault:
            yield f"{folder} is stored as {form} and cannot be rebuilt: {fault}"


def _missing(run: Run) -> Iterator[str]:
    """Yields a line for each manifest that is missing though a later artifact is committed.

    No manifest names these artifacts as inputs, so the check of inputs does not find them.
    """
    places = {stage_of(folder) for folder in manifests(run) if PLACE.fullmatch(_below_run(folder))}
    segments = sorted(iteration for phase, iteration, stage in places if (phase, stage) == ("sft", "policy"))
    wanted = [("sft", segment, stage) for segment in range(len(segments)) for stage in ("state", "policy")]
    if run.fork_at == AT_SFT and not run.redo and run.config.sets("evaluation") and Progress(run).num_iterations:
        with contextlib.suppress(StoreError):  # a manifest that is reported already
            start = run.policy_place(0)
            wanted += [(*start, "evaluation")] if run.artifact(*start, "policy") else []
    own = (place for place in wanted if run.owner(*place) is run and place not in places)
    yield from (f"{run.store.address(run.folder(*place))}/{MANIFEST} is missing" for place in own)


def _iteration_faults(run: Run) -> Iterator[str]:
    """Yields the faults of committed iterations: each must follow another, and name manifests that
    exist.
    """
    yield from (
        f"{run.store.address(run.iteration_key(number))} is missing, and later iterations are committed"
        for number in Progress(run).lost_iterations()[:FAULTS_MAX]
    )
    for number in Progress(run).own_iterations():
        address = run.store.address(f"{run.root}/rl/{number:05d}/iteration.json")
        try:
            record = run.record(number)
        except StoreError as error:
            yield str(error)
            continue
        if "policy" not in record.artifacts:
            yield f"{address} names no policy"
        for name, ref in record.artifacts.items():
            if not run.store.exists(f"{ref.folder}/{MANIFEST}") or _sha256(run.store, ref.folder) != ref.sha256:
                yield f"{address}: its {name} ({ref.folder}) is missing or another one"


def _unknown(run: Run) -> Iterator[str]:
    """Yields the documents of a later version of rlpipe: `rlpipe gc` would take the files that they
    name for unreferenced ones.
    """
    committed, others = manifests(run), tuple(f"{run.root}/{name}/" for name in UNCOMMITTED)
    listed = [key for key in run.store.list(run.root) if key.endswith(".json") and not key.startswith(others)]
    for key in sorted({*listed}.difference(_of_attempts(run, listed, committed))):
        if key.rpartition("/")[2] not in DOCUMENTS and is_sealed(run.store.read(key)):
            yield (
                f"{run.store.address(key)} was written by a later version of rlpipe: this one has no such document; it"
                " needs a newer rlpipe"
            )


def _start_faults(run: Run) -> Iterator[str]:
    """Yields the faults of the documents with the holder of the run and its last start.

    The run cannot be continued when these cannot be read.
    """
    for read in (lambda: held_by(run.store, run.root), lambda: last_started(run.store, run.name)):
        try:
            read()
        except (StoreError, UserError) as error:
            yield str(error)


def unreferenced(run: Run) -> list[str]:
    """The keys below the run that no manifest names: data of attempts that lost or died, and
    temporary files.

    Without the agents' replies of a shard that is not committed: the next attempt goes on from
    them.
    """
    # before the manifests are read: they name what is committed meanwhile
    listed = run.store.list(run.root)
    committed = manifests(run)
    kept = {f"{folder}/{record.name}" for folder in committed for record in read_manifest(run.store, folder).files}
    left = [key for key in _of_attempts(run, listed, committed) if key not in kept]
    done = {f"{folder}/{CALLS}" for folder in committed}
    return [key for key in left if f"/{CALLS}/" not in key or key.rsplit("/", 2)[0] in done]


def _of_attempts(run: Run, keys: list[str], committed: list[str]) -> Iterator[str]:
    """Yields the keys of temporary files, and of files in the folders of attempts.

    No artifact lies in the folder of an attempt, or below it.
    """
    above = {*committed, *(str(parent) for folder in committed for parent in PurePosixPath(folder).parents)}
    others = tuple(f"{run.root}/{name}/" for name in UNCOMMITTED)
    for key in (key for key in keys if not key.startswith(others)):
        attempt, _, name = key.rpartition("/")
        is_placed = attempt not in above and PLACE.fullmatch(_below_run(attempt.rpartition("/")[0]))
        if name.startswith(".") or (is_placed and name not in DOCUMENTS):
            yield key


def spared(run: Run, keys: list[str]) -> dict[str, int]:
    """Unreferenced keys that may still be committed, each with the number of a lease.

    The holder of that lease may still commit the key: the lease was not released, this process
    cannot see if the holder has ended, and the folder has no other manifest. The run's own lease
    does not count.
    """
    committed, leases = set(manifests(run)), numbers(run.store, run.root)
    holders = unreleased(run.store, run.root, leases).items()
    living = [
        number for number, holder in holders if not holder.is_gone and not (run.lease and run.lease.number == number)
    ]
    waits: dict[str, int] = {}
    for key in keys:
        folder, attempt, name = key.rsplit("/", 2)
        made_under = lease_of(attempt)
        blocking = [number for number in living if made_under in (None, number)]
        if blocking and not name.startswith(".") and folder.removesuffix(f"/{CALLS}") not in committed:
            waits[key] = blocking[0]
    return waits


def spared_lines(run: Run) -> list[str]:
    """The lines about unreferenced files that `sweep` leaves, one for each lease: the reason, and
    the way out.
    """
    counts = Counter(spared(run, unreferenced(run)).values())
    holders = unreleased(run.store, run.root, sorted(counts))
    return [
        f"{counts[number]} of them stay, which {holder} may still commit: nobody here knows whether it has ended."
        f" `rlpipe gc {run.name} --delete` on {holder.host} knows; where nothing of it runs any more: rlpipe gc"
        f" {run.name} --delete --lost {number}"
        for number, holder in holders.items()
    ]


def sweep(run: Run) -> list[str]:
    """Deletes the files that are `unreferenced` and not `spared`, and returns their keys. The
    caller holds the run.

    StoreError while `verify` finds a fault: files that a damaged manifest names would be deleted.
    """
    _, faults = verify(run)
    if faults:
        raise StoreError(
            f"nothing was deleted: run {run.name} has {len(faults)} fault{'s' * (len(faults) > 1)}, see `rlpipe verify"
            f" {run.name}`; first {faults[0]}"
        )
    keys = unreferenced(run)
    waiting = spared(run, keys)
    keys = [key for key in keys if key not in waiting]
    assert all(key.startswith(f"{run.root}/") for key in keys), "what belongs to another run would be deleted"
    assert not any(key.endswith((f"/{MANIFEST}", "/run.json", "/iteration.json")) for key in keys), (
        "a document would be deleted"
    )
    for key in keys:
        with fenced(run.lease):
            delete(run.store, key)
    return keys
