"""The cache of a node: what it gives is what the store has, whatever happens to its files; and it
stays within its bounds."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef
from rlpipe.store import cache as module
from rlpipe.store.artifacts import check_file, read_cached, read_manifest, read_records
from rlpipe.store.backend import Store, open_store
from rlpipe.store.cache import SHARE_MAX, Cache
from rlpipe.store.mapped import map_records
from rlpipe.trainer.batches import BatchRow
from tests import trainer_world as world
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT
from tests.s3_world import S3Proxy, S3Server

BYTES_MAX, FILES_MAX = 400, 6
# six of the large ones have too many bytes, seven of the small ones are too many, the last is too
# large for itself
FILES = [bytes([number]) * size for number, size in enumerate((0, *range(40, 101, 6), BYTES_MAX // 4 + 1))]
Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "torn": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "changed": lambda data: b"x" + data[1:],
}
# a process that fills a cache until it is killed
FILLING = """
import hashlib, itertools, pathlib, sys
from rlpipe.store.cache import Cache
cache = Cache(pathlib.Path(sys.argv[1]))
for number in itertools.count():
    data = number.to_bytes(8, "little") * 500_000
    cache.add(hashlib.sha256(data).hexdigest(), data)
    print(number, flush=True)
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def small_cache(folder: Path) -> Cache:
    return Cache(folder, BYTES_MAX, FILES_MAX)


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir()]


steps = st.tuples(st.sampled_from(["add", "add_file", "read", "link", *DAMAGES]), st.integers(0, len(FILES) - 1))


@given(st.lists(steps, max_size=40))
@example([("add", number) for number in range(len(FILES))])
@example([("add_file", number) for number in reversed(range(len(FILES)))])
def test_it_gives_what_was_added_or_nothing_and_stays_within_its_bounds(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, source, target = (Path(scratch) / name for name in ("cache", "source", "target"))
        folder.mkdir()
        cache = small_cache(folder)
        for what, number in steps:
            data, entry = FILES[number], folder / sha256(FILES[number])
            if what == "add":
                cache.add(sha256(data), data)
            elif what == "add_file":
                source.write_bytes(data)
                cache.add_file(sha256(data), source)
                source.unlink()
            elif what in DAMAGES and entry.exists():
                entry.write_bytes(DAMAGES[what](data))
            is_here, is_whole = entry.exists(), entry.exists() and entry.read_bytes() == data
            assert what[:3] != "add" or is_here == (len(data) <= BYTES_MAX // SHARE_MAX), "the newest stays"
            if what == "read":
                assert cache.read(sha256(data)) == (data if is_whole else None)
            elif what == "link":
                assert cache.link(sha256(data), target) == target.exists() == is_whole
                assert not is_whole or target.read_bytes() == data
                target.unlink(missing_ok=True)
            assert what in DAMAGES or (len(sizes(folder)) <= FILES_MAX and sum(sizes(folder)) <= BYTES_MAX + 10)
            assert what not in ("read", "link") or entry.exists() == is_whole, "a damaged one is deleted"


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache, data = small_cache(tmp_path), [bytes([number]) for number in range(FILES_MAX + 2)]
    for number, one in enumerate(data[:FILES_MAX]):
        cache.add(sha256(one), one)
        os.utime(tmp_path / sha256(one), (number, number))
    assert cache.read(sha256(data[0])) == data[0] and cache.link(sha256(data[2]), tmp_path / "second name")
    (tmp_path / "second name").unlink()
    for one in data[FILES_MAX:]:
        cache.add(sha256(one), one)
    assert [cache.read(sha256(one)) is not None for one in data] == [True, False, True, False, True, True, True, True]


def test_writers_and_readers_at_once_get_whole_files(tmp_path: Path) -> None:
    """Each has a cache of its own on one folder, as processes have."""
    files = [os.urandom(60) for _ in range(12)]

    def work(seed: int) -> int:
        cache, hits = small_cache(tmp_path), 0
        for step in range(300):
            data, target = files[(seed + step * step) % len(files)], tmp_path.parent / f"target-{seed}"
            if (found := cache.read(sha256(data))) is None:
                cache.add(sha256(data), data)
            assert found in (None, data)
            if cache.link(sha256(data), target):
                assert target.read_bytes() == data
                target.unlink()
                hits += 1
        return hits

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(6))) > 0
    small_cache(tmp_path).add(sha256(b""), b"")
    assert len(sizes(tmp_path)) <= FILES_MAX and sum(sizes(tmp_path)) <= BYTES_MAX
    assert not list(tmp_path.glob("*.tmp"))


