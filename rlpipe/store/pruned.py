"""`pruned.json`: that the files of an artifact were deleted, or are about to be, and how they are
made again. And the deleting itself.

When that is done, and why it is safe: rlpipe/store/retention.py.
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
from rlpipe.store import lease
from rlpipe.store.adapter_files import BASE
from rlpipe.store.artifacts import PRUNED, is_pruned, read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.deltas import DELTA
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.lease import Lease, TakenOver, fenced
from rlpipe.store.run import Run

FOLDER = re.compile(r"runs/[^/]+/rl/\d{5,6}/(policy|state)")
WAIT_S = 300.0  # for another process to delete some files
POLL_S = 1.0
# small documents by which who makes the others again knows how they were stored
STAY = (DELTA, BASE)


@dataclass(frozen=True)
class PruneRecord:
    """The content of `pruned.json`: what is gone, who deletes it, and how it is made again."""

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
    finished: bool = False  # no file is left, and nobody deletes any more
    schema_version: Literal[1] = 1  # of another, the document is refused
    lease: StrictInt | None = None  # of who began it; older documents have none


def is_prunable(folder: str) -> bool:
    """True when an artifact is of a kind that is pruned: a policy or a state of phase rl."""
    return FOLDER.fullmatch(folder) is not None


def read_pruned(store: Store, folder: str) -> PruneRecord | None:
    """The record of an artifact's pruning; None when the artifact has all its files."""
    try:
        return read_document(store, f"{folder}/{PRUNED}", PruneRecord)
    except StoreError:
        if not is_pruned(store, folder):  # it was never there, or has just gone
            return None
    return read_document(store, f"{folder}/{PRUNED}", PruneRecord)  # damaged, or it has just come


def pruned_folders(run: Run) -> set[str]:
    """The folders of all artifacts without their files, of a run and of those that it was forked
    from. A listing each.
    """
    own = {key.removesuffix(f"/{PRUNED}") for key in run.store.list(f"{run.root}/rl") if key.endswith(f"/{PRUNED}")}
    return own | (pruned_folders(run.parent) if run.parent else set())


def delete(store: Store, key: str) -> None:
    """Deletes a key that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        store.delete(key)


def finish_pruning(store: Store, folder: str, held: Lease | None, stopped: threading.Event | None = None) -> None:
    """Deletes what is left of the files of an artifact whose pruning began, by who holds the run
    that it belongs to; TakenOver.
    """
    record = read_pruned(store, folder)
    if record is None or record.finished:
        return
    for file in read_manifest(store, folder).files:
        if stopped is not None and stopped.is_set():
            return
        if file.plain_name not in STAY:
            delete_fenced(store, f"{folder}/{file.name}", record, folder, held)
    with fenced(held):
        store.put(f"{folder}/{PRUNED}", sealed(replace(record, finished=True)))


def delete_fenced(store: Store, key: str, record: PruneRecord, folder: str, held: Lease | None) -> None:
    """Deletes a file of an artifact that is being pruned, or its pruned.json.

    Where the run turns out to have been taken over meanwhile, the deletion came late, maybe to what
    others have restored or pruned since: then pruned.json says again that files may be missing;
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
    """Waits until nobody deletes files of an artifact any more; True when they are gone.

    False when the artifact has all its files. Finishes what a process began that died. StoreError
    after WAIT_S.
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
