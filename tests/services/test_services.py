"""How a service of a run is found and when it ends: by its record alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Never

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import EngineError, TrainerError, UserError
from rlpipe.config.operational import TrainerConfig
from rlpipe.config.source import read_config
from rlpipe.engines import fleet as fleet_module
from rlpipe.engines.fleet import Fleet
from rlpipe.processes.launch import free_port
from rlpipe.services import batch_job
from rlpipe.services import finder as finding_module
from rlpipe.services.finder import Peer, ServiceFinder, nobody_starts
from rlpipe.services.registration import (
    ENGINES,
    KEY_VARIABLE,
    TRAINER,
    Registration,
    ServiceRecord,
    dismiss,
    own_address,
    past,
    registered,
    serve,
)
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import sealed
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from rlpipe.trainer import process as process_module
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.process import (
    ALLOCATOR,
    RegisteredTrainer,
    TrainerOptions,
    TrainerProcesses,
    TrainerService,
    launcher_argv,
)
from tests.deadlines import DEADLINE_S, until_async
from tests.paths import PRESETS

ROOT = "runs/a"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def service(store: Store, name: str = "node-0") -> Registration:
    return Registration(store, ROOT, ENGINES, ServiceRecord(name, "http://127.0.0.1:1"))


@dataclass
class PlayedService:
    """A service that does nothing, or fails."""

    registration: Registration
    idle: float = 0.0
    fault: Exception | None = None
    closed: bool = False

    async def work(self) -> Never:
        while self.fault is None:
            await asyncio.sleep(0.01)
        raise self.fault

    async def idle_s(self) -> float:
        return self.idle

    async def close(self) -> None:
        self.closed = True


async def served(service: PlayedService, idle_s_max: float = 0.0, ended: asyncio.Event | None = None) -> str:
    async with asyncio.timeout(DEADLINE_S):
        reason = await serve(service, past(idle_s_max), ended or asyncio.Event())
    assert service.closed
    return reason


async def until_registered(registration: Registration) -> None:
    await until_async(registration.stands)


async def test_a_service_is_found_until_it_leaves(store: Store) -> None:
    one, other = service(store, "a"), service(store, "b")
    await one.enter()
    await other.enter()
    await other.change(url="http://127.0.0.1:2")
    assert [record.url for record in registered(store, ROOT, ENGINES)] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert registered(store, ROOT, TRAINER) == []
    await one.leave()
    await one.leave()
    assert [record.name for record in registered(store, ROOT, ENGINES)] == ["b"]


@pytest.mark.parametrize(
    "forged",
    [
        {"url": "http://10.6.6.6:80"},
        {"rendezvous": "10.6.6.6:29500"},
        {"engine": "vllm"},
        {"start": "0" * 16},
        {"proof": ""},
        {"proof": "0" * 64},
        {"proof": "ü"},
    ],
)
async def test_who_can_write_the_store_is_not_sent_the_services_key(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forged: dict[str, str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)
    ours = service(store, "a")
    await ours.enter()
    assert registered(store, ROOT, ENGINES) == [ours.record] and await ours.stands()
    place = f"{ROOT}/services/engines/a.json"
    store.put(place, sealed(replace(ours.record, **forged)))
    for _ in range(2):
        assert registered(store, ROOT, ENGINES) == []
    assert caplog.text.count("is not used") == 1 and not await ours.stands()
    for elsewhere in (
        f"{ROOT}/services/engines/b.json",
        f"{ROOT}/services/trainer/a.json",
        "runs/b/services/engines/a.json",
    ):
        store.put(elsewhere, sealed(ours.record))  # a right one of another place
    store.delete(place)
    assert [
        *registered(store, ROOT, ENGINES),
        *registered(store, ROOT, TRAINER),
        *registered(store, "runs/b", ENGINES),
    ] == []
    monkeypatch.setenv(KEY_VARIABLE, "another key")
    await ours.enter()
    assert registered(store, ROOT, ENGINES) == [ours.record]
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)
    assert registered(store, ROOT, ENGINES) == []


async def test_a_dismissed_service_ends(store: Store) -> None:
    one = service(store)
    serving = asyncio.create_task(served(PlayedService(one)))
    await until_registered(one)
    dismiss(store, ROOT, ENGINES, "node-0")
    dismiss(store, ROOT, ENGINES, "node-0")  # by two at once
    await one.change(url="http://127.0.0.1:4")  # its trainer came back a moment too late
    assert registered(store, ROOT, ENGINES) == []
    assert "dismissed" in await serving


async def test_a_service_whose_place_was_taken_ends_and_leaves_the_other_alone(store: Store) -> None:
    one, other = service(store), service(store)
    serving = asyncio.create_task(served(PlayedService(one)))
    await until_registered(one)
    await other.enter()
    assert "dismissed" in await serving
    assert registered(store, ROOT, ENGINES) == [other.record]
    await other.change(url="http://127.0.0.1:3")  # its own change is no other
    assert await other.stands()


def test_a_start_never_meets_what_a_killed_one_left(store: Store, tmp_path: Path) -> None:
    killed, other = service(store).work_dir(tmp_path), service(store, "node-1").work_dir(tmp_path)
    for folder in (killed, other):
        (folder / "weights" / "half").mkdir(parents=True)
        (folder / "node-0-0.log").write_text("why")
    fresh = service(store).work_dir(tmp_path)
    assert fresh != killed and not fresh.exists()
    assert not (killed / "weights").exists() and (killed / "node-0-0.log").exists()
    assert (other / "weights" / "half").exists()  # another service of this machine


async def test_a_service_without_work_ends(store: Store) -> None:
    assert "no work for 61 s" in await served(PlayedService(service(store), idle=61), idle_s_max=60)
    assert registered(store, ROOT, ENGINES) == []


async def test_a_service_may_open_as_many_files_as_the_system_allows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a work pool started: it never comes by the command line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits: list[str] = []
    monkeypatch.setattr("rlpipe.services.registration.raise_file_limit", lambda: limits.append("raised"))
    ended = asyncio.Event()
    ended.set()
    await served(PlayedService(service(store)), ended=ended)
    assert limits == ["raised"] and (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)


async def test_a_service_that_is_told_to_end_ends_at_once(store: Store) -> None:
    ended = asyncio.Event()
    ended.set()
    assert "told" in await served(PlayedService(service(store), idle=1e9), ended=ended)


async def test_a_service_that_cannot_go_on_says_why_and_leaves(store: Store) -> None:
    failing = PlayedService(service(store), fault=TrainerError("the trainer processes ended 6 times"))
    with pytest.raises(TrainerError, match="ended 6 times"):
        await served(failing)
    assert failing.closed and registered(store, ROOT, ENGINES) == []


class Neighbour:
    """A service at a real port, that can be made not to answer."""

    def __init__(self) -> None:
        self.status = 200
        self.calls = 0

    async def answer(self, _request: web.Request) -> web.Response:
        self.calls += 1
        if self.status == 502:  # a proxy
            return web.Response(text="<html>", status=502)
        return web.json_response({}, status=self.status)


@pytest.fixture
async def neighbour() -> AsyncIterator[tuple[Neighbour, str]]:
    played, app = Neighbour(), web.Application()
    app.router.add_get("/status", played.answer)
    async with TestServer(app) as server:
        yield played, f"http://127.0.0.1:{server.port}"


def run_with(store: Store, *sets: str) -> Run:
    return create_or_continue(read_config("tiny", ["run=a", f"store={store.url}", *sets], PRESETS))


class Starts(list[tuple[str, int, bool]]):
    """What a finder asks to be started."""

    async def start(self, kind: str, node: int, lost: bool) -> None:
        self.append((kind, node, lost))


async def looks(finder: ServiceFinder, enough: Callable[[], bool]) -> None:
    """Has it look for services, of which none answers, until that is enough."""
    finding = asyncio.create_task(finder.find())
    await until_async(enough)
    assert not finding.done()
    finding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await finding


@pytest.mark.parametrize("kind", [ENGINES, TRAINER])
async def test_missing_nodes_are_started_until_one_answers_and_dismissed_at_the_end(
    store: Store, neighbour: tuple[Neighbour, str], kind: str
) -> None:
    starts, (_, url) = Starts(), neighbour

    async def start(kind: str, node: int, lost: bool) -> None:
        await starts.start(kind, node, lost)
        if len(starts) == 2:  # both are missing, and one comes
            await Registration(store, ROOT, kind, ServiceRecord("node-0", url)).enter()

    finder = ServiceFinder(run_with(store, f"{kind}.place=deployment", f"{kind}.nodes=2"), kind, start)
    (peer,) = await asyncio.wait_for(finder.find(), DEADLINE_S)
    assert peer.record.url == url and starts[:2] == [(kind, 0, False), (kind, 1, False)]
    # a trainer answers as one; of the engines the second node is still missing
    assert starts[2:] == ([(ENGINES, 1, False)] if kind == ENGINES else [])
    await finder.close()
    assert registered(store, ROOT, kind) == []


async def test_a_trainer_is_there_when_its_first_node_answers(
    store: Store, neighbour: tuple[Neighbour, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have a URL too, of what they publish.

    `running` waits for nobody who has not come.
    """
    monkeypatch.setattr(finding_module, "LOST_S", 0.2)
    run, (_, url) = run_with(store, "trainer.place=elsewhere", "trainer.nodes=2"), neighbour
    trainer = RegisteredTrainer(run, nobody_starts)
    assert await trainer.running() == ""
    await Registration(store, ROOT, TRAINER, ServiceRecord("node-1", url)).enter()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(trainer.start(), 1.0)  # short: nobody comes
    assert await trainer.running() == ""
    for there, expected in (("", ""), (url, url), (f"http://127.0.0.1:{free_port()}", "")):
        await Registration(store, ROOT, TRAINER, ServiceRecord("node-0", there)).enter()
        assert await trainer.running() == expected


