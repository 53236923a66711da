"""What comes in is never unpickled and never leads out of the store; who brings no
key is refused, and costs little."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import http.client
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import EngineError, StoreError, UserError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord, is_key
from rlpipe.config.secrecy import is_secret_variable, key_fits, without_passwords
from rlpipe.config.source import read_config
from rlpipe.engines import remote
from rlpipe.engines.host import EngineHost
from rlpipe.engines.remote import HostService
from rlpipe.engines.weights import Probe
from rlpipe.rewards.http import HttpScorer, RewardService
from rlpipe.services import finder
from rlpipe.services.calls import new_session
from rlpipe.services.finder import Peer
from rlpipe.services.registration import KEY_VARIABLE, ServiceRecord, service_key
from rlpipe.store.artifacts import commit, file_sha256, new_attempt, write_bytes
from rlpipe.store.backend import Store, open_store
from rlpipe.store.local_copy import materialise
from rlpipe.store.nearby import Nearby, NodeDisk
from rlpipe.trainer import node_server as bounded
from rlpipe.trainer import publishing
from rlpipe.trainer import serving as server_module
from rlpipe.trainer.board import Board
from rlpipe.trainer.process import TrainerOptions
from rlpipe.trainer.publishing import Publication, Uploads
from rlpipe.trainer.serving import TrainerServer
from tests.deadlines import DEADLINE_S, until_async
from tests.paths import ROOT

PRESETS = ROOT / "flows" / "presets"
KEY = "the-key"
UNPICKLES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "pandas",
}
CALLS = {
    "load_all",
    "unsafe_load",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "read_pickle",
}


def faults_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where code could unpickle something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name.split(".")[0] in UNPICKLES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLES:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if called.split(".")[-1] in CALLS or called in ("yaml.load", "torch.jit.load"):
                yield node.lineno, called
            if called == "torch.load" and given.get("weights_only") != "True":
                yield node.lineno, called
            if given.get("allow_pickle", "False") != "False" or given.get("trust_remote_code", "False") != "False":
                yield node.lineno, called


def test_no_code_unpickles() -> None:
    paths = [path for folder in ("rlpipe", "tasks", "flows") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 100
    assert [f"{path}:{line} {what}" for path in paths for line, what in faults_of(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "import torch\ntorch.load('x')",
     "yaml.load(x)", "np.load(x, allow_pickle=True)",
     "dist.broadcast_object_list(x)", "AutoModel.from_pretrained(x, trust_remote_code=True)"],
)  # fmt: skip
def test_the_scan_finds_what_unpickles(code: str) -> None:
    assert list(faults_of(ast.parse(code)))


READ_ALL = """
import sys
from pathlib import Path
import torch, transformers, pyarrow.parquet, safetensors.torch, tokenizers  # what they unpickle while imported came from nowhere
from tests import trainer_world as world
from tests.rows import CONVERSATIONS, read_rows
from rlpipe.store.backend import open_store
from rlpipe.trainer.trainer import Trainer
from rlpipe.trainer.state import load
from rlpipe.models.folder import tensor_shapes

def refuse(event, args):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickled: {args}")

folder = Path(sys.argv[1])
store, ranks = open_store(f"file://{folder}/store"), world.one_rank(folder)
data = world.conversations(store, "runs/a/data", 24)
batch = world.batch(store, "runs/a/batch", world.rollout_rows(4, 2))
first = Trainer(ranks)
world.run(first, "load", world.load_new())
sys.addaudithook(refuse)
world.run(first, "train", world.train("new", "b", "sft", data))
told = world.run(first, "save", world.save("b", "runs/a/policy", "runs/a/state"))
for name in ("policy", "state"):
    ref = world.saved(store, f"runs/a/{name}", told[name])
    second = Trainer(ranks)
    world.run(second, "load", world.load_ref("c", name, ref))
world.run(second, "train", world.train("c", "d", "rl", batch))
read_rows(store, data, "conversations.parquet", CONVERSATIONS)
try:
    import pickle
    pickle.loads(pickle.dumps(Path("x")))
except RuntimeError:
    print("read without unpickling, and the hook works")
