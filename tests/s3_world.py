"""A real S3 server (SeaweedFS), and a proxy before it that counts requests,
holds them up, and loses answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from rlpipe.processes.launch import free_port
from rlpipe.store.backend import open_store
from tests.deadlines import DEADLINE_S, until
from tests.network_world import Node

HANG_S = 1.0
HELD_MAX_S = 2 * DEADLINE_S  # longer than any client waits
HERE = Node((), "127.0.0.1")
SERVERS: dict[Path, subprocess.Popen[bytes]] = {}  # those that serve, by their folders
KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class S3Server:
    """A SeaweedFS S3 server with one bucket and one pair of credentials."""

    endpoint: str
    bucket: str
    environment: dict[str, str]

    def url(self) -> str:
        return f"s3://{self.bucket}/{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def serving(folder: Path, node: Node = HERE) -> Iterator[S3Server]:
    """A server whose files are in `folder`, and whose address and keys
    are in the environment meanwhile."""
    before = {name: os.environ.get(name) for name in [*KEYS, "AWS_ENDPOINT_URL"]}
    try:
        process, url = _started(folder, node)
        try:
            SERVERS[folder] = process
            yield S3Server(url, "rlpipe", {**KEYS, "AWS_ENDPOINT_URL": url})
        finally:
            SERVERS.pop(folder, None)
            process.kill()
            process.wait(timeout=DEADLINE_S)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _started(folder: Path, node: Node) -> tuple[subprocess.Popen[bytes], str]:
    """A server that takes objects, and its address; the keys are in the environment. It has eight
    ports, and ends when another process took one of them first: it is started on others then.
    """
    for _ in range(2):
        with contextlib.suppress(AssertionError):
            return _started_once(folder, node)
    return _started_once(folder, node)


def _started_once(folder: Path, node: Node) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    os.environ.update(KEYS, AWS_ENDPOINT_URL=f"http://{node.address}:{port}")
    process = _start_weed(folder, port, node)
    try:
        _wait_for_bucket(process, folder)
    except BaseException:
        process.kill()
        process.wait(timeout=DEADLINE_S)
        raise
    return process, os.environ["AWS_ENDPOINT_URL"]


def _start_weed(folder: Path, endpoint_port: int, node: Node) -> subprocess.Popen[bytes]:
    identity = {
        "name": "test",
        "credentials": [{"accessKey": "test-key", "secretKey": "test-secret"}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    # not `weed mini`, which has an admin server too and ends two minutes after that got no port
    names = ["master", "volume", "filer"]
    options = [f"-{name}.port={free_port()}" for name in names]
    options += [f"-{name}.port.grpc={free_port()}" for name in [*names, "s3"]]
    command = [
        *node.inside, str(Path(sys.executable).parent / "weed"), "server", f"-dir={folder}",
        f"-ip={node.address}", f"-ip.bind={node.address}", "-filer", "-s3", f"-s3.port={endpoint_port}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder}/s3.json", "-s3.autoCreateBucket",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=0", *options,
    ]  # fmt: skip
    log = (folder / "weed.log").open("wb")
    with log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GOMEMLIMIT": "512MiB"}, cwd=folder)


def _wait_for_bucket(process: subprocess.Popen[bytes], folder: Path) -> None:
    faults = []

    def takes() -> bool:
        try:
            open_store("s3://rlpipe/ready").put("probe", b"x")
        except OSError as error:
            faults.append(str(error))
            return False
        return True

    until(takes, lambda: f"{faults[-1:]}\n{_log_tail(folder)}", running=process, look_s=0.5)


def check_servers_serve() -> None:
    """AssertionError, once, when a server that other tests use has ended."""
    ended = {folder: process for folder, process in SERVERS.items() if process.poll() is not None}
    for folder in ended:
        del SERVERS[folder]
    assert not ended, [
        f"S3 server, exit code {process.returncode}: {_log_tail(folder)}" for folder, process in ended.items()
    ]


def _log_tail(folder: Path) -> str:
    return (folder / "weed.log").read_text()[-2000:]


@dataclass(frozen=True)
class S3Request:
    """A request that reached the server."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    sent_bytes: int
    answered_bytes: int


class S3Proxy:
    """Hands every request to the server behind it, and writes it down.

    `loses`: whether the answer to a request is lost: the server has done it, and the client sees a
    closed connection. `holds`: whether a request, by its method and its path with the query, waits
    before it reaches the server, until `release` is set; `drops`: whether it is thrown away then,
    as one of a process that is gone. `faults`: what is done to a request instead, by its method and
    its path with the query: a status to answer, `reset`, or `hang` (nothing is answered for HANG_S,
    then the connection is closed). Empty: nothing.
    """

    def __init__(self, endpoint: str) -> None:
        self.requests: list[S3Request] = []
        self.loses: Callable[[S3Request], bool] = lambda request: False
        self.holds: Callable[[str, str], bool] = lambda method, target: False
        self.drops = False
        self.faults: Callable[[str, str], str] = lambda method, target: ""
        self.num_faults = 0
        self.held, self.release = threading.Event(), threading.Event()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        upstream = urlsplit(endpoint)
        self._host, self._port = str(upstream.hostname), int(upstream.port or 80)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.forward(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = forward

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.headers.get("Upgrade"):
            self._tunnel(handler)
            return
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        path, _, query = handler.path.partition("?")
        if fault := self.faults(handler.command, handler.path):
            self.num_faults += 1
            _do_fault(handler, fault)
            return
        if self.holds(handler.command, handler.path):
            self.held.set()
            self.release.wait(timeout=HELD_MAX_S)
            if self.drops:
                handler.close_connection = True
                return
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            status, headers, answer = self._ask(handler, body)
        finally:
            with self._lock:
                self._at_once -= 1
        request = S3Request(handler.command, path, query, dict(handler.headers), len(body), len(answer))
        with self._lock:
            self.requests.append(request)
            lost = self.loses(request)
        if lost:
            handler.close_connection = True
            return
        handler.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection"):
                handler.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in headers}:
            handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        with contextlib.suppress(OSError):  # the client is gone
            handler.wfile.write(answer)

    def _tunnel(self, handler: BaseHTTPRequestHandler) -> None:
        """A websocket, of which every byte goes through."""
        handler.close_connection = True
        head = "".join(
            f"{line}\r\n"
            for line in (handler.requestline, *(f"{name}: {value}" for name, value in handler.headers.items()))
        )
        with socket.create_connection((self._host, self._port)) as behind:
            behind.sendall(f"{head}\r\n".encode())
            ends = {behind: handler.connection, handler.connection: behind}
            with contextlib.suppress(OSError):
                while True:
                    for end in select.select([*ends], [], [])[0]:
                        if not (data := end.recv(65536)):
                            return
                        ends[end].sendall(data)

    def _ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=DEADLINE_S)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():  # also Host, which the signature is of
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _do_fault(handler: BaseHTTPRequestHandler, fault: str) -> None:
    handler.close_connection = True
    if fault == "hang":
        time.sleep(HANG_S)
    elif fault == "reset":
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(handler.connection.detach())
    else:
        answer = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
        handler.send_response_only(int(fault))
        for name, value in (
            ("Content-Type", "application/xml"),
            ("Content-Length", str(len(answer))),
            ("Connection", "close"),
        ):
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer)