@pytest.mark.parametrize("kind", [ENGINES, TRAINER])
async def test_a_lost_service_is_replaced_once(store: Store, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What replaces it may have to wait for room: it is not replaced again at each look."""
    monkeypatch.setattr(finding_module, "LOST_S", 1.0)
    monkeypatch.setattr(finding_module, "LOOK_AGAIN_S", 0.1)
    starts = Starts()
    finder = ServiceFinder(run_with(store, f"{kind}.place=deployment"), kind, starts.start)
    await Registration(store, ROOT, kind, ServiceRecord("node-0", f"http://127.0.0.1:{free_port()}")).enter()
    await looks(finder, lambda: any(lost for _, _, lost in starts[:-2]))
    lost = [entry[2] for entry in starts]
    assert lost[0] is False and not any(first and second for first, second in itertools.pairwise(lost))


async def test_a_trainer_that_is_only_starting_is_not_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding_module, "LOST_S", 0.0)
    monkeypatch.setattr(finding_module, "LOOK_AGAIN_S", 0.05)
    starts = Starts()
    finder = ServiceFinder(run_with(store, "trainer.place=deployment"), TRAINER, starts.start)
    await Registration(store, ROOT, TRAINER, ServiceRecord("node-0", "", rendezvous="127.0.0.1:1")).enter()
    await looks(finder, lambda: len(starts) >= 5)
    assert not any(lost for _, _, lost in starts)


@pytest.mark.parametrize(("kind", "fault"), [(ENGINES, EngineError), (TRAINER, TrainerError)])
async def test_nobody_there_is_said_with_the_command_that_helps(
    store: Store, monkeypatch: pytest.MonkeyPatch, kind: str, fault: type[Exception]
) -> None:
    monkeypatch.setattr(finding_module, "LOOK_AGAIN_S", 0.01)
    finder = ServiceFinder(
        run_with(store, f"{kind}.place=elsewhere", f"{kind}.queue_timeout_s=0.01"), kind, nobody_starts
    )
    with pytest.raises(fault, match=r"within \d+ s; on .* run `rlpipe (host|trainer) --store .* --run a`"):
        await finder.find()


@pytest.mark.parametrize("kind", [ENGINES, TRAINER])
async def test_the_first_of_a_kind_is_waited_for_like_room_in_a_queue_and_later_ones_are_not(
    store: Store,
    neighbour: tuple[Neighbour, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """Two jobs of a batch system may start hours apart; a service that was there and is gone is
    nobody's to start again."""
    monkeypatch.setattr(finding_module, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(finding_module, "SAY_S", 0.02)
    finder = ServiceFinder(
        run_with(store, f"{kind}.place=elsewhere", f"{kind}.lost_timeout_s=0.01"), kind, nobody_starts
    )
    finding = asyncio.create_task(finder.find())
    await until_async(lambda: "; on " in caplog.text)  # the command that helps, while it waits
    assert not finding.done()
    one = Registration(store, ROOT, kind, ServiceRecord("node-0", neighbour[1]))
    await one.enter()
    (peer,) = await asyncio.wait_for(finding, DEADLINE_S)
    assert peer.record.name == "node-0"
    await one.leave()
    with pytest.raises((EngineError, TrainerError), match="within"):
        await asyncio.wait_for(finder.find(), DEADLINE_S)


def slurm_says(folder: Path, answer: str, code: int = 0) -> None:
    """Puts a `squeue` into the folder that answers so."""
    script = folder / "squeue.next"
    became = "*--states=all*--jobs=12*) echo '12 CANCELLED (None)';;"
    answers = f"printf '%s' {shlex.quote(answer)}; exit {code}"
    script.write_text(f'#!/bin/sh\ncase "$*" in *--me*--name=rlpipe-a-*) {answers};; {became} esac\n')
    script.chmod(0o755)
    script.replace(folder / "squeue")  # it may be asked at this moment


@pytest.mark.parametrize("kind", [ENGINES, TRAINER])
@pytest.mark.parametrize("killed_before", [False, True])
async def test_a_queued_job_is_waited_for_as_long_as_it_is_queued_and_one_that_ended_is_not(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    killed_before: bool,
) -> None:
    """However long that is, and whoever left a record when it was killed."""
    monkeypatch.setattr(finding_module, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(finding_module, "SAY_S", 0.1)
    monkeypatch.setattr(batch_job, "ASK_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(f"RLPIPE_{kind.upper()}_JOB", f"rlpipe-a-{kind}")
    slurm_says(tmp_path, "12 PENDING (Resources)\n")
    if killed_before:
        await Registration(store, ROOT, kind, ServiceRecord("node-0", f"http://127.0.0.1:{free_port()}")).enter()
    waits = [f"{kind}.place=elsewhere", f"{kind}.queue_timeout_s=0.05", f"{kind}.lost_timeout_s=0.05"]
    finder = ServiceFinder(run_with(store, *waits), kind, nobody_starts)
    finding = asyncio.create_task(finder.find())
    await until_async(lambda: caplog.text.count(f"Slurm job rlpipe-a-{kind}: 12 PENDING (Resources)") >= 3)
    assert not finding.done()
    slurm_says(tmp_path, "slurm_load_jobs error: Unable to contact slurm controller\n", 1)
    await until_async(lambda: "is not known" in caplog.text)
    slurm_says(tmp_path, "maintenance\n")
    await until_async(lambda: "'maintenance' is no job and its state" in caplog.text)
    await asyncio.sleep(0.2)
    assert not finding.done(), "what it said last holds"
    slurm_says(tmp_path, "")
    with pytest.raises(
        (EngineError, TrainerError),
        match=rf", because its job has ended: Slurm job rlpipe-a-{kind}: 12 CANCELLED \(None\); the log of that job",
    ):
        await asyncio.wait_for(finding, DEADLINE_S)


@pytest.mark.parametrize("told", ["12 RUNNING (None)", "12 RUNNING (None)\n13 PENDING (Dependency)"])
async def test_a_job_that_runs_and_does_not_join_is_waited_for_as_one_that_is_lost(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setattr(finding_module, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RLPIPE_TRAINER_JOB", "rlpipe-a-trainer")
    slurm_says(tmp_path, told)
    await Registration(store, ROOT, TRAINER, ServiceRecord("node-0", f"http://127.0.0.1:{free_port()}")).enter()
    finder = ServiceFinder(
        run_with(store, "trainer.place=elsewhere", "trainer.lost_timeout_s=0.1"), TRAINER, nobody_starts
    )
    with pytest.raises(TrainerError, match=r"within \d+ s; Slurm job rlpipe-a-trainer: 12 RUNNING"):
        await asyncio.wait_for(finder.find(), DEADLINE_S)


async def test_a_service_that_is_reached_again_is_said_to_be_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    finder = ServiceFinder(run_with(store, "engines.place=elsewhere"), ENGINES, nobody_starts)
    await Registration(store, ROOT, ENGINES, ServiceRecord("node-0", f"http://127.0.0.1:{port}")).enter()
    (peer,) = await finder.current()
    assert not await peer.answers()
    for _look in range(3):
        await finder.current()
    app = web.Application()
    app.router.add_get("/status", Neighbour().answer)
    async with TestServer(app, port=port):
        assert await peer.answers()
        for _look in range(3):
            await finder.current()
    told = [message for message in caplog.messages if "reached" in message]
    assert [message.split(" at ")[0] for message in told] == ["engines: node-0", "engines: node-0"]
    assert told[0].endswith("cannot be reached") and told[1].endswith("is reached again")


async def test_the_nodes_behind_the_first_are_idle_once_their_part_of_the_trainer_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_with(store, "trainer.place=elsewhere", "trainer.nodes=2").config
    behind = TrainerService(store, config, 1, "127.0.0.1")
    now = time.monotonic()
    monkeypatch.setattr(process_module, "time", SimpleNamespace(monotonic=lambda: now + 100))
    assert await behind.idle_s() >= 100
    monkeypatch.setattr(TrainerProcesses, "alive", True)
    behind._processes = TrainerProcesses(config, Path("/nowhere"), "key", node=1)
    assert await behind.idle_s() == 0


@pytest.mark.parametrize("status", [409, 410, 500, 502, 503])
async def test_a_trainer_that_says_it_is_lost_is_not_idle(
    store: Store, neighbour: tuple[Neighbour, str], status: int
) -> None:
    """The service starts it again; its answer has no idle time."""
    played, url = neighbour
    played.status = status
    config = run_with(store, "trainer.place=elsewhere").config
    first = TrainerService(store, config, 0, "127.0.0.1")
    first._processes = TrainerProcesses(config, Path("/nowhere"), "key")
    first._processes.url = url
    assert await first.idle_s() == 0.0 and played.calls == 1


async def test_who_refuses_the_key_is_no_service_of_ours_and_not_lost(
    store: Store, neighbour: tuple[Neighbour, str]
) -> None:
    played, url = neighbour
    peer = Peer(ServiceRecord("node-0", url))
    played.status = 401
    assert not await peer.answers() and not peer.lost and not peer.resting
    played.status = 409
    assert await peer.answers() and played.calls == 2
    played.status = 502
    with pytest.raises(ConnectionError, match=f"node-0 at {url}/status: answered 502 without JSON"):
        await peer.call("GET", "/status")


async def test_what_cannot_be_reached_rests_until_it_answers_again() -> None:
    peer = Peer(ServiceRecord("node-0", f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(ConnectionError, match="node-0 at http"):
        await peer.call("GET", "/status")
    assert peer.resting and not peer.lost


async def test_a_torn_or_strange_record_is_passed_over(store: Store) -> None:
    await service(store).enter()
    store.put(f"{ROOT}/services/{ENGINES}/other.json", b'{"name": "of another version"}')
    store.put(f"{ROOT}/services/{ENGINES}/.half.json.1.tmp", b"{")
    assert [record.name for record in registered(store, ROOT, ENGINES)] == ["node-0"]


def test_beyond_loopback_a_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("RLPIPE_ADDRESS", "10.0.0.7")
    with pytest.raises(UserError, match=r"10\.0\.0\.7.*RLPIPE_SERVICE_KEY"):
        own_address()
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert own_address() == "10.0.0.7" and own_address("10.0.0.8") == "10.0.0.8"


async def test_without_prefect_no_deployment_starts() -> None:
    with pytest.raises(UserError, match=r"trainer\.place"):
        await nobody_starts(TRAINER, 0, False)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["trainer.nodes=2"], "trainer.place = 'deployment'"),
        (["engines.nodes=2"], "engines.place = 'deployment'"),
        (["engines.threads=3"], "choose one of (1, 2, 4, 8, 16)"),
        (
            ["trainer.gpu_ids=[0,1]", "engines.gpu_ids=[1]"],
            "engines.gpu_ids=[1]: [1] are also in trainer.gpu_ids of the same machine",
        ),
    ],
)
def test_places_that_make_no_sense_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_config("tiny", sets, PRESETS)
    assert message in str(refused.value)


@given(nodes=st.integers(2, 9), ranks=st.integers(1, 8), data=st.data())
def test_the_nodes_of_a_trainer_agree_on_where_they_meet(nodes: int, ranks: int, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    options = TrainerOptions(
        store="file:///s", run="a", host="127.0.0.1", port=1, work_dir="/tmp/w",
        trainer=TrainerConfig(ranks=ranks, nodes=nodes, place="elsewhere"),
    )  # fmt: skip
    argv = launcher_argv(options, node, "10.0.0.1:29500")
    options_of = dict(itertools.pairwise(argv))
    assert (
        options_of["--nnodes"] == str(nodes)
        and options_of["--node-rank"] == str(node)
        and options_of["--nproc-per-node"] == str(ranks)
    )
    assert (options_of["--master-addr"], options_of["--master-port"]) == ("10.0.0.1", "29500")


async def test_a_trainer_that_did_not_come_up_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [sys.executable, "-c", "raise SystemExit('Address already in use')"]
    monkeypatch.setattr("rlpipe.trainer.process.launcher_argv", lambda *_, **__: ends)
    trainer = TrainerProcesses(read_config("tiny", [], PRESETS), tmp_path, "key")
    for _attempt in range(2):
        with pytest.raises(TrainerError, match="Address already in use"):
            await trainer.start()


def test_a_trainer_on_gpus_grows_its_segments_unless_somebody_chose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(*sets: str) -> dict[str, str]:
        config = read_config("tiny", ["model.dtype=bfloat16", *sets], PRESETS)
        return TrainerProcesses(config, tmp_path, "key")._environment()

    for name in (*ALLOCATOR, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert environment("trainer.gpu_ids=[2]").items() >= {
        "CUDA_VISIBLE_DEVICES": "2", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }.items()  # fmt: skip
    assert not ALLOCATOR & environment().keys()
    for name in ALLOCATOR:
        with monkeypatch.context() as chosen:
            chosen.setenv(name, "max_split_size_mb:512")
            assert not ALLOCATOR & environment("trainer.gpu_ids=[2]").keys()


async def test_what_a_trainer_warns_of_is_said_by_the_flow(caplog: pytest.LogCaptureFixture) -> None:
    """Its own log is on another machine."""

    async def load(_request: web.Request) -> web.Response:
        return web.json_response(
            {"result": {"differs": "", "warnings": ["qwen3: attention is computed as its own code has it"]}}
        )

    app = web.Application()
    app.router.add_post("/load", load)
    async with TestServer(app) as server:

        class Place:
            key = "key"

            async def start(self) -> str:
                return f"http://127.0.0.1:{server.port}"

            async def close(self) -> None: ...

        client = TrainerClient(Place())  # type: ignore[arg-type]
        await client.start()
        await client.run("load", {})
        await client.close()
    assert (
        "rlpipe.trainer.client",
        logging.WARNING,
        "trainer: qwen3: attention is computed as its own code has it",
    ) in caplog.record_tuples


async def test_engines_that_take_long_to_come_are_said_to_and_that_one_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of hosts elsewhere the flow sees no log: a large model loads for minutes."""
    now_s, sampling = 1000.0, False

    class PlayedHost:
        name, progress = "far", 0

        async def clients(self, version: int) -> list[str]:
            return ["an engine"] if sampling else []

    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    fleet = Fleet(lambda: None)  # type: ignore[arg-type]
    fleet.hosts, fleet._served = [PlayedHost()], (None, 0, None, None)  # type: ignore[assignment]

    async def look_for(seconds: int) -> list[str]:
        nonlocal now_s
        caplog.clear()
        for _look in range(seconds):
            now_s += 1
            await fleet.look_up()
        return caplog.messages

    assert await look_for(25) == []
    said = await look_for(70)
    assert [line.split(":")[0] for line in said] == [
        f"no engine has been able to sample for {seconds} s" for seconds in (30, 60, 90)
    ]
    assert "the engines of far are starting, loading weights, or lost" in said[0]
    sampling = True
    assert await look_for(100) == ["engines sample again, after 95 s"]
    sampling, now_s = False, now_s + 3600  # the trainer's turn: nobody asks
    assert await look_for(25) == []
