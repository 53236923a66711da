"""A trainer of two nodes, both on this machine: one of them dies or stops, and whoever
waits for a job is told which."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from rlpipe.base.errors import StoreError, TrainerError
from rlpipe.base.values import JsonDict
from rlpipe.processes.launch import PARENT_VARIABLE, free_port
from rlpipe.services.calls import http_call, json_of, new_session
from rlpipe.services.registration import KEY_VARIABLE
from rlpipe.store.backend import open_store
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.meeting import LOOK_S, Sent
from rlpipe.trainer.process import launcher_argv
from tests import trainer_world as world
from tests.deadlines import DEADLINE_S, SHORT_S, until, until_async
from tests.living import signal_all

pytestmark = pytest.mark.e2e
KEY = "secret"
SILENT_S_MAX = 4 * SHORT_S
MANY_STEPS: JsonDict = {"num_steps": 100_000}


class TwoNodes:
    """The trainer, and its place as the flow sees it: nobody starts it again."""

    key = KEY

    def __init__(self, folder: Path) -> None:
        options = world.options(folder, silent_s_max=SILENT_S_MAX, tokens_max=512, ranks=1, nodes=2)
        ports = [free_port(), free_port()]
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.log = folder / "trainer.log"
        environment = {**os.environ, KEY_VARIABLE: KEY, "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())}
        rendezvous = f"127.0.0.1:{free_port()}"
        with self.log.open("wb") as log:
            self.nodes = [
                subprocess.Popen(
                    launcher_argv(options.model_copy(update={"work_dir": f"{folder}/node-{node}", "port": port}),
                                  node, rendezvous),
                    stdout=log, stderr=log, env=environment,
                )
                for node, port in enumerate(ports)
            ]  # fmt: skip

    async def start(self) -> str:
        return self.url

    async def bring_back(self) -> str:
        raise TrainerError("no trainer of the run answered")

    async def close(self) -> None:
        pass

    async def health(self) -> JsonDict:
        """Its answer, as soon as there is one."""
        async with new_session() as session:

            async def answer() -> JsonDict | None:
                try:
                    status, content = await http_call(session, "GET", f"{self.url}/health", KEY, None, DEADLINE_S)
                except ConnectionError:
                    return None
                assert status == 200, content
                return json_of(self.url, status, content)

            answered = await until_async(answer, lambda: self.log.read_text()[-3000:], look_s=0.3)
        assert answered is not None
        return answered

    def family(self, node: int) -> list[psutil.Process]:
        """The launcher of a node, and its rank."""
        agent = psutil.Process(self.nodes[node].pid)
        return [agent, *agent.children(recursive=True)]

    def end(self) -> None:
        for index, node in enumerate(self.nodes):
            if node.poll() is None:
                signal_all(self.family(index)[::-1])  # the launcher last
            node.wait(timeout=DEADLINE_S)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TwoNodes]:
    trainer = TwoNodes(tmp_path)
    try:
        yield trainer
    finally:
        trainer.end()


@pytest.mark.parametrize("how", [pytest.param("SIGKILL", marks=pytest.mark.nightly), "SIGSTOP"])
async def test_the_lost_node_is_named(trainer: TwoNodes, tmp_path: Path, how: str) -> None:
    health = await trainer.health()
    assert health["ranks"] == 2
    told = [
        (entry["node"], entry["host"], entry["ranks"], entry["silent_s"] < SILENT_S_MAX) for entry in health["nodes"]
    ]
    assert told == [(node, socket.gethostname(), [node], True) for node in range(2)]
    client = TrainerClient(trainer)  # pyright: ignore[reportArgumentType]
    await client.start()
    await client.run("load", world.load_new("new"))
    data = world.conversations(open_store(f"file://{tmp_path}/store"), "data", 40)
    training = asyncio.create_task(client.run("train", world.train("new", "never", "sft", data, MANY_STEPS)))
    await asyncio.sleep(2.0)
    assert not training.done()
    # a machine that is gone closes no connection: a stopped one is like it
    signal_all(trainer.family(1), getattr(signal, how))
    # by its silence, and not by a deadline of a collective
    with pytest.raises(
        TrainerError, match=rf"doing train: node 1 \({socket.gethostname()}\): rank 1 has been silent for"
    ):
        await asyncio.wait_for(training, timeout=DEADLINE_S)

    await client.close()
    trainer.nodes[0].wait(timeout=DEADLINE_S)


async def test_each_node_serves_and_uploads_what_it_made(trainer: TwoNodes, tmp_path: Path) -> None:
    await trainer.health()
    client, store = TrainerClient(trainer), open_store(f"file://{tmp_path}/store")  # pyright: ignore[reportArgumentType]
    await client.start()
    await client.run("load", world.load_new("new"))
    saved = await client.run("save", world.save("new", "runs/a/rl/00000/policy", "runs/a/rl/00000/state"))
    (second,) = saved["made_on"]
    assert second.endswith("/state-00001-of-00002.safetensors") and saved["made_on"][second] == 1
    first, other = saved["places"]
    assert [first["disk"], other["disk"]] == [f"{tmp_path}/node-{node}/published" for node in (0, 1)]
    assert first["url"] == f"{trainer.url}/files" != other["url"]
    await client.run("upload", {"attempt": "a1"})
    for name in ("policy", "state"):
        for record in saved[name]:
            assert (
                hashlib.sha256(store.read(f"runs/a/rl/00000/{name}/{record['name']}")).hexdigest() == record["sha256"]
            )
    weights = next(record["name"] for record in saved["policy"] if record["name"].endswith(".safetensors"))
    async with new_session() as session:
        for place, key, expected in (
            (first, KEY, 200),
            (other, KEY, 404),
            (first, "another", 401),
            (other, "another", 401),
        ):
            url = f"{place['url']}/runs/a/rl/00000/policy/{weights}"
            assert (await http_call(session, "GET", url, key, None, 5.0))[0] == expected, (url, key)
        for method, path in (("GET", "/health"), ("GET", "/status"), ("POST", "/train"), ("POST", "/upload")):
            url = other["url"].removesuffix("/files") + path
            assert (await http_call(session, method, url, KEY, {} if method == "POST" else None, 5.0))[0] == 404, path
    await client.close()


class PlayedNode:
    """What `Sent` asks of a trainer."""

    nodes = 3

    def __init__(self, node: int) -> None:
        self.node = node


@pytest.mark.parametrize(
    ("fault", "raised"), [(None, None), (OSError(28, "no space"), OSError), (StoreError("it was deleted"), StoreError)]
)
def test_the_first_node_waits_for_the_uploads_of_all_and_raises_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None, raised: type[Exception] | None
) -> None:
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(meeting.port))
    nodes = [Sent(PlayedNode(node)) for node in range(3)]  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor() as threads:
        for said in (None, fault):  # two saves
            waiting = threads.submit(nodes[0], None)
            nodes[2](said)
            time.sleep(3 * LOOK_S)
            assert not waiting.done()
            nodes[1](None)
            if said is None:
                assert waiting.result(timeout=DEADLINE_S) is None
            else:
                assert raised is not None
                with pytest.raises(raised, match=f"node 2: .*{said.args[-1]}"):
                    waiting.result(timeout=DEADLINE_S)


def launched(program: Path, ranks: int, log: Path) -> subprocess.Popen[bytes]:
    """A launcher with so many ranks that run `program` in its folder."""
    arguments = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--node-rank", "0", "--master-addr", "127.0.0.1"]
    argv = [sys.executable, "-m", "rlpipe.trainer.launcher", *arguments, "--master-port", "0", "--", str(program)]
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    with log.open("wb") as output:
        return subprocess.Popen(argv, cwd=program.parent, stdout=output, stderr=output, env=environment)


def test_a_trainer_that_is_told_to_end_says_so_and_shows_no_traceback(tmp_path: Path) -> None:
    """SIGTERM is how every trainer ends: a traceback in the log would be read as the fault."""
    program, log = tmp_path / "rank.py", tmp_path / "trainer.log"
    program.write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    launcher = launched(program, 1, log)
    until((tmp_path / "begun").exists, lambda: log.read_text()[-3000:], running=launcher)
    launcher.terminate()
    assert launcher.wait(timeout=DEADLINE_S) == 128 + signal.SIGTERM
    assert log.read_text() == "told to end (SIGTERM): the ranks of this node are ended\n"


def test_a_rank_that_ends_takes_the_others_with_it_and_is_named(tmp_path: Path) -> None:
    program, log = tmp_path / "rank.py", tmp_path / "trainer.log"
    program.write_text(
        "import os, pathlib, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    pathlib.Path('first').write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "while not pathlib.Path('first').exists() or not pathlib.Path('first').read_text():\n"
        "    time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    launcher = launched(program, 2, log)
    assert launcher.wait(timeout=DEADLINE_S) == 1
    assert log.read_text() == "rank 1 of this node ended with signal SIGKILL: the ranks of this node are ended\n"
    assert not psutil.pid_exists(int((tmp_path / "first").read_text()))
