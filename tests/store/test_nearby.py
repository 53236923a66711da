"""An artifact is read from the nearest copy: this node's disk, the node that made it, the store.

What is damaged there is noticed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.store import nearby as module
from rlpipe.store.artifacts import commit, new_attempt, read_manifest
from rlpipe.store.backend import Store, open_store
from rlpipe.store.disk import Disk
from rlpipe.store.documents import sealed
from rlpipe.store.local_copy import materialise
from rlpipe.store.nearby import Nearby, NodeDisk, nearer
from rlpipe.store.transfer import PART_BYTES

FOLDER, MOMENT = "runs/a/rl/00000/policy", "2026-03-04T05:06:07.000+00:00"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * (PART_BYTES + 5)}
Damage = Callable[[Path], object]


class PlayedServer(Disk):
    """Another node's files, and what was read of them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []

    def read(self, key: str) -> bytes:
        self.reads.append(key)
        return super().read(key)

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        self.reads.append(key)
        return super().copy_part(key, start, end, descriptor)


class World:
    """A policy on the disk of the node that made it; `land` puts it into the store."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, url: str = "") -> None:
        self.store, self.disk, self.target = (
            open_store(f"file://{folder}/store"),
            folder / "published",
            folder / "weights",
        )
        attempt = new_attempt()
        self.records = [
            FileRecord(f"{attempt}/{name}", len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()
        ]
        for record in self.records:
            self.path(record.plain_name).parent.mkdir(parents=True, exist_ok=True)
            self.path(record.plain_name).write_bytes(FILES[record.plain_name])
        self.manifest = Manifest("a", "rl", 0, "policy", {}, "0", {}, self.records, {}, 1, "x", MOMENT, MOMENT)
        document = sealed(self.manifest)
        self.ref = ArtifactRef(FOLDER, hashlib.sha256(document).hexdigest())
        self.nearby = Nearby(FOLDER, document.decode(), [NodeDisk(str(self.disk), url)])
        self.server = PlayedServer(folder / "elsewhere")
        monkeypatch.setattr(module, "FileServer", lambda url, key: self.server)

    def path(self, name: str) -> Path:
        record = next(record for record in self.records if record.plain_name == name)
        return self.disk / FOLDER / record.name

    def move_to_the_server(self) -> None:
        self.disk.rename(self.disk.parent / "elsewhere")

    def land(self) -> None:
        for record in self.records:
            self.store.put(f"{FOLDER}/{record.name}", FILES[record.plain_name])
        assert commit(self.store, FOLDER, self.manifest)[0] == self.ref

    def near(self) -> Store:
        return nearer(self.store, self.nearby, dict.fromkeys(self.nearby.servers, "key"))

    def fetched(self) -> dict[str, bytes]:
        folder = materialise(self.near(), self.ref, self.target)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_store_itself_where_nothing_is_nearer(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert nearer(store, None, {}) is store


def test_from_this_disk_by_another_name_and_a_later_save_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    assert read_manifest(world.near(), FOLDER, world.ref.sha256) == world.manifest
    folder = materialise(world.near(), world.ref, world.target)
    assert (folder / "model.safetensors").samefile(world.path("model.safetensors"))
    shutil.rmtree(world.disk)  # as the next save does
    assert world.fetched() == FILES
    assert world.server.reads == []


def test_from_the_server_then_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, "http://trainer/files")
    world.move_to_the_server()
    assert world.fetched() == FILES
    assert {key.rpartition("/")[2] for key in world.server.reads} == {*FILES}
    shutil.rmtree(world.target)
    shutil.rmtree(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="missing from the store"):
        world.fetched()
    world.land()
    assert world.fetched() == FILES


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


@pytest.mark.parametrize("name", [*FILES])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_what_is_damaged_on_the_server_comes_from_the_store_and_before_it_has_it_is_refused(
    name: str, damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, "http://trainer/files")
    damage(world.path(name))
    world.move_to_the_server()
    with pytest.raises(StoreError, match="missing from the store"):
        world.fetched()
    world.land()
    assert world.fetched() == FILES


@pytest.mark.parametrize(("name", "damage"), [("config.json", cut), ("config.json", flip), ("model.safetensors", cut)])
def test_what_is_damaged_on_this_disk_comes_from_the_server_or_the_store(
    name: str, damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a large file of this disk are those that its writer hashed: the upload hashes
    them again, and nothing is read twice."""
    world = World(tmp_path, monkeypatch, "http://trainer/files")
    shutil.copytree(world.disk, tmp_path / "elsewhere")
    damage(world.path(name))
    assert world.fetched() == FILES
    assert [key.rpartition("/")[2] for key in world.server.reads[:1]] == [name]
    shutil.rmtree(world.target)
    world = World(tmp_path / "without", monkeypatch)
    damage(world.path(name))
    world.land()
    assert world.fetched() == FILES


def test_a_file_that_is_deleted_while_it_is_linked_comes_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.land()

    def gone(source: Path, target: Path) -> None:
        raise FileNotFoundError(source)

    monkeypatch.setattr(module, "link", gone)
    assert world.fetched() == FILES


def test_other_artifacts_come_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, "http://trainer/files")
    world.store.put("runs/a/other", b"other")
    near = world.near()
    assert near.read("runs/a/other") == b"other" and near.size("runs/a/other") == 5
    assert near.create("runs/a/new", b"new") and world.store.read("runs/a/new") == b"new"
    assert world.server.reads == []


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    evil = Manifest("a", "rl", 0, "policy", {}, "0", {}, [FileRecord("a1/../../x", 1, "0")], {}, 1, "x", MOMENT, MOMENT)
    with pytest.raises(StoreError, match="leads elsewhere"):
        nearer(world.store, Nearby(FOLDER, sealed(evil).decode(), [NodeDisk(str(tmp_path), "")]), {})