"""  # noqa: E501


@pytest.mark.slow
def test_artifacts_are_read_without_unpickling(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert "read without unpickling, and the hook works" in done.stdout, done.stderr[-3000:]


# --- references


@pytest.mark.parametrize(
    "key", ["../x", "runs/../../x", "/etc/passwd", "a//b", "", ".", "a/./b", "a\0b", "a/", "runs/a/.."]
)
def test_a_key_that_leads_out_of_the_store_is_refused(key: str, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    for what in (store.read, store.exists, store.delete, lambda each: store.put(each, b"x")):
        with pytest.raises(UserError, match="no key of the store"):
            what(key)
    with pytest.raises(UserError, match="is not a reference to an artifact"):
        ArtifactRef.from_json({"folder": key, "sha256": "0" * 64})


@given(st.text())
def test_a_key_stays_below_the_store(key: str) -> None:
    if is_key(key):
        assert (Path("/store") / key).resolve().is_relative_to("/store") and (Path("/store") / key) != Path("/store")


@pytest.mark.parametrize("value",
                         [None, 3, [], {}, {"folder": "a"}, {"folder": "a", "sha256": None},
                          {"folder": 3, "sha256": "0" * 64},
                                   {"folder": "a", "sha256": "../" * 4 + "0" * 52}])  # fmt: skip
def test_what_is_no_reference_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="is not a reference to an artifact"):
        ArtifactRef.from_json(value)


@pytest.mark.parametrize("name", ["a/../../../evil", "a//etc/evil", "../evil", "a/b/evil", "evil", "a/.."])
def test_a_manifest_whose_files_lead_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    store: Store = open_store(f"file://{tmp_path}/store")
    good = write_bytes(store, "runs/a/policy", new_attempt(), "model", b"data")
    record = FileRecord(name, good.bytes, good.sha256)
    data = json.dumps(Manifest("a", "rl", 0, "policy", {}, "", {}, [record], {}, None, "test", "", ""), default=vars)
    (tmp_path / "store/runs/a/policy/manifest.json").write_text(data)
    ref = ArtifactRef("runs/a/policy", file_sha256(tmp_path / "store/runs/a/policy/manifest.json"))
    with pytest.raises(StoreError, match="leads elsewhere"):
        materialise(store, ref, tmp_path / "local")
    assert not (tmp_path / "local").exists()


# --- the trainer's HTTP


@pytest.fixture
def request_s() -> float:
    """How long a request may take to come."""
    return DEADLINE_S


@pytest.fixture
def trainer_server(tmp_path: Path, request_s: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerServer]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(bounded, "REQUEST_S", request_s)
    monkeypatch.setattr(bounded, "CONNECTIONS_MAX", 4)
    options = TrainerOptions(
        store=f"file://{tmp_path}/store", run="a", host="127.0.0.1", port=0, work_dir=str(tmp_path)
    )
    uploads = Uploads(open_store(options.store), tmp_path / "published")
    server, loop = TrainerServer(options, Board(), 1, uploads), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = asyncio.run_coroutine_threadsafe(server.serve(), loop)
    yield server
    serving.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def connected(server: TrainerServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=DEADLINE_S)


def answer_to(server: TrainerServer, *parts: bytes) -> bytes:
    """All that comes back for these bytes, until the server closes."""
    with connected(server) as made:
        for part in parts:
            made.sendall(part)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while data := made.recv(4096):
                said += data
        return said


def head(path: str, *lines: str, method: str = "POST", key: str = KEY) -> bytes:
    return "\r\n".join(
        [f"{method} /{path} HTTP/1.1", "Host: trainer", f"Authorization: Bearer {key}", *lines, "", ""]
    ).encode()


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", f"Bearer {KEY}x", KEY, f"Basic {KEY}", f"bearer {KEY}", "Bearer ü"]
)
def test_the_trainer_tells_a_stranger_nothing(trainer_server: TrainerServer, authorization: str) -> None:
    for method, path in (("GET", "/health"), ("GET", "/status"), ("GET", "/x"), ("POST", "/load"), ("POST", "/x")):
        client = http.client.HTTPConnection(*trainer_server.address, timeout=DEADLINE_S)
        headers = {"Authorization": authorization.encode()} if authorization else {}
        client.request(method, path, b"{}" if method == "POST" else None, headers)
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())) == (401, {"error": "wrong or missing bearer key"})
        assert answer.headers["Connection"] == "close"
        client.close()


@pytest.mark.parametrize("length", ["-1", "abc", "1e9", "²", "9" * 400, "99999999", "4194305"])
def test_a_body_of_no_length_or_too_much_is_not_read(
    trainer_server: TrainerServer, length: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = answer_to(trainer_server, head("load", f"Content-Length: {length}"), b"x" * 100)
    assert said.split(b" ")[1] == (b"413" if length.isascii() and length.isdecimal() and len(length) < 20 else b"400")
    stranger = answer_to(trainer_server, head("load", f"Content-Length: {length}", key="wrong"), b"x" * 100)
    assert stranger == b"" or stranger.split(b" ")[1] in (b"400", b"401")
    assert not caplog.records, "strangers cannot fill the log"


def test_a_chunked_body_is_refused(trainer_server: TrainerServer) -> None:
    said = answer_to(trainer_server, head("load", "Transfer-Encoding: chunked"), b"5\r\nGET /\r\n0\r\n\r\n")
    assert said.split(b" ")[1] == b"411" and said.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("request_s", [0.5])
def test_who_sends_a_byte_now_and_then_is_cut_off(trainer_server: TrainerServer) -> None:
    with connected(trainer_server) as slow:
        for byte in head("load", "X: " + "y" * 2000):
            if closed(slow):
                return
            slow.sendall(bytes([byte]))
            time.sleep(0.05)
    raise AssertionError("the whole head was heard")


@pytest.mark.parametrize("request_s", [0.5])
def test_a_body_that_does_not_come_is_not_waited_for(trainer_server: TrainerServer) -> None:
    said = answer_to(trainer_server, head("load", "Content-Length: 100"), b"x")
    assert said == b"" or said.split(b" ")[1] == b"504"


def closed(made: socket.socket) -> bool:
    made.setblocking(False)
    try:
        return made.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        made.setblocking(True)


@pytest.mark.parametrize("request_s", [1.0])
def test_connections_are_bounded_and_come_free_again(trainer_server: TrainerServer) -> None:
    silent = [connected(trainer_server) for _ in range(12)]
    for made in silent:  # some unheard, the others after REQUEST_S
        assert made.recv(1) == b""
        made.close()
    said = answer_to(trainer_server, head("health", "Connection: close", method="GET"))
    assert said.split(b" ")[1] == b"200"


@pytest.mark.parametrize("body", ["[" * 100_000, "{", "null", "[]", '{"position": 1}'])
def test_a_body_that_is_no_job_is_refused(trainer_server: TrainerServer, body: str) -> None:
    said = answer_to(trainer_server, head("load", f"Content-Length: {len(body)}", "Connection: close"), body.encode())
    assert said.split(b" ")[1] == b"400"


def get(server: TrainerServer, path: str, key: str = KEY, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    client = http.client.HTTPConnection(*server.address, timeout=DEADLINE_S)
    client.putrequest(method, path, skip_accept_encoding=True)
    for name, value in {"Authorization": f"Bearer {key}", **headers}.items():
        client.putheader(name, value)
    client.endheaders()
    answer = client.getresponse()
    body = answer.read()
    client.close()
    return answer.status, body


def test_the_trainer_gives_what_it_published_to_who_has_the_key_and_nothing_else(
    trainer_server: TrainerServer, tmp_path: Path
) -> None:
    disk = tmp_path / "published"
    (disk / "runs/a/policy/a1").mkdir(parents=True)
    (disk / "runs/a/policy/a1/x").write_bytes(b"weights")
    (tmp_path / "secret").write_bytes(b"secret")
    (disk / "runs/link").symlink_to(tmp_path / "secret")
    (disk / "runs/up").symlink_to(tmp_path)
    path = "/files/runs/a/policy/a1/x"
    assert get(trainer_server, path) == (200, b"weights")
    assert get(trainer_server, path, Range="bytes=2-4") == (206, b"igh")
    assert get(trainer_server, path, method="HEAD") == (200, b"")
    assert get(trainer_server, path, Range="bytes=99-")[0] == 416
    for key in ("", "wrong", f"{KEY}x"):
        assert get(trainer_server, path, key)[0] == 401
    outside = [
        "../secret", "runs/../../secret", "%2e%2e/secret", "..%2fsecret", "runs/link", "runs/up/secret",
        f"/{tmp_path}/secret", "%2f" + str(tmp_path)[1:] + "/secret",
        "", "runs", "runs/a/policy/a1", "runs/a/policy/a1/x/", "runs/a/policy/a1/%00x", "y" * 300, "a/" * 2000 + "b",
        "runs/./a/policy/a1/x",
    ]  # fmt: skip
    for key in outside:
        status, body = get(trainer_server, f"/files/{key}")
        assert status == 404 and b"secret" not in body.replace(b"secret' is not", b"").replace(b"/secret", b""), key
    assert get(trainer_server, path, method="POST")[0] == 404


def test_an_upload_is_waited_for_by_its_attempt_and_counts_as_work(
    trainer_server: TrainerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WAIT_S", 0.05)
    uploads, gate = trainer_server.uploads, threading.Event()

    def post(attempt: str) -> tuple[int, dict[str, object]]:
        body = json.dumps({"attempt": attempt}).encode()
        said = answer_to(trainer_server, head("upload", f"Content-Length: {len(body)}", "Connection: close"), body)
        return int(said.split(b" ")[1]), json.loads(said.partition(b"\r\n\r\n")[2])

    assert post("../x")[0] == 400
    assert post("a1") == (409, {"error": "not resident", "position": None})
    for fault, status in ((None, 200), (OSError("the store is away"), 502), (StoreError("it changed"), 500)):

        def send(*_: object, fault: Exception | None = fault) -> None:
            gate.wait(DEADLINE_S)
            if fault:
                raise fault

        monkeypatch.setattr(publishing, "upload", send)
        monkeypatch.setattr(publishing, "TRIES", 1)
        gate.clear()
        uploads.begin(Publication("a1", {}, {}))
        assert post("a1")[0] == 202
        assert json.loads(get(trainer_server, "/status")[1])["idle_s"] == 0
        gate.set()
        sending = uploads.of("a1")
        assert sending is not None
        sending.exception(timeout=DEADLINE_S)
        assert post("a1") == (status, {"error": f"the upload failed: {fault}"} if fault else {"result": {}})
    assert json.loads(get(trainer_server, "/status")[1])["idle_s"] > 0


# --- the host's HTTP


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostService:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.chdir(tmp_path)
    config = read_config("tiny", ["run=a", f"store=file://{tmp_path}/store"], PRESETS)
    return HostService(open_store(config.store), config, "node-0", "127.0.0.1")


async def test_a_host_that_cannot_reach_the_trainer_waits_until_the_store_has_the_policy(
    service: HostService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "COMMIT_POLL_S", 0.01)
    served: list[tuple[int, bool]] = []

    async def serve(policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None = None) -> None:
        served.append((version, nearby is not None))
        if nearby is not None:
            raise StoreError("missing from the store")

    monkeypatch.setattr(service.host, "serve", serve)

    def wanted(version: int, nearby: Nearby | None) -> remote.ServeRequest:
        policy: Any = {"folder": f"runs/a/{version}", "sha256": "0" * 64}
        return remote.ServeRequest(policy=policy, version=version, probe=Probe([1, 2], [0.0]), nearby=nearby)

    def near(version: int) -> Nearby:
        return Nearby(f"runs/a/{version}", "{}", [NodeDisk("/nowhere", "http://127.0.0.1:1/files")])

    waiting = asyncio.create_task(service._serve(wanted(1, near(1))))
    await until_async(lambda: service._waited > 0)
    assert served == [(1, True)] and not waiting.done() and service.fault is None
    service.host.store.put("runs/a/1/manifest.json", b"{}")
    await asyncio.wait_for(waiting, DEADLINE_S)
    assert served == [(1, True), (1, False)] and service.fault is None
    older = asyncio.create_task(service._serve(wanted(2, near(2))))
    await until_async(lambda: served[-1] == (2, True))
    await service._serve(
        wanted(3, None)
    )  # what another start of the run wants: the older one is not waited for any more
    await asyncio.wait_for(older, DEADLINE_S)
    assert served[-2:] == [(2, True), (3, False)]
    service.host.store.put("runs/a/4/manifest.json", b"{}")
    await service._serve(wanted(4, near(4)))
    assert isinstance(service.fault, StoreError)


async def test_a_release_drops_what_waits_for_the_store_and_is_over_when_the_engines_have_released(
    service: HostService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that came behind it would take the memory of the trainer, which trains by then."""
    for name, seconds in (("COMMIT_POLL_S", 0.01), ("RELOAD_WAIT_S", 0.05), ("RELEASE_AGAIN_S", 0.01)):
        monkeypatch.setattr(remote, name, seconds)
    served, released, fault = list[int](), asyncio.Event(), [EngineError("it cannot")]

    async def serve(policy: ArtifactRef, version: int, *_: object) -> None:
        served.append(version)
        raise StoreError("missing from the store")

    async def release() -> None:
        await released.wait()
        if fault:
            raise fault.pop()

    monkeypatch.setattr(service.host, "serve", serve)
    monkeypatch.setattr(service.host, "release", release)
    policy, probe = {"folder": "runs/a/1", "sha256": "0" * 64}, {"tokens": [1, 2], "logprobs": [0.0]}
    near = {"folder": "runs/a/1", "manifest": "{}", "places": [{"disk": "/nowhere", "url": ""}]}
    body = {"policy": policy, "version": 1, "probe": probe, "nearby": near}
    async with TestServer(service.app()) as server, new_session() as session:
        record = ServiceRecord("node-0", f"http://127.0.0.1:{server.port}", start=service.registration.record.start)
        host = remote.RemoteHost(Peer(record), session)
        assert await host.peer.call("POST", "/serve", body) == (202, {})
        await until_async(lambda: served == [1])
        assert service._serving
        releasing = asyncio.create_task(host.release())
        await asyncio.sleep(0.2)  # it was told 202, and asks again
        assert not releasing.done()
        released.set()
        with pytest.raises(EngineError, match=r"node-0 did not free the memory of its engines \(409\).*it cannot"):
            await releasing
        service.host.store.put("runs/a/1/manifest.json", b"{}")
        await host.release()
        await until_async(lambda: not service._serving)
        assert served == [1]
    monkeypatch.setattr(finder, "LOST_S", 0.05)
    async with asyncio.timeout(DEADLINE_S):
        await host.release()  # it is gone, and its engines with it