def test_a_writer_that_is_killed_leaves_no_torn_entry_and_what_it_leaves_goes(tmp_path: Path) -> None:
    for killed_after in range(4):
        program = [sys.executable, "-c", FILLING, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(killed_after + 1):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=DEADLINE_S)
    entries = [path for path in tmp_path.iterdir() if not path.name.endswith(".tmp")]
    assert len(entries) >= 4 and all(sha256(path.read_bytes()) == path.name for path in entries)
    (tmp_path / f"{sha256(b'x')}.12345678.tmp").write_bytes(b"torn")
    for number in range(FILES_MAX):
        data = bytes([number])
        small_cache(tmp_path).add(sha256(data), data)
    assert sizes(tmp_path) == [1] * FILES_MAX


def test_a_name_that_is_no_sha256_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "secret").write_bytes(b"mine")
    cache = Cache(tmp_path / "cache")
    for name in ("../secret", str(tmp_path / "secret"), "", "0" * 63, "A" * 64):
        cache.add(name, b"theirs")
        assert cache.read(name) is None and not cache.link(name, tmp_path / "target")
    assert (tmp_path / "secret").read_bytes() == b"mine" and sizes(tmp_path / "cache") == []
    assert not (tmp_path / "target").exists()


def test_without_a_folder_it_stays_empty(tmp_path: Path) -> None:
    cache = open_store(f"file://{tmp_path}/store", tmp_path / "cache").cache
    cache.add(sha256(b"x"), b"x")
    assert cache.read(sha256(b"x")) is None and not (tmp_path / "cache").exists()


# of a store on S3


@pytest.fixture
def node(s3_server: S3Server, s3_proxy: S3Proxy, tmp_path: Path) -> Callable[[str], Store]:
    """A store as a process of a node opens it, whose requests are counted."""
    url = s3_server.url()
    return lambda name: open_store(url, tmp_path / name)


def reads(proxy: S3Proxy) -> list[str]:
    """The files that were read since the last call, by their names."""
    names = [request.path.rpartition("/")[2] for request in proxy.requests if request.method == "GET"]
    proxy.requests.clear()
    return sorted(names)


def read_all(store: Store, ref: ArtifactRef, folder: Path) -> list[list[float]]:
    """The rewards of a batch, read as stages and as two ranks of a trainer do."""
    mapped = [map_records(store, ref, "batch.parquet", BatchRow, folder / str(rank)) for rank in range(2)]
    whole = [read_records(store, ref, "batch.parquet", BatchRow) for _ in range(2)]
    assert read_manifest(store, ref.folder, ref.sha256).file("batch.parquet").bytes > 0
    shutil.rmtree(folder)
    return [[row.reward for row in rows] for rows in mapped + whole]


