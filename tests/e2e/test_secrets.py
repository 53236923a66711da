"""Planted secrets leave no trace, nothing listens beyond loopback, and nothing that comes in is
unpickled: whole runs, right and wrong."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from starlette.testclient import TestClient

from rlpipe.config.source import read_config
from rlpipe.extras.view.server import view_app
from rlpipe.processes.launch import CONNECTION_PORTS, free_port
from rlpipe.records.columns import read_table
from tests.conftest import S3Server
from tests.deadlines import DEADLINE_S
from tests.living import words_of
from tests.paths import PRESETS
from tests.pipeline import BIN, MINI, Folder
from tests.prefect_stand import Stand, kill_tree, running_stand

pytestmark = pytest.mark.e2e
PLANTED = {name: f"planted-{name}-4711" for name in ("service", "token", "mlflow", "prefect", "reward", "path")}
ECHO_EVERY = 5
AUTH = f"admin:{PLANTED['prefect']}"
REWARDS = "rl.rewards={format = 1.0, remote = 1.0}"
REWARD_ARGS = 'rl.reward_args={remote = {url = "$GRADER_URL", key_env = {block = "grader"}}}'
BLOCK = 'import os; from prefect.blocks.system import Secret; Secret(value=os.environ["GRADER_KEY"]).save("grader")'
# logs every unpickling of something other than plain values, with who did it
HOOK = """
import os, sys
with open(os.environ["UNPICKLED"] + ".watched", "a") as file:
    file.write(open("/proc/self/cmdline").read().replace("\\0", " ") + "\\n")
def _hook(event, args):
    if event == "pickle.find_class":
        frame, names = sys._getframe(1), []
        while frame is not None:
            names.append(frame.f_code.co_filename)
            frame = frame.f_back
        with open(os.environ["UNPICKLED"], "a") as file:
            file.write(f"{args} {' '.join(sys.argv[:2])} {' < '.join(names[:6])}\\n")