@pytest.mark.parametrize("serves", [False, True])
async def test_a_release_that_fails_between_two_requests_is_answered_to_the_next(
    service: HostService, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    """A loaded machine lets it end there; a load that came in between is asked by another flow,
    whose release is a new one.
    """
    monkeypatch.setattr(remote, "RELOAD_WAIT_S", 0.05)
    released, faults = asyncio.Event(), [EngineError("it cannot")]

    async def release() -> None:
        await released.wait()
        if faults:
            raise faults.pop()

    async def serve(*_: object) -> None: ...

    monkeypatch.setattr(service.host, "serve", serve)
    monkeypatch.setattr(service.host, "release", release)
    body = {"policy": {"folder": "runs/a/1", "sha256": "0" * 64}, "version": 1}
    headers = {"Authorization": f"Bearer {service.key}"}
    async with TestClient(TestServer(service.app()), headers=headers) as client:
        assert (await client.post("/release", json={})).status == 202
        releasing = service._releasing
        assert releasing is not None
        released.set()
        await until_async(releasing.done)
        if serves:
            probe = {"tokens": [1, 2], "logprobs": [0.0]}
            assert (await client.post("/serve", json={**body, "probe": probe})).status in (200, 202)
        else:
            answer = await client.post("/release", json={})
            assert (answer.status, (await answer.json())["error"]) == (409, "it cannot")
        assert (await client.post("/release", json={})).status == 200
        assert not faults
    assert releasing.exception()


async def test_the_host_asks_for_the_key_and_takes_only_what_it_knows(
    service: HostService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BODY_BYTES_MAX", 1 << 16)
    policy, probe = {"folder": "runs/a/policy", "sha256": "0" * 64}, {"tokens": [1, 2], "logprobs": [0.0]}
    good = {"policy": policy, "version": 1, "probe": probe}
    bad = [
        None, [], {}, {**good, "more": 1}, {**good, "version": "1"}, {**good, "version": True}, {**good, "policy": "x"},
        {**good, "policy": {**policy, "folder": "../../x"}}, {**good, "policy": {**policy, "folder": "/etc"}},
        {**good, "policy": {**policy, "sha256": "../../../../x"}}, {**good, "probe": {}},
        {**good, "probe": {"tokens": [1], "logprobs": [1]}},
        {**good, "probe": {"tokens": ["a", "b"], "logprobs": [0.0]}},
    ]  # fmt: skip
    async with TestClient(TestServer(service.app())) as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Bearer {KEY}"},
            {"Authorization": service.key},
        ):
            for method, path in (("GET", "/status?version=1"), ("POST", "/serve"), ("GET", "/x")):
                assert (await client.request(method, path, headers=headers, json=good)).status == 401
        known = {"Authorization": f"Bearer {service.key}"}
        for body in bad:
            answer = await client.post("/serve", headers=known, json=body)
            assert (answer.status, (await answer.json())["kind"]) == (409, "UserError"), body
        for version in ("", "x", "1.5", "9" * 30, "²"):
            answer = await client.get(f"/status?version={version}", headers=known)
            assert (answer.status, (await answer.json())["kind"]) == (409, "UserError"), version
        assert (await client.post("/serve", headers=known, data=io.BytesIO(b"[" * (1 << 17)))).status == 413
        answer = await client.post("/serve", headers=known, json=good)  # no such policy
        assert answer.status == 202
    await service.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_a_host_refuses_a_weight_version_that_the_policy_is_not(tmp_path: Path) -> None:
    config = read_config("tiny", ["run=a", f"store=file://{tmp_path}/store"], PRESETS)
    store = open_store(config.store)
    manifest = Manifest("a", "rl", 4, "policy", {}, "", {}, [], {}, 5, "x", "", "")
    policy, _ = commit(store, "runs/a/rl/00004/policy", manifest)
    host = EngineHost(config, store, tmp_path / "work", "h", "127.0.0.1", ("", ""))
    for version in (0, 4, 6, -1, 10**9):
        with pytest.raises(UserError, match=rf"version={version}: runs/a/rl/00004/policy is weight version 5"):
            await host.serve(policy, version, Probe([1, 2], [0.0]))
    assert host.engines == [] and not (tmp_path / "work").exists()


# --- keys and configs


@given(st.text(), st.text(min_size=1))
def test_a_key_fits_only_itself(given_key: str, key: str) -> None:
    assert key_fits(f"Bearer {given_key}", key) == (given_key == key)
    assert key_fits(given_key, "") and not key_fits("", key)


def test_a_key_that_no_header_carries_is_refused_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "  key-of-a-file\n")
    assert service_key() == "key-of-a-file"
    for wrong in ("planted\nplanted", "plantedü", "planted\x01"):
        monkeypatch.setenv(KEY_VARIABLE, wrong)
        with pytest.raises(UserError, match=KEY_VARIABLE) as refused:
            service_key()
        assert "planted" not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    ["tracking.uri=http://user:planted@host", "tracking.uri=https://planted@host",
     "tracking.uri=postgresql://user:planted@host/db",
     "store=s3://user:planted@bucket/x", "engines.environment={HF_TOKEN = 'planted'}",
     "data.words.source=https://user:planted@host/x.jsonl",
     "rl.reward_args={judge = {api_key = 'planted'}}", "engines.flags=['http://user:planted@host']",
     "data.words.args={token = 'planted'}",
     *(f"rl.reward_args={{r = {{{name} = 'planted'}}}}" for name in (
         "MLFLOW_TRACKING_TOKEN", "AWS_SESSION_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "PGPASSWORD",
         "Authorization",
         "OPENAI_API_KEY", "Cookie", "access-token", "private_key")),
     "engines.flags=['--api-key', 'planted']", "engines.flags=['--admin-api-key=planted']",
     "engines.flags=['-e', 'HF_TOKEN=planted']",
     "rl.reward_args={r = {headers = {Authorization = 'planted'}}}",
     "rl.reward_args={r = {url = 'http://h/x?a=1&token=planted&b=2'}}",
     *(f"engines.environment={{{name} = 'planted'}}" for name in (
         "MY_TOKEN", "OPENAI_KEY", "DB_PASS", "passphrase", "SSH_KEY_PASSPHRASE", "MyToken", "apiKey", "KEY", "TOKEN_2",
         "GH_PAT", "MYSQL_PWD",
         "AWS_ACCESS_KEY_ID", "HFTOKEN", "SLACK_WEBHOOK_URL", "APP_SECRETS",
         "GOOGLE_APPLICATION_CREDENTIALS", "'DB.PASS'")),
     "rl.reward_args={r = {passphrase = 'planted'}}", "rl.reward_args={r = {openai_key = 'planted'}}",
     "rl.reward_args={r = {accessToken = 'planted'}}",
     "data.words.args={MY_TOKEN = 'planted'}", "engines.flags=['-e', 'DB_PASS=planted']",
     "engines.environment={FEED = 'redis://:planted@host'}",
     "engines.environment={OPENAI_KEY_OF_ME = 'planted'}",
     "tracking.uri=http://h?access_token=planted", "data.words.source=https://h/x.jsonl?X-Amz-Signature=planted"],
)  # fmt: skip
def test_a_config_with_a_secret_is_refused_and_does_not_repeat_it(override: str) -> None:
    with pytest.raises(UserError, match="environment") as refused:
        read_config("tiny", [override], PRESETS)
    assert "planted" not in str(refused.value)


