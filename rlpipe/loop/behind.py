"""Use of an iteration's policy, state and record before they are committed.

They are committed in this order, behind what goes on: engines load the policy from the disk of the
node that made it, and sample with it while the store gets its files.

What was not committed has not happened. Who commits something that was made of a policy waits until
the policy is committed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.records.sending import Sender
from rlpipe.store.artifacts import commit
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.lease import fenced
from rlpipe.store.nearby import Nearby, NodeDisk
from rlpipe.store.retention import Retention
from rlpipe.store.run import Run

log = logging.getLogger(__name__)
CLOSE_S = 30.0  # for what is on its way when something else has failed

Act = Callable[[], Awaitable[object]]


class CommittedLate(StoreError):
    """Raised when the run's previous holder committed after all what this process has used.

    The bits are the same. Nothing is lost, and nothing to mend; but all that was made here since
    names another manifest, so the run is started again.
    """


@dataclass(frozen=True)
class Published:
    """Files that lie on the disks of the trainer's nodes, and are on their way to the store.

    `places`, `made_on`: where each of them is, as `Nearby` has it. `land` returns when the store
    has all of them. `sender`: as of `Nearby`.
    """

    places: list[NodeDisk]
    made_on: dict[str, int]
    land: Act
    sender: Sender | None = None


class Behind:
    """The commits of a run that are under way, one after the other.

    The first fault ends them, and is raised for whoever waits. `at_start`: the numbers of SFT
    segments and RL iterations that were committed before this start, by phase. `retention`: prunes
    what the run does not keep, after commits.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.retention = Retention(run)
        self.at_start = {phase: run.num_done(phase) for phase in ("sft", "rl")}
        self._last: asyncio.Task[None] | None = None
        self._commits: dict[str, asyncio.Task[None]] = {}  # by the hash of what is committed
        self._nearby: dict[str, Nearby] = {}

    def publish(self, folder: str, manifest: Manifest, published: Published) -> ArtifactRef:
        """The artifact that a manifest will be, committed once the store has its files.

        Until then this process reads it here.
        """
        document = sealed(manifest)
        ref = ArtifactRef(folder, hashlib.sha256(document).hexdigest())
        self._run.pending.artifacts[folder] = (ref, manifest)
        places, made_on, sender = published.places, published.made_on, published.sender
        self._nearby = {ref.sha256: Nearby(folder, document.decode(), places, made_on, sender=sender)}

        async def land() -> None:
            await published.land()
            standing, committed = await asyncio.to_thread(commit, self._run.store, folder, manifest, self._run.lease)
            if standing != ref:
                raise _late(self._run.store.address(folder), manifest, committed)
            del self._run.pending.artifacts[folder]

        self._commits = {sha256: task for sha256, task in self._commits.items() if not _succeeded(task)}
        self._commits[ref.sha256] = self.then(land)
        return ref

    def record(self, key: str, record: IterationRecord) -> None:
        """Commits the record of an iteration after its artifacts."""
        self._run.pending.records[key] = record

        async def land() -> None:
            await asyncio.to_thread(commit_record, self._run, key, record)
            del self._run.pending.records[key]

        self.then(land)

    def then(self, act: Act) -> asyncio.Task[None]:
        """Does something after all that is under way now."""
        before = self._last

        async def follow() -> None:
            if before is not None:
                await before
            await act()

        self._last = asyncio.create_task(follow())
        self._last.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waits is told
        return self._last

    def nearby(self, ref: ArtifactRef) -> Nearby | None:
        """The places of an artifact's files beside the store; None when only the store has them."""
        return self._nearby.get(ref.sha256)

    def is_under_way(self, ref: ArtifactRef) -> bool:
        """True when an artifact is used already, and not committed yet."""
        commit_of = self._commits.get(ref.sha256)
        return commit_of is not None and not _succeeded(commit_of)

    def check(self) -> None:
        """Raises the fault that ended the commits, if there is one."""
        if self._last is not None and self._last.done():
            self._last.result()

    async def committed(self, hashes: Iterable[str]) -> None:
        """Returns when all artifacts with these hashes that are under way are committed."""
        for sha256 in hashes:
            if sha256 in self._commits:
                await asyncio.shield(self._commits[sha256])

    async def landed(self) -> None:
        """Returns when nothing is under way."""
        if self._last is not None:
            await asyncio.shield(self._last)

    async def close(self) -> None:
        """Waits CLOSE_S for the commits that are under way; not at all once the run was taken over.

        Only logs what becomes of them: who closes before they have landed has another fault to
        raise.
        """
        if self._last is None:
            return
        done, _ = await asyncio.wait({self._last}, timeout=0 if self._is_taken_over() else CLOSE_S)
        if not done:
            self._last.cancel()
        if self._is_taken_over():
            return  # that is said, and it is the other holder's now
        if not done:
            log.warning("what the newest iteration made was not committed within %g s: it is made again", CLOSE_S)
        elif not _succeeded(self._last) and not isinstance(self._last.exception(), CommittedLate):
            log.warning(
                "what the newest iteration made was not committed (%r): it is made again", self._last.exception()
            )

    def _is_taken_over(self) -> bool:
        return self._run.lease is not None and self._run.lease.is_over


def commit_record(run: Run, key: str, record: IterationRecord) -> None:
    """Creates the record of an iteration.

    One of the same artifacts, which a holder before this one committed late, is as good; StoreError
    for one of others.
    """
    with fenced(run.lease):
        created = run.store.create(key, sealed(record))
    if not created and read_document(run.store, key, IterationRecord).artifacts != record.artifacts:
        raise StoreError(f"{run.store.address(key)} was committed by somebody else while this run made its own")


def _late(address: str, manifest: Manifest, committed: Manifest) -> StoreError:
    """The error that ends a process whose artifact was committed by a holder before it."""
    by = "somebody else" if committed.lease is None else f"the holder of lease {committed.lease}"
    said = f"{address} was committed late, by {by}, while this run used its own"
    ours, theirs = ({file.plain_name: file.sha256 for file in made.files} for made in (manifest, committed))
    if other := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
        return StoreError(f"{said}, of other bits ({other[0]}): it goes on from what was committed")
    return CommittedLate(f"{said}, of the same bits: it goes on from there")


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
