"""The commits of an iteration's policy, state and record, which run in the background, and all that
is published but not committed yet.

Engines load a policy from the disk of the node that wrote it, and sample with it while its files
are still uploaded to the store: it is used before it is committed. Policy, state and record are
committed in a fixed order.

What was not committed has not happened. An artifact that was made from a policy is committed only
after that policy.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from rlpipe.base.errors import StoreError
from rlpipe.base.futures import begin_after
from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.records.sending import Sender
from rlpipe.store.artifacts import Blocks, commit
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.lease import Lease, fenced
from rlpipe.store.nearby import Nearby, NodeDisk

log = logging.getLogger(__name__)
CLOSE_S = 30.0  # for commits that are still in progress when something else has failed

Act = Callable[[], Awaitable[object]]


class CommittedLate(StoreError):
    """Raised when the previous holder of the run committed an artifact after this process had used
    its own.

    The bits are the same: nothing is lost and nothing must be repaired. But all artifacts that this
    process has made since name another manifest, so the run is started again.
    """


@dataclass(frozen=True)
class Published:
    """Files that lie on the disks of the trainer's nodes and are in their upload to the store.

    `places`, `made_on`, `parts`, `sender`: as in `Nearby`. `upload` returns when the store has all
    of the files.
    """

    places: list[NodeDisk]
    made_on: dict[str, int]
    parts: dict[str, Blocks]
    upload: Act
    sender: Sender | None = None


@dataclass(frozen=True)
class Uncommitted:
    """Artifacts and records that this process has published but not committed yet. Its run reads
    them as if they were committed.

    `artifacts`: by their folders; `records`: of iterations, by their keys.
    """

    artifacts: dict[str, tuple[ArtifactRef, Manifest]] = field(default_factory=dict)
    records: dict[str, IterationRecord] = field(default_factory=dict)


class Commits:
    """The commits of a run that are still in progress, one after the other.

    The first one that fails ends them all; its error is raised for each caller that waits.
    `uncommitted`: the run's own, which this keeps up to date.
    """

    def __init__(self, store: Store, uncommitted: Uncommitted, held: Lease | None) -> None:
        self._store, self._uncommitted, self._lease = store, uncommitted, held
        self._last: asyncio.Task[None] | None = None
        self._commits: dict[str, asyncio.Task[None]] = {}  # by the hash of what is committed
        self._nearby: dict[str, Nearby] = {}

    def publish(self, folder: str, manifest: Manifest, published: Published) -> ArtifactRef:
        """Returns the reference of an artifact now; it is committed once the store has its files.

        Until then this process reads its manifest from memory.
        """
        document = sealed(manifest)
        ref = ArtifactRef(folder, hashlib.sha256(document).hexdigest())
        self._uncommitted.artifacts[folder] = (ref, manifest)
        places, made_on, sender = published.places, published.made_on, published.sender
        nearby = Nearby(folder, document.decode(), places, made_on, sender=sender, parts=published.parts)
        self._nearby = {ref.sha256: nearby}

        async def commit_artifact() -> None:
            await published.upload()
            standing, committed = await asyncio.to_thread(commit, self._store, folder, manifest, self._lease)
            if standing != ref:
                raise _late(self._store.address(folder), manifest, committed)
            del self._uncommitted.artifacts[folder]

        self._commits = {sha256: task for sha256, task in self._commits.items() if not _succeeded(task)}
        self._commits[ref.sha256] = self.then(commit_artifact)
        return ref

    def record(self, key: str, record: IterationRecord) -> None:
        """Commits the record of an iteration after its artifacts."""
        self._uncommitted.records[key] = record

        async def commit_it() -> None:
            await asyncio.to_thread(commit_record, self._store, key, record, self._lease)
            del self._uncommitted.records[key]

        self.then(commit_it)

    def then(self, act: Act) -> asyncio.Task[None]:
        """Starts `act` after all commits that are in progress now; returns its task."""
        self._last = begin_after(self._last, act)
        return self._last

    def nearby(self, ref: ArtifactRef) -> Nearby | None:
        """Returns the places of an artifact's files beside the store; None when only the store has
        them.
        """
        return self._nearby.get(ref.sha256)

    def is_uncommitted(self, ref: ArtifactRef) -> bool:
        """True when an artifact is published but not committed yet."""
        return ref.folder in self._uncommitted.artifacts

    def check(self) -> None:
        """Raises the fault that ended the commits, if there is one."""
        if self._last is not None and self._last.done():
            self._last.result()

    async def committed(self, hashes: Iterable[str]) -> None:
        """Returns when all artifacts with these hashes that are published here are committed."""
        for sha256 in hashes:
            if sha256 in self._commits:
                await asyncio.shield(self._commits[sha256])

    async def all_committed(self) -> None:
        """Returns when no commit is in progress."""
        if self._last is not None:
            await asyncio.shield(self._last)

    async def close(self) -> None:
        """Waits CLOSE_S for the commits in progress; not at all once the run was taken over.

        Their failure is only logged: a caller that closes before they are done has another error to
        raise.
        """
        if self._last is None:
            return
        done, _ = await asyncio.wait({self._last}, timeout=0 if self._is_taken_over() else CLOSE_S)
        if not done:
            self._last.cancel()
        if self._is_taken_over():
            return  # TakenOver is raised for it elsewhere; the files are the other holder's now
        if not done:
            log.warning("the newest iteration was not committed within %g s: the next start makes it again", CLOSE_S)
        elif not _succeeded(self._last) and not isinstance(self._last.exception(), CommittedLate):
            log.warning(
                "the newest iteration was not committed (%r): the next start makes it again", self._last.exception()
            )

    def _is_taken_over(self) -> bool:
        return self._lease is not None and self._lease.is_over


async def load_published(
    load: Callable[[Nearby | None], Awaitable[object]],
    nearby: Nearby | None,
    until_committed: Callable[[StoreError], Awaitable[bool]],
) -> bool:
    """Loads an artifact from nearby; where that fails, from the store, once it is committed.

    `until_committed` waits for that. It raises the fault of the first try where the store had the
    artifact already; False: the artifact is no longer wanted, and is not loaded.
    """
    try:
        await load(nearby)
    except StoreError as fault:
        if nearby is None:
            raise
        if not await until_committed(fault):
            return False
        await load(None)
    return True


def commit_record(store: Store, key: str, record: IterationRecord, held: Lease | None = None) -> None:
    """Creates the record of an iteration.

    A record that stands already is accepted when it names the same artifacts: a previous holder of
    the run may have committed it late. StoreError when it names others.
    """
    with fenced(held):
        created = store.create(key, sealed(record))
    if not created and read_document(store, key, IterationRecord).artifacts != record.artifacts:
        raise StoreError(f"{store.address(key)} was committed by somebody else while this run made its own")


def _late(address: str, manifest: Manifest, committed: Manifest) -> StoreError:
    """Returns the error that ends a process whose artifact was committed by a previous holder of
    the run.
    """
    by = "somebody else" if committed.lease is None else f"the holder of lease {committed.lease}"
    said = f"{address} was committed late, by {by}, while this run used its own"
    ours, theirs = ({file.plain_name: file.sha256 for file in made.files} for made in (manifest, committed))
    if other := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
        return StoreError(f"{said}, of other bits ({other[0]}): it goes on from what was committed")
    return CommittedLate(f"{said}, of the same bits: it goes on from there")


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
