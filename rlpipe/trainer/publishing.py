"""Files that a save leaves on this node's disk, under their keys in the store, and their upload: in
the background, while others use them already."""

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
SMALL_FILES = 8  # of at most a part, that are sent at the same time
TRIES = 6  # of an upload, to a disk that fails in passing; S3 is tried by each call
WAIT_FIRST_S = 1.0  # before the second one, doubled each time
BEGIN_S = 1.0  # after a save other nodes have begun to fetch it, if they do
QUIET_S = 0.3  # between two fetches of one node
GIVE_WAY_S = 120.0  # so long an upload leaves the cable to other nodes


@dataclass(frozen=True)
class Publication:
    """The files of one save that one node made, by their keys in the store.

    They lie below a folder of that node.

    Those `beside` a policy, of a state and of gaps, are deleted once the store has them: no engine
    needs them.
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
    """Writes a small file into the folder of an attempt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return FileRecord(f"{folder.name}/{name}", len(data), hashlib.sha256(data).hexdigest())


def published_file(path: Path) -> FileRecord:
    """The record of a file that lies in the folder of its attempt."""
    return FileRecord(f"{path.parent.name}/{path.name}", path.stat().st_size, file_sha256(path))


def published_in_blocks(path: Path) -> tuple[FileRecord, Blocks]:
    """As `published_file`; and the blocks by which parts of it are verified."""
    with ThreadPoolExecutor(1, "blocks") as beside:
        blocks = beside.submit(blocks_of, path)
        return published_file(path), blocks.result()


def upload(store: Store, disk: Path, publication: Publication) -> None:
    """Sends all files to the store.

    OSError when it cannot be reached, StoreError when a file is not what its record says.
    """

    def send(key: str, record: FileRecord) -> None:
        if not (disk / key).is_file():  # an earlier try has sent it
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
    """The fetches of other nodes from this one now. Uploads give way to them: both take the network
    of this node, and engines wait for their files.

    `begin_s`: seconds that other nodes may take after a save before they begin. `going`: the files,
    or parts of them, that are being sent.
    """

    def __init__(self, begin_s: float) -> None:
        self.going: set[object] = set()
        self._begin_s = begin_s
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """One of them, for as long as the body takes."""
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
        """Returns when other nodes have what they want of a save that was just published, after
        GIVE_WAY_S at the latest.
        """
        deadline, quiet_s = time.monotonic() + GIVE_WAY_S, self._begin_s
        with self._changed:
            while self._changed.wait_for(lambda: bool(self.going), quiet_s):
                if not self._changed.wait_for(lambda: not self.going, deadline - time.monotonic()):
                    log.warning(
                        "an upload waited %g s for other nodes that fetch weights: it waits no longer", GIVE_WAY_S
                    )
                    # of a node that is gone nothing is heard for long: it holds up no other upload
                    self.going.clear()
                    return
                quiet_s = QUIET_S


class Uploads:
    """The uploads of a node, one after the other in a thread of its first rank.

    The newest is known by its attempt.

    `on_sent`: is told how each ended; on a gang's first node it returns when all nodes have sent
    theirs, or raises what went wrong there.
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
        """The upload of a save; None where this gang has not published it, or other files since."""
        with self._lock:
            publication, sending = self._newest or (None, None)
            return sending if publication is not None and publication.attempt == attempt else None

    @property
    def under_way(self) -> bool:
        """True when something that was published is not in the store yet, and may come there."""
        with self._lock:
            return self._newest is not None and not self._newest[1].done()

    def _tell(self, upload: Future[None]) -> None:
        """Tells `on_sent` how an upload ended, and ends as it did."""
        self._on_sent(upload.exception())
        upload.result()

    def _upload(self, publication: Publication) -> None:
        """Sends until it succeeds, TRIES times at most; then the last OSError.

        What was replaced by another save is not tried again.
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