sys.addaudithook(_hook)
"""


class Grader(BaseHTTPRequestHandler):
    """Answers with what it was asked with, as unkind services do, when it fails: also every
    ECHO_EVERYth time, each time in another form."""

    numbers = itertools.count(1)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        right = self.headers["Authorization"] == f"Bearer {PLANTED['reward']}" and PLANTED["path"] in self.path
        number, asked = next(self.numbers), f"{self.headers} {self.path}"
        echoes = [{"reward": {self.headers["Authorization"]: 1.0}}, {"reward": {"a": self.path}},
                  {"reward": {PLANTED["reward"]: 1.0}}, asked,
                  base64.b64encode(asked.encode()).decode(), quote(asked, safe=""),
                  {"said": json.dumps(asked)}, asked.upper()]  # fmt: skip
        echoed = not right or self.server.broken or number % ECHO_EVERY == 0  # pyright: ignore[reportAttributeAccessIssue]
        answer = echoes[number // ECHO_EVERY % len(echoes)] if echoed else {"reward": 0.5}
        self.send_response(200 if right and not self.server.broken else 400)  # pyright: ignore[reportAttributeAccessIssue]
        data = json.dumps(answer).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def grader() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Grader) as server:
        server.broken = False  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    port = free_port()
    with (folder / "mlflow.log").open("w") as log:
        command = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
                   "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
                   "--artifacts-destination", f"{folder}/mlruns"]  # fmt: skip
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True, text=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        kill_tree(process)


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server, grader: ThreadingHTTPServer
) -> Iterator[dict[str, str]]:
    """All of the secrets, as a person sets them, and the audit hook in every process."""
    hooks = tmp_path_factory.mktemp("hooks")
    (hooks / "sitecustomize.py").write_text(HOOK)
    with mlflow_server(hooks) as mlflow:
        yield {
            **s3_server.environment,
            "RLPIPE_SERVICE_KEY": PLANTED["service"],
            "MLFLOW_TRACKING_TOKEN": PLANTED["token"],
            "MLFLOW_TRACKING_URI": f"http://user:{PLANTED['mlflow']}@{mlflow}",
            "PREFECT_API_AUTH_STRING": AUTH,
            "PREFECT_SERVER_API_AUTH_STRING": AUTH,
            "GRADER_KEY": PLANTED["reward"],
            "GRADER_URL": f"http://127.0.0.1:{grader.server_address[1]}/{PLANTED['path']}/score",
            "UNPICKLED": str(hooks / "unpickled.log"),
            "HOOKS": str(hooks),
        }


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Stand]:
    """A server that asks for a password and has a Secret block, and workers of all three pools."""
    told = {**environment, "PYTHONPATH": environment["HOOKS"]}
    with running_stand(tmp_path_factory.mktemp("stand"), told) as stand:
        stand.run(BIN / "python", "-c", BLOCK)
        for pool in ("train-gpu", "rollout-gpu"):
            stand.spawn(f"worker-{pool}", "worker", "start", "--pool", pool)
        yield stand


def parameters(stand: Stand, run: str, store: str, *sets: str) -> dict[str, Any]:
    overrides = [f"run={run}", f"store={store}", *MINI, REWARDS, REWARD_ARGS, "rl.num_iterations=2", "trainer.ranks=2",
                 "trainer.place=deployment", "engines.place=deployment", *sets]  # fmt: skip
    return {"config": read_config("tiny", overrides, PRESETS).model_dump(mode="json")}


def family(stand: Stand) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for process in stand.processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            found += [root, *root.children(recursive=True)]
    return found


class Watch(threading.Thread):
    """Looks at the processes of a stand while it works: what their command
    lines say, and where they listen."""

    def __init__(self, stand: Stand) -> None:
        super().__init__(daemon=True)
        self.stand = stand
        self.commands: set[str] = set()
        self.listening: dict[tuple[str, int], str] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.5):  # short: it looks again
            for process in family(self.stand):
                with contextlib.suppress(psutil.Error):
                    command = " ".join(words_of(process))
                    self.commands.add(command)
                    for each in process.net_connections(kind="tcp"):
                        if each.status == psutil.CONN_LISTEN:
                            self.listening[each.laddr.ip, each.laddr.port] = command


@contextlib.contextmanager
def watching(stand: Stand) -> Iterator[Watch]:
    watch = Watch(stand)
    watch.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        watch.join(timeout=DEADLINE_S)


def secrets(environment: dict[str, str]) -> list[str]:
    return [*PLANTED.values(), environment["AWS_SECRET_ACCESS_KEY"]]


def found_in(data: bytes, environment: dict[str, str]) -> list[str]:
    """Which secrets are in a file, whatever their case, as they are or in base64."""
    if data[:4] == b"PAR1":  # compressed
        data = str(read_table(data).to_pylist()).encode(errors="replace")
    lower = data.lower()
    in_base64 = {
        secret: [base64.b64encode(secret.encode()[skipped:])[:-4] for skipped in range(3)]
        for secret in secrets(environment)
    }
    return [
        secret
        for secret, forms in in_base64.items()
        if any(form.lower() in lower for form in (secret.encode(), *forms))
    ]


def traces(stand: Stand, environment: dict[str, str], *folders: Path) -> dict[str, list[str]]:
    """Where which secrets are found: in files (Prefect's and MLflow's databases are some), what the
    servers say, and the store."""
    found = {str(path): found_in(path.read_bytes(), environment)
             for folder in folders for path in folder.rglob("*") if path.is_file()}  # fmt: skip
    for what in ("flow_runs", "task_runs", "logs", "artifacts", "events", "deployments"):
        told = stand.api("POST", f"/{what}/filter", {"limit": 50} if what == "events" else {})
        found[what] = found_in(json.dumps(told).encode(), environment)
    return {where: which for where, which in found.items() if which}


def dumped(path: Path) -> bytes:
    """All of a database of SQLite, its journal included."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return "\n".join(database.iterdump()).encode()


def work_dirs(stand: Stand) -> list[Path]:
    return [stand.path, stand.repository / ".rlpipe"]


