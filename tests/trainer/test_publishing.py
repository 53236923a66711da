"""Uploads behind a save: tried again, but not for ever; what changed on the
disk is refused; who asks is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpipe.base.errors import StoreError
from rlpipe.store.artifacts import BLOCK_BYTES
from rlpipe.store.backend import Store, open_store
from rlpipe.store.disk import Disk
from rlpipe.store.transfer import FileContent
from rlpipe.trainer import publishing
from rlpipe.trainer.publishing import TRIES, Publication, Uploads, publish_bytes, published_file, published_in_blocks
from tests.deadlines import DEADLINE_S

POLICY, STATE = "runs/a/rl/00000/policy", "runs/a/rl/00000/state"


class PlayedStore(Store):
    """A disk whose uploads fail so often first, and wait for a gate."""

    def __init__(self, folder: Path, faults: int = 0) -> None:
        super().__init__(f"file://{folder}", folder, Disk(folder))
        self.faults, self.tries, self.gate = faults, 0, threading.Event()
        self.gate.set()

    def put_file(self, key: str, source: Path) -> FileContent:
        self.gate.wait(DEADLINE_S)
        self.tries += 1
        if self.tries <= self.faults:
            raise OSError("the store is away")
        return super().put_file(key, source)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "WAIT_FIRST_S", 0.001)


def publication(disk: Path, attempt: str = "a1") -> Publication:
    records = {POLICY: publish_bytes(disk / POLICY / attempt, "model.safetensors", b"weights")}
    path = disk / STATE / attempt / "state.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"state")
    assert published_in_blocks(path, BLOCK_BYTES)[0] == published_file(path)
    records[STATE] = published_file(path)
    keys = {folder: {f"{folder}/{record.name}": record} for folder, record in records.items()}
    return Publication(attempt, keys[POLICY], keys[STATE])


def outcome(uploads: Uploads, attempt: str = "a1") -> BaseException | None:
    sending = uploads.of(attempt)
    assert sending is not None
    return sending.exception(timeout=DEADLINE_S)


def test_the_policy_stays_for_engines_and_the_state_goes(tmp_path: Path) -> None:
    store, disk = PlayedStore(tmp_path / "store", faults=TRIES - 1), tmp_path / "published"
    uploads, made = Uploads(store, disk), publication(disk)
    assert uploads.of("a1") is None and not uploads.is_busy
    store.gate.clear()
    uploads.begin(made)
    assert uploads.is_busy
    store.gate.set()
    assert outcome(uploads) is None and not uploads.is_busy
    assert {store.read(key) for key in (*made.policy, *made.beside)} == {b"weights", b"state"}
    assert [(disk / key).exists() for key in (*made.policy, *made.beside)] == [True, False]
    assert uploads.of("a2") is None


def test_tries_have_an_end(tmp_path: Path) -> None:
    store, disk = PlayedStore(tmp_path / "store", faults=1_000), tmp_path / "published"
    uploads, made = Uploads(store, disk), publication(disk)
    uploads.begin(made)
    assert isinstance(outcome(uploads), OSError)
    assert TRIES <= store.tries <= TRIES * 2  # files
    assert all((disk / key).exists() for key in (*made.policy, *made.beside))


def change(path: Path) -> None:
    path.write_bytes(b"other")


@pytest.mark.parametrize(
    ("damage", "fault"), [(change, "changed on this disk"), (Path.unlink, "was deleted before it was in the store")]
)
def test_what_is_not_as_it_was_published_is_refused_at_once(
    damage: Callable[[Path], None], fault: str, tmp_path: Path
) -> None:
    store, disk = PlayedStore(tmp_path / "store"), tmp_path / "published"
    uploads, made = Uploads(store, disk), publication(disk)
    damage(disk / next(iter(made.policy)))
    uploads.begin(made)
    error = outcome(uploads)
    assert isinstance(error, StoreError) and fault in str(error)
    assert store.tries <= 2


def test_what_a_rank_of_another_node_has_sent_is_looked_for_in_the_store(tmp_path: Path) -> None:
    store, disk = PlayedStore(tmp_path / "store"), tmp_path / "published"
    uploads, made = Uploads(store, disk), publication(disk)
    key = next(iter(made.beside))
    open_store(store.url).put(key, b"state")
    (disk / key).unlink()
    uploads.begin(made)
    assert outcome(uploads) is None
    assert store.tries == 1


def test_what_was_replaced_by_another_save_is_not_tried_again(tmp_path: Path) -> None:
    store, disk = PlayedStore(tmp_path / "store", faults=2), tmp_path / "published"
    uploads, old = Uploads(store, disk), publication(disk, "a1")
    store.gate.clear()
    uploads.begin(old)
    first = uploads.of("a1")
    new = publication(disk, "a2")
    uploads.begin(new)
    assert first is not None and uploads.of("a1") is None
    store.gate.set()
    assert isinstance(first.exception(timeout=DEADLINE_S), OSError)
    assert outcome(uploads, "a2") is None
    assert store.read(next(iter(new.policy))) == b"weights"