def test_a_node_reads_nothing_that_it_wrote_and_anything_else_once(
    node: Callable[[str], Store], s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    ref = world.batch(node("a"), "batch", world.rollout_rows(3, 2))
    expected = read_all(node("a"), ref, tmp_path / "ranks")
    assert reads(s3_proxy) == [], "another process of the node that wrote it"
    for _ in range(3):
        assert read_all(node("b"), ref, tmp_path / "ranks") == expected
    assert reads(s3_proxy) == ["batch.parquet", "manifest.json"], "another node"
    for _ in range(2):
        read_records(node("c"), ref, "batch.parquet", BatchRow)
    assert reads(s3_proxy) == ["batch.parquet", "manifest.json"], "a node whose stages alone read"
    for rank in range(2):
        map_records(node("d"), ref, "batch.parquet", BatchRow, tmp_path / str(rank))
    assert reads(s3_proxy) == ["batch.parquet", "manifest.json"], "a node whose trainer alone reads"
    uncached = open_store(node("a").url)
    assert read_all(uncached, ref, tmp_path / "ranks") == expected and len(reads(s3_proxy)) > 8


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_read_from_the_store_again(
    node: Callable[[str], Store], s3_proxy: S3Proxy, tmp_path: Path, damage: str
) -> None:
    ref = world.batch(node("a"), "batch", world.rollout_rows(3, 2))
    expected = read_all(node("a"), ref, tmp_path / "ranks")
    reads(s3_proxy)
    for entry in (tmp_path / "a").iterdir():
        entry.write_bytes(DAMAGES[damage](entry.read_bytes()))
    assert read_all(node("a"), ref, tmp_path / "ranks") == expected
    assert reads(s3_proxy) == ["batch.parquet", "manifest.json"]
    assert read_all(node("a"), ref, tmp_path / "ranks") == expected and reads(s3_proxy) == []


def test_damage_in_the_store_is_seen_by_whoever_looks_at_the_store(
    node: Callable[[str], Store], tmp_path: Path
) -> None:
    store = node("a")
    ref = world.batch(store, "batch", world.rollout_rows(3, 2))
    file = read_manifest(store, ref.folder, ref.sha256).file("batch.parquet")
    store.put(f"{ref.folder}/{file.name}", b"x" * file.bytes)
    with pytest.raises(StoreError, match="sha256"):
        check_file(store, ref.folder, file)  # as `rlpipe verify` does
    with pytest.raises(StoreError, match="sha256"):
        read_cached(node("b"), ref.folder, file)
    assert not (tmp_path / "b").exists(), "what is damaged does not enter"


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "no space")


def write_half(path: Path, data: bytes, write: Callable[[Path, bytes], int] = Path.write_bytes) -> int:
    """What a disk does that becomes full in the middle of a file of a cache."""
    write(path, data[: len(data) // 2] if path.suffix == ".tmp" else data)
    return no_space() if path.suffix == ".tmp" else len(data)


@pytest.mark.parametrize("fault", ["write", "replace", "link", "utime", "is a file"])
def test_a_disk_that_takes_nothing_ends_nothing(
    node: Callable[[str], Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected = read_all(node("a"), ref := world.batch(node("a"), "batch", world.rollout_rows(3, 2)), tmp_path / "ranks")
    if fault == "is a file":
        (tmp_path / "b").write_bytes(b"")
    elif fault == "write":
        monkeypatch.setattr(Path, "write_bytes", write_half)
    else:
        monkeypatch.setattr(module if fault == "link" else module.os, fault, no_space)
    assert read_all(node("b"), ref, tmp_path / "ranks") == expected
    assert fault == "is a file" or not list(tmp_path.glob("b/*.tmp"))


def test_it_takes_no_more_than_the_disk_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, free = small_cache(tmp_path), 1000
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage._replace(free=free))
    for number in range(1, 5):
        cache.add(sha256(bytes([number]) * 50), bytes([number]) * 50)
    assert sum(sizes(tmp_path)) == 200
    free = 500  # others have filled it: with each entry that is deleted it has 50 more
    cache.add(sha256(b"y"), b"y")
    assert sum(sizes(tmp_path)) == 101, "a quarter of what is left"
    free = 0
    cache.add(sha256(b"z"), b"z")
    assert sum(sizes(tmp_path)) == 1, "nothing new, and what was used longest ago is gone"


def test_what_cannot_be_deleted_ends_no_bound(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    (tmp_path / "0").mkdir()  # a folder of somebody else
    kept = tmp_path / sha256(b"kept")
    cache.add(kept.name, b"kept")
    os.utime(kept, (1, 1))
    unlinked = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == kept:
            raise PermissionError(path)
        unlinked(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        for number in range(40):
            cache.add(sha256(bytes([number])), bytes([number]))
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) <= FILES_MAX and kept.exists()