def test_a_run_leaves_no_secret_listens_on_loopback_only_and_unpickles_nothing(
    stand: Stand, environment: dict[str, str], s3_server: S3Server, grader: ThreadingHTTPServer
) -> None:
    folder = Folder(stand.path, s3_server.url(), environment)
    with watching(stand) as watch:
        state = stand.wait(stand.start("post-train/post-train", **parameters(stand, "kept", folder.store)))
        assert state["type"] == "COMPLETED", state
    store = folder.open_store()
    keys = store.list("runs/kept")
    assert {key: found_in(store.read(key), environment) for key in keys if found_in(store.read(key), environment)} == {}
    assert traces(stand, environment, *work_dirs(stand), Path(environment["HOOKS"])) == {}
    scored = [row for key in keys if key.endswith("scores.parquet") for row in read_table(store.read(key)).to_pylist()]
    assert "reward_invalid" in {row["reward_fault"] for row in scored}  # what was echoed, as parts and their names too
    pages = TestClient(view_app(store), base_url="http://127.0.0.1")
    for path in ("/", "/runs/kept", "/runs/kept/iterations/0", "/runs/kept/iterations/0/groups/0"):
        assert (answer := pages.get(path)).status_code == 200 and found_in(answer.content, environment) == [], path
    for database in (stand.path / "home" / "prefect.db", Path(environment["HOOKS"]) / "mlflow.db"):
        assert found_in(dumped(database), environment) == [], database
    assert b"kept" in dumped(Path(environment["HOOKS"]) / "mlflow.db")  # MLflow was reached with its password
    assert [command for command in watch.commands if found_in(command.encode(), environment)] == []
    for part in (
        "rlpipe.trainer.server",
        "rlpipe.trainer.launcher",
        "rlpipe.extras.local_engine.server",
        "flows.prefect_server",
    ):
        assert any(part in command for command in (*watch.listening.values(), *watch.commands)), part
    trainers = [place for place, command in watch.listening.items() if "rlpipe.trainer.server" in command]
    assert len(trainers) >= 4  # for jobs, for each of two groups of gloo, and where the ranks meet
    assert {place: command for place, command in watch.listening.items() if place[0] not in ("127.0.0.1", "::1")} == {}
    # ports that were chosen before a server listened there are no connection's by then
    named = [
        int(port)
        for command in watch.commands
        for port in re.findall(r'(?:--port |--master-port |"port": ?)(\d+)', command)
    ]
    assert len({*named} - {0}) >= 3 and max(named) < int(CONNECTION_PORTS.read_text().split()[0])
    log = Path(environment["UNPICKLED"])
    lines = log.read_text().splitlines() if log.exists() else []
    assert [line for line in lines if "prefect server" not in line] == []  # its queue of background work is its own
    watched = log.with_name(f"{log.name}.watched").read_text()
    for part in (
        "rlpipe.trainer.server",
        "rlpipe.extras.local_engine.server",
        "prefect.engine",
        "rlpipe.rewards.worker",
    ):
        assert part in watched, part


AWAY = "127.0.0.1:9"  # nobody listens there


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        pytest.param("reward", {}, "$GRADER_URL", marks=pytest.mark.nightly),
        ("mlflow", {"MLFLOW_TRACKING_URI": f"http://user:{PLANTED['mlflow']}@{AWAY}"},
         f"MLflow at http://{AWAY} cannot be reached"),
        ("store", {"AWS_ENDPOINT_URL": f"http://{AWAY}"}, "cannot be written"),
        ("store-key", {"AWS_ACCESS_KEY_ID": "wrong"}, "check the bucket, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID"),
        ("prefect", {"PREFECT_API_URL": f"http://{AWAY}/api"}, AWAY),
        ("prefect-key", {"PREFECT_API_AUTH_STRING": "admin:wrong"}, "401"),
        ("service-key", {"RLPIPE_SERVICE_KEY": f"{PLANTED['service']}\x01"}, "RLPIPE_SERVICE_KEY has characters"),
    ],
)  # fmt: skip
def test_a_run_that_fails_tells_no_secret(
    stand: Stand, environment: dict[str, str], s3_server: S3Server, grader: ThreadingHTTPServer, tmp_path: Path,
    name: str, wrong: dict[str, str], told: str,
) -> None:  # fmt: skip
    grader.broken = name == "reward"  # pyright: ignore[reportAttributeAccessIssue]
    api = {"PREFECT_API_URL": stand.environment["PREFECT_API_URL"]}
    folder = Folder(tmp_path, s3_server.url(), {**environment, **api, **wrong})
    place = "elsewhere" if name == "service-key" else "process"
    sets = [
        f"store={folder.store}",
        *MINI,
        REWARDS,
        REWARD_ARGS,
        "rl.num_iterations=1",
        "sft.num_steps=0",
        f"trainer.place={place}",
    ]
    command = ["run", "tiny", "--run", name, *[part for each in sets for part in ("--set", each)]]
    try:
        code, output = folder.rlpipe(*command)
    finally:
        grader.broken = False  # pyright: ignore[reportAttributeAccessIssue]
    assert told in output and (code == 0) == (name == "mlflow"), output[-3000:]
    assert found_in(output.encode(), environment) == []
    assert traces(stand, environment, tmp_path, stand.path) == {}
