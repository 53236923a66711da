"""What an S3 store asks of its server, and what it does when the server, the network or another
process does not do its part."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rlpipe.base.errors import StoreError, UserError
from rlpipe.models.checkpoint import ranged_file
from rlpipe.processes.launch import free_port
from rlpipe.store import artifacts, local_copy, s3
from rlpipe.store.backend import Store, check_access, check_readable, open_store
from rlpipe.store.outside import outside_files
from rlpipe.store.transfer import PART_BYTES, PARTS
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT
from tests.s3_world import S3Proxy, S3Request, S3Server

MIB = 1024 * 1024
# SeaweedFS takes a backslash for a slash
names = st.text(
    st.characters(exclude_characters="/\\", exclude_categories=("Cs", "Cc")), min_size=1, max_size=40
).filter(lambda name: name not in (".", ".."))


def random_file(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(MIB) * (size // MIB) + os.urandom(size % MIB))
    return path


def run_program(program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names, names)
@example("a b", "c+d&e=f.json")
@example("100%", "%20#?;:@!$'()*,~")
@example("漢字 ü", '<x>"|^`{}[]')
def test_keys_hold_any_characters(store: Store, folder: str, name: str) -> None:
    key = f"{hashlib.sha256(f'{folder}/{name}'.encode()).hexdigest()[:8]}/{folder}/{name}"
    top = key.split("/")[0]
    assert store.create(key, b"first") and not store.create(key, b"second")
    store.put(key, b"third")
    assert store.exists(key) and store.size(key) == 5
    assert store.read(key) == b"third" and store.read_range(key, 1, 3) == b"hi"
    assert store.list(top) == [key] and store.folders(top) == [folder]
    store.delete(key)
    assert not store.exists(key) and store.list(top) == []


def test_a_large_file_goes_and_comes_in_parts_without_a_listing(
    s3_proxy: S3Proxy, s3_server: S3Server, tmp_path: Path
) -> None:
    store, size = open_store(s3_server.url()), 5 * PART_BYTES + 12_345
    source = random_file(tmp_path / "source", size)
    record = artifacts.write_file(store, "p", "a1", "w.bin", source)
    assert (record.bytes, record.sha256) == (size, artifacts.file_sha256(source))
    artifacts.check_file(store, "p", record)
    content = store.get_file("p/a1/w.bin", tmp_path / "target")
    assert (
        (content.bytes, content.sha256) == (size, record.sha256) == (size, artifacts.file_sha256(tmp_path / "target"))
    )
    assert store.read_range("p/a1/w.bin", 100, size - 100) == source.read_bytes()[100:-100]
    assert (
        store.create("p/manifest.json", b"x")
        and store.exists("p/manifest.json")
        and store.read("p/manifest.json") == b"x"
    )
    assert not [request for request in s3_proxy.requests if "list-type" in request.query]
    assert max(request.sent_bytes for request in s3_proxy.requests) <= PART_BYTES
    assert max(request.answered_bytes for request in s3_proxy.requests) <= PART_BYTES
    assert 1 < s3_proxy.most_at_once <= PARTS


def test_what_is_put_and_read_whole_may_be_larger_than_a_part(store: Store) -> None:
    data = os.urandom(MIB) * 40
    store.put("large", data)
    assert store.size("large") == len(data)
    assert store.read("large") == data
    store.put("empty", b"")
    assert store.read("empty") == b"" and store.read_range("empty", 0, 0) == b""
    with pytest.raises(StoreError, match="empty is torn"):
        store.read_range("empty", 3, 5)


def test_the_hash_is_of_what_was_stored_while_another_writes_the_source(store: Store, tmp_path: Path) -> None:
    source = random_file(tmp_path / "source", 3 * PART_BYTES)
    done = threading.Event()

    def overwrite() -> None:
        with source.open("r+b") as file:
            while not done.is_set():
                file.seek(int.from_bytes(os.urandom(3), "little"))
                file.write(os.urandom(1000))

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        record = artifacts.write_file(store, "p", "a1", "w.bin", source)
    finally:
        done.set()
        writer.join(timeout=DEADLINE_S)
    artifacts.check_file(store, "p", record)


def test_large_files_of_an_artifact_are_fetched_in_parts_beside_the_small_ones(store: Store, tmp_path: Path) -> None:
    sizes = {"large-1.bin": 2 * PART_BYTES + 1, "large-2.bin": PART_BYTES + 1} | {
        f"small-{index}": index for index in range(20)
    }
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    records = [artifacts.write_file(store, "p", "a1", name, tmp_path / name) for name in sizes]
    local = tmp_path / "local"
    local.mkdir()
    local_copy.fetch(store, "p", records, local)
    assert {name: artifacts.file_sha256(local / name) for name in sizes} == {
        record.plain_name: record.sha256 for record in records
    }
    (tmp_path / "large-1.bin").write_bytes(os.urandom(2 * PART_BYTES + 1))
    store.put_file("p/a1/large-1.bin", tmp_path / "large-1.bin")
    with pytest.raises(StoreError, match=r"large-1\.bin does not have the sha256"):
        local_copy.fetch(store, "p", records, local)


def loses_first(wanted: Callable[[S3Request], bool]) -> Callable[[S3Request], bool]:
    """Of the requests that are wanted, the first loses its answer."""
    left = [1]

    def loses(request: S3Request) -> bool:
        return wanted(request) and bool(left) and left.pop() == 1

    return loses


def is_create(request: S3Request) -> bool:
    return "*" in {value for name, value in request.headers.items() if name.lower() == "if-none-match"}


def test_a_create_whose_answer_was_lost_knows_itself(s3_proxy: S3Proxy, s3_server: S3Server) -> None:
    store = open_store(s3_server.url())
    s3_proxy.loses = loses_first(is_create)
    assert store.create("manifest.json", b"ours")
    assert not store.create("manifest.json", b"another's")
    s3_proxy.loses = loses_first(is_create)
    assert not store.create("manifest.json", b"another's")
    assert store.read("manifest.json") == b"ours"


def test_an_upload_whose_last_answer_was_lost_has_landed(
    s3_proxy: S3Proxy, s3_server: S3Server, tmp_path: Path
) -> None:
    store = open_store(s3_server.url())
    source = random_file(tmp_path / "source", 2 * PART_BYTES)
    s3_proxy.loses = loses_first(lambda request: request.method == "POST" and "uploadId" in request.query)
    record = artifacts.write_file(store, "p", "a1", "w.bin", source)
    artifacts.check_file(store, "p", record)


def test_lost_answers_to_parts_and_reads_cost_another_request(
    s3_proxy: S3Proxy, s3_server: S3Server, tmp_path: Path
) -> None:
    store = open_store(s3_server.url())
    source = random_file(tmp_path / "source", 2 * PART_BYTES)
    for wanted in (
        lambda request: "partNumber=2" in request.query,
        lambda request: request.method == "HEAD",
        lambda request: request.method == "GET",
    ):
        s3_proxy.loses = loses_first(wanted)
        record = artifacts.write_file(store, "p", "a1", "w.bin", source)
        artifacts.check_file(store, "p", record)


def test_a_writer_killed_in_the_middle_of_an_upload_leaves_nothing_to_see(
    s3_proxy: S3Proxy, s3_server: S3Server, tmp_path: Path
) -> None:
    url, source = s3_server.url(), random_file(tmp_path / "source", 4 * PART_BYTES)
    s3_proxy.holds = lambda method, query: "partNumber=3" in query
    program = (
        "import sys; from rlpipe.store.backend import open_store; open_store(sys.argv[1]).put_file('p/w.bin', "
        "__import__('pathlib').Path(sys.argv[2]))"
    )
    with run_program(program, url, str(source)) as writer:
        assert s3_proxy.held.wait(timeout=DEADLINE_S)
        writer.kill()
    s3_proxy.release.set()
    store = open_store(url)
    assert not store.exists("p/w.bin") and store.list("p") == [] and store.folders("p") == []


@pytest.mark.slow
def test_a_server_that_is_down_is_said_to(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for check in (check_access, check_readable):
        with pytest.raises(UserError, match=r"cannot be .*(refused).*AWS_ENDPOINT_URL"):
            check(open_store("s3://rlpipe/x"))


@pytest.mark.slow
def test_a_server_that_never_answers_is_not_waited_for(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "SILENCE", s3.SILENCE / 40)
    monkeypatch.setitem(s3.RETRY, "max_retries", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = open_store("s3://rlpipe/x")
        with pytest.raises(UserError, match=r"cannot be written.*Timeout"):
            check_access(store)
        with pytest.raises(OSError, match="Timeout"):
            store.create("manifest.json", b"x")


def test_a_bucket_that_does_not_exist_is_said_to(s3_server: S3Server) -> None:
    store = open_store("s3://no-such-bucket/x")
    with pytest.raises(UserError, match=r"cannot be read .*this bucket does not exist.*no-such-bucket"):
        check_readable(store)
    for call in (lambda: store.list("runs"), lambda: store.read("runs")):
        with pytest.raises(OSError, match="this bucket does not exist"):
            call()
    with pytest.raises(UserError, match="names no place"):
        open_store("s3://rlpipe//x")


def test_a_key_that_s3_cannot_have_is_an_oserror(s3_server: S3Server) -> None:
    store = open_store(s3_server.url())
    for call in (lambda: store.put("a\nb", b"x"), lambda: store.read("a\udc80"), lambda: store.list("a\nb")):
        with pytest.raises(OSError, match="Errno"):
            call()


def without_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_keys_and_endpoint_come_from_a_profile(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint, url = s3_server.endpoint, s3_server.url()
    without_keys(monkeypatch, tmp_path)
    (tmp_path / "AWS_SHARED_CREDENTIALS_FILE").write_text(
        "[team]\naws_access_key_id = test-key\naws_secret_access_key = test-secret\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "team")
    for config in (
        f"endpoint_url = {endpoint}\n",
        f"services = here\n[services here]\ns3 =\n  endpoint_url = {endpoint}\n",
    ):
        (tmp_path / "AWS_CONFIG_FILE").write_text(f"[profile team]\nregion = us-east-1\n{config}")
        store = open_store(url)
        store.put("x", b"one")
        assert store.read("x") == b"one"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UserError, match="nobody"):
        check_access(open_store(url))


def test_missing_keys_are_said_to(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_keys(monkeypatch, tmp_path)
    with pytest.raises(UserError, match=r"no keys.*AWS_SECRET_ACCESS_KEY"):
        check_access(open_store(s3_server.url()))


def test_wrong_keys_are_an_oserror_everywhere(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(s3_server.url())
    source = random_file(tmp_path / "source", 2 * PART_BYTES)
    calls: list[Callable[[], object]] = [
        lambda: store.exists("x"), lambda: store.read("x"), lambda: store.read_range("x", 0, 1),
        lambda: store.put("x", b"x"),
        lambda: store.create("x", b"x"), lambda: store.put_file("x", source),
        lambda: store.get_file("x", tmp_path / "target"),
        lambda: store.list("x"), lambda: store.folders("x"), lambda: store.delete("x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PermissionError):
            call()


def test_a_forked_process_uses_s3_or_is_refused_at_once(s3_server: S3Server) -> None:
    program = """
        import os, sys
        from rlpipe.store.backend import open_store
        store = open_store(sys.argv[1])
        if "after" in sys.argv[2]: store.put("x", b"parent")
        if os.fork() == 0:
            try:
                store.put("x", b"child")
                print(store.read("x").decode(), flush=True)
            except OSError as error:
                print(error.strerror, flush=True)
            os._exit(0)
        os.wait()
    """
    for when, said in (("before", "child"), ("after", "this process was forked from one that used S3")):
        with run_program(program, s3_server.url(), when) as process:
            output, errors = process.communicate(timeout=DEADLINE_S)
        assert said in output, errors


async def test_many_threads_of_one_process_use_a_store_at_once(store: Store) -> None:
    def use(index: int) -> bytes:
        assert store.create(f"runs/{index}/x", str(index).encode())
        return store.read(f"runs/{index}/x")

    answers = await asyncio.gather(*(asyncio.to_thread(use, index) for index in range(64)))
    assert answers == [str(index).encode() for index in range(64)]
    assert len(store.folders("runs")) == 64


def test_two_ranks_read_each_byte_of_a_state_once(s3_proxy: S3Proxy, s3_server: S3Server, tmp_path: Path) -> None:
    """Counted at the server: both read their rows of every tensor, in whole blocks
    of one MiB, and each the header."""
    import numpy as np

    store, rows = open_store(s3_server.url()), 16 * MIB // 4 // 256
    tensors = {
        f"param/{index}": np.random.default_rng(index).random((rows, 256), dtype=np.float32) for index in range(4)
    }
    save_file(tensors, tmp_path / "state.safetensors")
    record = artifacts.write_file(store, "s", "a1", "state.safetensors", tmp_path / "state.safetensors")
    blocks = artifacts.blocks_of(tmp_path / "state.safetensors", artifacts.BLOCK_BYTES)
    s3_proxy.requests.clear()
    for start, end in ((0, rows // 2), (rows // 2, rows)):
        file = ranged_file(
            "state", record.bytes, lambda first, last: artifacts.read_range(store, "s", record, blocks, first, last)
        )
        for name, tensor in tensors.items():
            assert np.array_equal(file.read(name, (start, end)).numpy(), tensor[start:end])
    read = sum(request.answered_bytes for request in s3_proxy.requests)
    spans = len(tensors) * 2  # each begins and ends within a block that its neighbour reads too
    assert record.bytes <= read <= record.bytes + (spans + 2 * 2) * MIB
    ranges = [request.headers.get("range", request.headers.get("Range", "")) for request in s3_proxy.requests]
    assert all(re.fullmatch(r"bytes=\d+-\d+", span) for span in ranges), json.dumps(ranges)


NOWHERE = {  # an endpoint and a bucket -> what is said
    ("http://127.0.0.1:99999", "b"): "Port out of range", ("http://127.0.0.1:0", "b"): "no address",
    ("http://127.0.0.1:-1", "b"): "no address",
    ("http://", "b"): "no address", ("nonsense", "b"): "begin with http", ("ftp://x", "b"): "begin with http",
    ("http://[::1", "b"): "no address",
    ("http://a b", "b"): "no address", ("http://x\n", "b"): "no address", ("http://\udcff", "b"): "no address",
    ("http://é", "b"): "no address",
    ("http://h?x", "b"): "no address", ("http://me:secret@h:99999", "b"): "no address",
    ("https://me:secret@h", "b"): "holds a user", ("http://h", "b u"): "'b u' is no name",
    ("http://h", "é"): "'é' is no name", ("http://h", "b%zz"): "is no name", ("http://h", ".."): "is no name",
    ("http://h", "a@b"): "is no name", ("http://h", "x" * 300): "is no name",
}  # fmt: skip


@pytest.mark.parametrize(("endpoint", "bucket"), NOWHERE)
def test_what_is_no_address_is_refused_before_anything_panics(
    endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("AWS_ENDPOINT_URL", endpoint), ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(name, value)
    for act in (
        lambda: check_access(open_store(f"s3://{bucket}/x")),
        lambda: outside_files("data.w.source", f"s3://{bucket}/x"),
    ):
        with pytest.raises(UserError) as refused:
            act()
        assert (
            NOWHERE[endpoint, bucket] in str(refused.value)
            and "\n" not in str(refused.value)
            and "secret" not in str(refused.value)
        )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_REGION", "x y"), ("AWS_REGION", "\udcff"), ("AWS_ACCESS_KEY_ID", "a\n"), ("AWS_SESSION_TOKEN", "a\nb")],
)
def test_a_region_or_key_that_is_no_header_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_to = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        name: value,
    }
    for variable, text in set_to.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(UserError, match=name):
        check_access(open_store("s3://b/x"))
    assert capfd.readouterr().err == ""