def test_a_config_may_name_what_is_no_secret() -> None:
    sets = ["tracking.uri=postgresql://user@host/db", "model.chat_template_args={eos_token = '</s>'}",
            ("rl.reward_args={judge = {key_env = 'NAME', url = '$URL'}, r = {tokenizer = 'x', "
             "url = 'http://h/x?kind=token'}}"),
            "engines.environment={PWD = '/x', TOKENIZERS_PARALLELISM = 'true', HF_HUB_DISABLE_IMPLICIT_TOKEN = '1', "
            "KEYBOARD = 'us', COMPASS = 'n',"
            " VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE = '8', PYTHONPATH = 'x', MONKEY = 'x', AUTHOR = 'me', "
            "BYPASS = 'x', PATH = 'y'}",
            ("engines.environment={SGLANG_INIT_NEW_TOKEN_RATIO = '0.7', VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD = "
             "'256', PASS_AT_K = '8'}"),
            ("data.words.args={answer_key = 'a', id_key = 'id', pass_name = 'x', end_token = 'x', keys = 'a', "
             "tokens = 'x', author = 'x'}"),
            "engines.flags=['--enable-metrics', '--tokenizer-mode=slow', '--max-prefill-tokens', '8']",
            "data.words.system_prompt=Write to me@host"]  # fmt: skip
    assert read_config("tiny", sets, PRESETS).tracking.uri.startswith("postgresql")


