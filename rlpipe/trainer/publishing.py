"""The files that a save publishes on this node's disk, by their keys in the store, and their upload
in the background, while engines use them already.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlpipe.base.errors import StoreError
from rlpipe.base.references import FileRecord
from rlpipe.store.artifacts import Blocks, blocks_of, file_sha256
from rlpipe.store.backend import Store
from rlpipe.store.patience import Away
from rlpipe.store.transfer import PART_BYTES, FileContent
from rlpipe.trainer.jobs import JobResult, SaveJob

log = logging.getLogger(__name__)
SMALL_FILES = 8  # files of at most one part that are sent at the same time
TRIES = 6  # of an upload, for transient faults of a disk; calls to S3 have retries of their own
WAIT_FIRST_S = 1.0  # before the second try; doubled each time
BEGIN_S = 1.0  # within so long after a save other nodes begin to fetch it, if at all
QUIET_S = 0.3  # between two fetches of a node
GIVE_WAY_S = 120.0  # the longest time for which an upload waits for fetches by other nodes


@dataclass(frozen=True)
class Publication:
    """The files of one save that one node wrote, by their keys in the store.

    They are below the node's folder for published files.

    `beside`: the files of the state and of the gaps, which are deleted once the store has them, as
    no engine needs them.
    """

    attempt: str
    policy: dict[str, FileRecord]
    beside: dict[str, FileRecord]


def publication(job: SaveJob, result: JobResult, node: int = 0) -> Publication:
    """The files that a save published on a node, by their keys."""

    def made_here(folder: str | None, records: list[FileRecord]) -> dict[str, FileRecord]:
        return {f"{folder}/{record.name}": record for record in records if result.made_on.get(record.name, 0) == node}

    beside = made_here(job.state_folder, result.state) | made_here(job.gap_folder, result.gap)
    return Publication(job.attempt, made_here(job.policy_folder, result.policy), beside)


def publish_bytes(folder: Path, name: str, data: bytes) -> FileRecord:
    """Writes a small file into the folder of an attempt; returns its record."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return FileRecord(f"{folder.name}/{name}", len(data), hashlib.sha256(data).hexdigest())


def published_file(path: Path) -> FileRecord:
    """The record of a file in the folder of its attempt."""
    return FileRecord(f"{path.parent.name}/{path.name}", path.stat().st_size, file_sha256(path))


def published_in_blocks(path: Path, size: int) -> tuple[FileRecord, Blocks]:
    """As `published_file`, with the hashes of blocks of `size` bytes, by which parts of the file
    are verified. Two threads hash.
    """
    with ThreadPoolExecutor(1, "blocks") as beside:
        blocks = beside.submit(blocks_of, path, size)
        return published_file(path), blocks.result()


def upload(store: Store, disk: Path, publication: Publication) -> None:
    """Sends all files to the store.

    OSError when the store cannot be reached, StoreError when a file is not what its record says.
    """

    def send(key: str, record: FileRecord) -> None:
        if not (disk / key).is_file():  # an earlier try has sent the file
            if not store.objects.exists(key) or store.size(key) != record.bytes:
                raise StoreError(f"{disk / key} was deleted before it was in the store")
        elif store.put_file(key, disk / key) != FileContent(record.bytes, record.sha256):
            raise StoreError(f"{disk / key} changed on this disk before it was in the store")

    files = publication.policy | publication.beside
    with ThreadPoolExecutor(SMALL_FILES, "sending") as threads:
        small = [threads.submit(send, key, record) for key, record in files.items() if record.bytes <= PART_BYTES]
        for key, record in files.items():
            if record.bytes > PART_BYTES:
                send(key, record)
        for sent in small:
            sent.result()
    for key in publication.beside:
        (disk / key).unlink(missing_ok=True)


class Fetches:
    """The fetches by other nodes from this node that are in progress. Uploads wait for them: both
    use the network of this node, and engines wait for their files.

    `begin_s`: seconds after a save within which other nodes begin to fetch. `going`: a token for
    each file, or part of one, that is being sent.
    """

    def __init__(self, begin_s: float) -> None:
        self.going: set[object] = set()
        self._begin_s = begin_s
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Counts one fetch as in progress within the body."""
        fetch = object()
        with self._changed:
            self.going.add(fetch)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.going.discard(fetch)
                self._changed.notify_all()

    def give_way(self) -> None:
        """Waits until other nodes have fetched what they need of a save that was just published,
        GIVE_WAY_S at most.
        """
        deadline, quiet_s = time.monotonic() + GIVE_WAY_S, self._begin_s
        with self._changed:
            while self._changed.wait_for(lambda: bool(self.going), quiet_s):
                if not self._changed.wait_for(lambda: not self.going, deadline - time.monotonic()):
                    log.warning("an upload waited %g s while other nodes fetched weights, and starts now", GIVE_WAY_S)
                    # the fetch of a lost node may end late: it must not delay further uploads
                    self.going.clear()
                    return
                quiet_s = QUIET_S


class Uploads:
    """The uploads of a node, one after the other in a thread of its first rank.

    The newest one is found by its attempt.

    `on_sent`: called with the fault of each upload, or None. On the first node it returns when all
    nodes have uploaded their files, or raises another node's fault.
    """

    def __init__(
        self,
        store: Store,
        disk: Path,
        begin_s: float = 0.0,
        on_sent: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.disk = disk
        self.fetches = Fetches(begin_s)
        self._store = store
        self._on_sent = on_sent or (lambda fault: None)
        self._newest: tuple[Publication, Future[None]] | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "upload")

    def begin(self, publication: Publication) -> None:
        with self._lock:
            self._thread.submit(self.fetches.give_way)
            upload = self._thread.submit(self._upload, publication)
            self._newest = publication, self._thread.submit(self._tell, upload)

    def of(self, attempt: str) -> Future[None] | None:
        """The upload of a save; None where this trainer has not published it, or has published
        another save since.
        """
        with self._lock:
            publication, sending = self._newest or (None, None)
            return sending if publication is not None and publication.attempt == attempt else None

    @property
    def is_busy(self) -> bool:
        """True while an upload is in progress."""
        with self._lock:
            return self._newest is not None and not self._newest[1].done()

    def _tell(self, upload: Future[None]) -> None:
        """Calls `on_sent` with the result of an upload, then raises the upload's fault, if any."""
        self._on_sent(upload.exception())
        upload.result()

    def _upload(self, publication: Publication) -> None:
        """Uploads, with TRIES tries at most; then raises the last OSError.

        There is no further try once another save has replaced this one.
        """
        for left in reversed(range(TRIES)):
            try:
                upload(self._store, self.disk, publication)
                return
            except OSError as error:
                if isinstance(error, Away) or not left or self.of(publication.attempt) is None:
                    raise
                log.warning("the upload failed, it is tried again (%d more): %s", left, error)
                time.sleep(WAIT_FIRST_S * 2 ** (TRIES - 1 - left))
