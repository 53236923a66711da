"""`pruned.json`, the record that the files of an artifact were deleted, or are about to be, and how
they are made again; and their deletion.

When files are pruned, and why that is safe: rlpipe/store/retention.py.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import StrictInt

from rlpipe.base.errors import StoreError
from rlpipe.store import lease, policy_files
from rlpipe.store.artifacts import PRUNED, is_pruned, read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.lease import Lease, TakenOver, fenced
from rlpipe.store.run import Run

FOLDER = re.compile(r"runs/[^/]+/rl/\d{5,6}/(policy|state)")
WAIT_S = 300.0  # for another process to delete some files
POLL_S = 1.0


@dataclass(frozen=True)
class PruneRecord:
    """The content of `pruned.json`: the files that are gone, the process that deletes them, and the
    way to make them again.
    """

    run: str
    iteration: int
    stage: str  # policy or state
    bytes: int
    state_iteration: (
        # training goes on from this state, or an earlier one that is still
        # there; -1: from weight version 0
        int
    )
    command: str  # that makes it again; empty for a state: nothing needs it
    host: str
    pid: int
    began_at: str
    finished: bool = False  # no file is left, and no process deletes any more
    schema_version: Literal[1] = 1  # of another, the document is refused
    lease: StrictInt | None = None  # of the process that began it; older documents have none


def is_prunable(folder: str) -> bool:
    """True when an artifact is of a kind that is pruned: a policy or a state of phase rl."""
    return FOLDER.fullmatch(folder) is not None


def read_pruned(store: Store, folder: str) -> PruneRecord | None:
    """The record of an artifact's pruning; None when the artifact has all its files."""
    try:
        return read_document(store, f"{folder}/{PRUNED}", PruneRecord)
    except StoreError:
        if not is_pruned(store, folder):  # it never existed, or was just deleted
            return None
    return read_document(store, f"{folder}/{PRUNED}", PruneRecord)  # damaged, or just written


def pruned_folders(run: Run) -> set[str]:
    """The folders of all artifacts without their files, of a run and of those that it was forked
    from. One listing each.
    """
    own = {key.removesuffix(f"/{PRUNED}") for key in run.store.list(f"{run.root}/rl") if key.endswith(f"/{PRUNED}")}
    return own | (pruned_folders(run.parent) if run.parent else set())


def delete(store: Store, key: str) -> None:
    """Deletes a key; one that is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        store.delete(key)


def finish_pruning(store: Store, folder: str, held: Lease | None, stopped: threading.Event | None = None) -> None:
    """Deletes the rest of the files of an artifact whose pruning began, under the lease of its run;
    TakenOver.
    """
    record = read_pruned(store, folder)
    if record is None or record.finished:
        return
    for file in read_manifest(store, folder).files:
        if stopped is not None and stopped.is_set():
            return
        if file.plain_name not in policy_files.DOCUMENTS:  # they are needed to make the others again
            delete_fenced(store, f"{folder}/{file.name}", record, folder, held)
    with fenced(held):
        store.put(f"{folder}/{PRUNED}", sealed(replace(record, finished=True)))


def delete_fenced(store: Store, key: str, record: PruneRecord, folder: str, held: Lease | None) -> None:
    """Deletes a file of an artifact that is being pruned, or its pruned.json.

    If the run was taken over meanwhile, the deletion came late, and others may have restored or
    pruned the file since: then pruned.json is written again, to say that files may be missing;
    TakenOver.
    """
    with fenced(held):
        delete(store, key)
    try:
        if held is not None:
            held.check()
    except TakenOver:
        store.create(f"{folder}/{PRUNED}", sealed(replace(record, finished=True)))
        raise


def wait_until_pruned(store: Store, folder: str) -> bool:
    """Waits until no process deletes files of an artifact any more; True when the files are gone,
    False when the artifact has all of them.

    Finishes the pruning of a process that died. StoreError after WAIT_S.
    """
    deadline, root = time.monotonic() + WAIT_S, "/".join(folder.split("/")[:2])
    while (record := read_pruned(store, folder)) is not None and not record.finished:
        if time.monotonic() > deadline:
            raise StoreError(
                f"{store.address(folder)} is being pruned by pid {record.pid} on host {record.host}, and was not done"
                f" after {WAIT_S:g} s; look whether that process works, then start again"
            )
        try:
            held = lease.acquire(store, root)
        except lease.RunHeld:
            time.sleep(POLL_S)
            continue
        try:
            finish_pruning(store, folder, held)
        finally:
            held.release()
    return record is not None
