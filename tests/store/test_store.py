"""The store protocol on both kinds of URL: exclusive, atomic, verified."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.hashing import canonical_json, sha256_of
from rlpipe.base.manifests import Manifest
from rlpipe.config.source import read_config
from rlpipe.store import artifacts, local_copy
from rlpipe.store.backend import Store, check_access, check_readable, open_store
from rlpipe.store.opening import create_or_continue
from tests.deadlines import DEADLINE_S
from tests.paths import PRESETS, ROOT


def manifest_of(files: list, **changes: object) -> Manifest:
    settings = {"rl.group_size": 8}
    manifest = Manifest(
        run="a", phase="rl", iteration=3, stage="scores", inputs={"rollouts": "1" * 64},
        settings_sha256=sha256_of(settings),
        settings=settings, files=files, metrics={"n": 1}, weight_version=3,
        code_version="x", started_at="t0", ended_at="t1",
    )  # fmt: skip
    return replace(manifest, **changes)


def test_put_read_list_delete(store: Store) -> None:
    store.put("runs/a/x", b"one")
    store.put("runs/a/x", b"two")
    store.put("runs/a/deep/y", b"three")
    assert store.read("runs/a/x") == b"two"
    assert store.list("runs/a") == ["runs/a/deep/y", "runs/a/x"]
    assert store.folders("runs") == ["a"]
    assert store.list("runs/none") == []
    assert store.folders("nothing") == []
    store.delete("runs/a/x")
    assert not store.exists("runs/a/x")
    store.delete("runs/a/deep/y")
    assert store.list("runs/a/deep") == store.list("runs/a") == []


def test_a_listing_shows_what_another_client_has_just_written(store: Store) -> None:
    assert store.list("runs") == []
    open_store(store.url).put("runs/b/file", b"x")
    assert store.list("runs") == ["runs/b/file"]


def test_create_is_exclusive(store: Store) -> None:
    assert store.create("runs/a/manifest.json", b"first")
    assert not store.create("runs/a/manifest.json", b"second")
    assert store.read("runs/a/manifest.json") == b"first"


def test_of_many_creators_at_once_exactly_one_wins(store: Store) -> None:
    won: list[int] = []
    clients = [open_store(store.url) for _ in range(8)]
    barrier = threading.Barrier(len(clients))

    def create(index: int) -> None:
        barrier.wait(timeout=DEADLINE_S)
        if clients[index].create("race", f"writer {index}".encode()):
            won.append(index)

    threads = [threading.Thread(target=create, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    assert len(won) == 1
    assert store.read("race") == f"writer {won[0]}".encode()


def test_the_first_manifest_wins_and_the_loser_answers_with_it(store: Store) -> None:
    first = artifacts.write_bytes(store, "runs/a/rl/00003/scores", "attempt1", "scores.parquet", b"data one")
    second = artifacts.write_bytes(store, "runs/a/rl/00003/scores", "attempt2", "scores.parquet", b"data two")
    ref, standing = artifacts.commit(store, "runs/a/rl/00003/scores", manifest_of([first]))
    again, loser = artifacts.commit(store, "runs/a/rl/00003/scores", manifest_of([second], ended_at="later"))
    assert again == ref
    assert loser == standing
    assert artifacts.read_file(store, ref.folder, loser.file("scores.parquet")) == b"data one"


def test_other_settings_are_refused_with_the_fields_and_the_way_out(store: Store) -> None:
    artifacts.commit(store, "f", manifest_of([]))
    with pytest.raises(UserError, match=r"rl\.group_size: 8 -> 16.*rlpipe fork a --at 2"):
        artifacts.commit(store, "f", manifest_of([], settings={"rl.group_size": 16}))
    with pytest.raises(UserError, match="input rollouts"):
        artifacts.commit(store, "f", manifest_of([], inputs={"rollouts": "2" * 64}))


def test_a_changed_byte_is_an_error_that_names_the_file(store: Store) -> None:
    record = artifacts.write_bytes(store, "f", "a1", "x.bin", b"payload")
    ref, manifest = artifacts.commit(store, "f", manifest_of([record]))
    store.put("f/a1/x.bin", b"pAyload")
    with pytest.raises(StoreError, match=r"f/a1/x\.bin"):
        artifacts.read_file(store, "f", record)
    with pytest.raises(StoreError, match="expected"):
        artifacts.read_manifest(store, "f", "0" * 64)
    with pytest.raises(StoreError, match="missing"):
        artifacts.read_manifest(store, "nowhere")
    assert artifacts.read_manifest(store, "f", ref.sha256) == manifest


def test_a_document_of_a_later_version_is_refused(store: Store) -> None:
    later = {**dataclasses.asdict(manifest_of([])), "schema_version": 2}
    store.put("f/manifest.json", canonical_json(later | {"seal": sha256_of(later)}))
    with pytest.raises(
        StoreError,
        match=(
            "written by a later version of rlpipe, or by hand: schema_version: Input should be 1; "
            "it needs a newer rlpipe"
        ),
    ):
        artifacts.read_manifest(store, "f")


def test_materialise_verifies_and_appears_whole(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "w.bin"
    source.write_bytes(bytes(range(256)) * 1000)
    record = artifacts.write_file(store, "p", "a1", "w.bin", source)
    assert record.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    ref, _ = artifacts.commit(store, "p", manifest_of([record]))
    folder = local_copy.materialise(store, ref, tmp_path / "local")
    assert (folder / "w.bin").read_bytes() == source.read_bytes()
    assert local_copy.materialise(store, ref, tmp_path / "local") == folder
    store.put("p/a1/w.bin", b"torn")
    with pytest.raises(StoreError, match=r"w\.bin"):
        local_copy.materialise(store, ref, tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_parts_of_a_file_are_read_and_verified(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "BLOCK_BYTES", 1000)
    data = bytes(range(256)) * 100
    source = tmp_path / "w.bin"
    source.write_bytes(data)
    record = artifacts.write_file(store, "p", "a1", "w.bin", source)
    blocks = artifacts.blocks_of(source, artifacts.BLOCK_BYTES)
    monkeypatch.setattr("rlpipe.store.transfer.PART_BYTES", 1500)
    for start, end in ((0, 8), (999, 1001), (2000, 3000), (17, 25_599), (25_000, 25_600), (5, 5)):
        for known in (blocks, None):
            assert artifacts.read_range(store, "p", record, known, start, end) == data[start:end]
    artifacts.check_file(store, "p", record)
    with pytest.raises(StoreError, match=r"w\.bin is torn|w\.bin"):
        store.read_range("p/a1/w.bin", 25_000, 26_000)
    with pytest.raises(StoreError, match="is missing from the store"):
        store.read_range("p/a1/nothing", 0, 8)
    store.put("p/a1/w.bin", data[:-1] + b"x")
    assert artifacts.read_range(store, "p", record, blocks, 0, 25_000) == data[:25_000]
    with pytest.raises(StoreError, match=r"w\.bin is damaged between the bytes 25000 and 25600"):
        artifacts.read_range(store, "p", record, blocks, 25_100, 25_200)
    with pytest.raises(StoreError, match=r"w\.bin does not have the sha256"):
        artifacts.check_file(store, "p", record)
    for wrong in (data[:-1], data + b"x"):
        store.put("p/a1/w.bin", wrong)
        with pytest.raises(StoreError, match=rf"w\.bin has {len(wrong)} bytes; its manifest says 25600"):
            artifacts.check_file(store, "p", record)


def test_a_writer_killed_at_any_moment_leaves_the_whole_file_or_none(tmp_path: Path) -> None:
    program = (
        "import sys; from rlpipe.store.backend import open_store\n"
        f"store = open_store('file://{tmp_path}/s')\n"
        "print('ready', flush=True)\n"
        "for number in range(10**6): store.put('key', str(number).encode() * 100_000)\n"
    )
    for pause_s in (0.0, 0.005, 0.02, 0.05, 0.1):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            threading.Event().wait(pause_s)
            writer.kill()
        store = open_store(f"file://{tmp_path}/s")
        if store.exists("key"):
            data = store.read("key").decode()
            number = data[: len(data) // 100_000]
            assert data == number * 100_000


def test_a_folder_is_where_keys_are(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    for key in ("runs/a/lease/1.json", "runs/a/lease/2.json", "runs/b/run.json"):
        store.put(key, b"1")
    store.delete("runs/a/lease/1.json")
    assert (tmp_path / "store/runs/a/lease/2.json").exists()
    store.delete("runs/a/lease/2.json")
    assert [path.name for path in (tmp_path / "store/runs").iterdir()] == ["b"]
    store.delete("runs/b/run.json")
    assert not list((tmp_path / "store").iterdir()), "and a root that somebody made stays"


def test_folders_come_and_go_under_many_writers(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))

    def work(worker: int) -> None:
        for number in range(150):
            key = f"runs/{number % 3}/lease/{worker}.json"
            assert store.create(key, b"1") and store.read(key) == b"1"
            store.put(key, b"2")
            store.delete(key)

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(work, range(8)))
    assert not list((tmp_path / "store").iterdir())


def test_a_store_that_cannot_be_written_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="store="):
        check_access(open_store(f"file://{tmp_path}/file/store"))
    with pytest.raises(UserError, match="unknown scheme"):
        open_store("ftp://host/path")
    check_access(open_store(f"file://{tmp_path}/new/deep/store"))
    assert not (tmp_path / "new").exists()


def test_wrong_s3_credentials_are_said_to(s3_server: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY"):
        check_access(open_store("s3://rlpipe/x"))


@pytest.mark.slow
def test_a_store_that_is_only_read_may_be_read_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be read"):
        check_readable(open_store(f"file://{tmp_path}/file"))
    sets = ["run=a", f"store={tmp_path}/store", "sft.num_steps=0"]
    create_or_continue(read_config("tiny", sets, PRESETS))
    mount = "mount --bind store store && mount -o remount,ro,bind store store"
    shell = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*shell, mount], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    for command, needle in {
        "runs": "a   ",
        "show a": "0 iterations",
        "verify a": "0 faults",
        "gc a": "0 files",
    }.items():
        ended = subprocess.run(
            [*shell, f"{mount} && ! touch store/x && exec {sys.executable} -m flows.cli {command} --store store"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert ended.returncode == 0 and needle in ended.stdout, ended.stderr
