"""A file whose parts have known hashes: whatever a node sends instead is noticed when the part
arrives, never passed on, and taken from the next place."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.store import backend, local_copy, nearby, relay, transfer
from rlpipe.store.artifacts import Blocks, blocks_of, commit
from rlpipe.store.backend import open_store
from rlpipe.store.disk import Disk
from rlpipe.store.documents import sealed
from rlpipe.store.local_copy import materialise
from rlpipe.store.nearby import Nearby, NodeDisk, nearer
from rlpipe.store.relay import Relay

FOLDER, MOMENT, NAME = "runs/a/rl/00000/policy", "2026-03-04T05:06:07.000+00:00", "try/model.safetensors"
EXAMPLES = settings(max_examples=40)
URL, PAGE = "http://trainer/files", 4096  # a part here: the least that can be mapped
SIZE = 4 * PAGE + 100
DATA = b"".join(hashlib.sha256(b"%d" % index).digest() for index in range(SIZE // 32 + 1))[:SIZE]


class Arrivals(Relay):
    """What is passed on: each part as it was on this disk when it was said to be there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "http://here/files")
        self.passed: dict[int, bytes] = {}

    def _named(self, key: str, path: Path) -> relay.RelayedFile:
        passed = self.passed

        class Noted(relay.RelayedFile):
            def arrived(self, start: int) -> None:
                passed[start] = path.read_bytes()[start : start + PAGE]

        return Noted(path)


@dataclass(frozen=True)
class World:
    """A policy of one file, the node that made it, and the store."""

    folder: Path

    def nearby(self, parts: dict[str, Blocks]) -> tuple[ArtifactRef, Nearby, Manifest]:
        records = [FileRecord(NAME, SIZE, hashlib.sha256(DATA).hexdigest())]
        manifest = Manifest("a", "rl", 0, "policy", {}, "0", {}, records, {}, 1, "x", MOMENT, MOMENT)
        document = sealed(manifest)
        ref = ArtifactRef(FOLDER, hashlib.sha256(document).hexdigest())
        return ref, Nearby(FOLDER, document.decode(), [NodeDisk("/nowhere", URL)], parts=parts), manifest

    def parts(self) -> dict[str, Blocks]:
        self.folder.joinpath("right").write_bytes(DATA)
        return {NAME: blocks_of(self.folder / "right", PAGE)}

    def send(self, data: bytes) -> None:
        path = self.folder / "server" / FOLDER / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def fetched(self, parts: dict[str, Blocks], stored: bytes | None, passed: Arrivals) -> bytes:
        """The file as a host gets it, where the store has `stored` as its content."""
        ref, near, manifest = self.nearby(parts)
        store = open_store(f"file://{self.folder}/store")
        if stored is not None:
            store.put(f"{FOLDER}/{NAME}", stored)
            assert commit(store, FOLDER, manifest)[0] == ref
        folder = materialise(nearer(store, near, {URL: "key"}, passed), ref, self.folder / "weights")
        return (folder / "model.safetensors").read_bytes()


def flipped(at: int, bits: int) -> bytes:
    return DATA[:at] + bytes([DATA[at] ^ bits]) + DATA[at + 1 :]


def swapped(first: int, second: int) -> bytes:
    parts = [DATA[at : at + PAGE] for at in range(0, 4 * PAGE, PAGE)]
    parts[first], parts[second] = parts[second], parts[first]
    return b"".join(parts) + DATA[4 * PAGE :]


DAMAGED = st.one_of(
    st.builds(flipped, st.integers(0, SIZE - 1), st.integers(1, 255)),
    st.builds(lambda size: DATA[:size], st.integers(0, SIZE - 1)),
    st.builds(swapped, st.integers(0, 3), st.integers(0, 3)).filter(lambda data: data != DATA),
)


@pytest.fixture(scope="module")
def new_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], World]]:
    """Makes a world of its own for each example."""
    above, numbers = tmp_path_factory.mktemp("parts"), itertools.count()

    def made() -> World:
        folder = above / str(next(numbers))
        folder.mkdir()
        patched.setattr(nearby, "FileServer", lambda url, key: Disk(folder / "server"))
        return World(folder)

    with pytest.MonkeyPatch.context() as patched:
        for module in (backend, local_copy, nearby, relay, transfer):
            patched.setattr(module, "PART_BYTES", PAGE)
        yield made


@EXAMPLES
@given(sent=DAMAGED)
def test_a_flipped_byte_a_cut_and_swapped_parts_come_from_the_store_and_are_never_passed_on(
    new_world: Callable[[], World], sent: bytes
) -> None:
    world = new_world()
    world.send(sent)
    passed = Arrivals(world.folder / "relayed")
    with pytest.raises(StoreError, match="missing from the store"):
        world.fetched(world.parts(), None, passed)
    assert all(data == DATA[start : start + PAGE] for start, data in passed.passed.items())
    assert world.fetched(world.parts(), DATA, passed) == DATA
    assert passed.passed == {start: DATA[start : start + PAGE] for start in range(0, SIZE, PAGE)}


@EXAMPLES
@given(sent=DAMAGED, stored=DAMAGED)
def test_what_is_damaged_in_every_place_is_refused(new_world: Callable[[], World], sent: bytes, stored: bytes) -> None:
    world = new_world()
    world.send(sent)
    passed = Arrivals(world.folder / "relayed")
    with contextlib.suppress(StoreError):
        assert world.fetched(world.parts(), stored, passed) == DATA, "each part was right in one place"
    assert all(path.read_bytes() == DATA for path in (world.folder / "weights").glob("[!.]*/model.safetensors"))
    assert all(data == DATA[start : start + PAGE] for start, data in passed.passed.items())


@EXAMPLES
@given(wrong=DAMAGED.filter(lambda data: len(data) == SIZE))
def test_hashes_of_other_bytes_are_believed_by_nobody(new_world: Callable[[], World], wrong: bytes) -> None:
    """They came with the manifest: bytes that do not have them are not those that were saved."""
    world = new_world()
    world.send(DATA)
    (world.folder / "wrong").write_bytes(wrong)
    with pytest.raises(StoreError, match="damaged in the store"):
        world.fetched({NAME: blocks_of(world.folder / "wrong", PAGE)}, DATA, Arrivals(world.folder / "relayed"))


@pytest.mark.parametrize("parts", [{}, {NAME: "other size"}, {NAME: "too few"}])
@pytest.mark.parametrize("sent", [DATA, flipped(SIZE - 1, 1)])
def test_without_hashes_of_its_parts_the_whole_file_is_hashed(
    new_world: Callable[[], World], parts: dict[str, str], sent: bytes
) -> None:
    """A trainer of older code sends none; one of newer code may have parts of another size."""
    world = new_world()
    right = world.parts()[NAME]
    given = {"other size": replace(right, size=2 * PAGE), "too few": replace(right, sha256s=right.sha256s[1:])}
    world.send(sent)
    near = {name: given[kind] for name, kind in parts.items()}
    if sent != DATA:
        with pytest.raises(StoreError, match="missing from the store"):
            world.fetched(near, None, Arrivals(world.folder / "relayed"))
    assert world.fetched(near, DATA, Arrivals(world.folder / "relayed")) == DATA