def test_variables_that_are_taken_for_secrets() -> None:
    """By name, as docs/security.md lists them, or by a URL with a password."""
    secret = ("RLPIPE_SERVICE_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
              "MLFLOW_TRACKING_TOKEN", "RLPIPE_VIEW_KEY",
              "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "SSH_AUTH_SOCK",
              "GRADER_KEY", "PGPASSFILE")  # fmt: skip
    assert [name for name in secret if not is_secret_variable(name)] == []
    plain = ("PWD", "OLDPWD", "PATH", "HOME", "LANG", "AWS_REGION", "AWS_ENDPOINT_URL", "RLPIPE_ADDRESS",
             "MLFLOW_TRACKING_URI", "LS_COLORS", "TERM",
             "CUDA_VISIBLE_DEVICES", "XDG_SESSION_ID", "DBUS_SESSION_BUS_ADDRESS", "HOSTNAME", "PREFECT_API_URL",
             "TOKENIZERS_PARALLELISM")  # fmt: skip
    assert [name for name in plain if is_secret_variable(name)] == []
    assert is_secret_variable("MLFLOW_TRACKING_URI", "http://me:planted@host") and is_secret_variable(
        "FEED", "https://h/x?sig=planted"
    )
    assert not is_secret_variable("MLFLOW_TRACKING_URI", "http://host:5000")
    assert is_secret_variable("DB_PASS", "4711") and is_secret_variable("DB_PASS_2", "4711")
    assert not is_secret_variable("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS", "600"), "a number of what is no token"


def test_passwords_of_urls_are_not_told() -> None:
    assert without_passwords("at 'http://a:b@c:1/x?y=z' and s3://k:s@b") == "at 'http://c:1/x?y=z' and s3://b"
    assert without_passwords("me@host, http://c/x@y") == "me@host, http://c/x@y"


def test_what_a_service_echoes_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URL", "http://h.example:1/planted/x")
    monkeypatch.setenv("KEY", "planted-key")
    scorer = HttpScorer("remote", 1.0, 1.0, RewardService(url="$URL", key_env="KEY"))
    assert scorer._mask("no planted-key at /planted/x on h.example") == "no *** at *** on ***"
    assert scorer._fault("reason", "no").message == "reward 'remote' at $URL: no"
