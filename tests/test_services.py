"""How a service of a run is found and when it ends: by its record alone."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config_source import read_config
from rlpipe.services import (
    ENGINES,
    KEY_VARIABLE,
    TRAINER,
    Registration,
    ServiceRecord,
    config_of,
    dismiss,
    nobody_starts,
    own_address,
    registered,
)
from rlpipe.store.backend import Store, open_store
from rlpipe.store.run import create_or_continue
from rlpipe.trainer.options import TrainerOptions, torchrun_argv
from rlpipe.trainer.process import GangProcess
from rlpipe.types import TrainerError, UserError

PRESETS = Path(__file__).parent.parent / "flows" / "presets"
ROOT = "runs/a"
DEADLINE_S = 20.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def service(store: Store, name: str = "node-0") -> Registration:
    return Registration(store, ROOT, ENGINES, ServiceRecord(name, "http://127.0.0.1:1"))


async def idle_for(seconds: float) -> float:
    return seconds


async def end_of(one: Registration, idle_s: float = 0.0, timeout_s: float = 0.0) -> str:
    async with asyncio.timeout(DEADLINE_S):
        return await one.until_over(lambda: idle_for(idle_s), timeout_s, asyncio.Event())


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


async def test_a_dismissed_service_ends(store: Store) -> None:
    one = service(store)
    await one.enter()
    dismiss(store, ROOT, ENGINES, "node-0")
    dismiss(store, ROOT, ENGINES, "node-0")  # by two at once
    await one.change(url="http://127.0.0.1:4")  # its gang came back a moment too late
    assert registered(store, ROOT, ENGINES) == []
    assert "dismissed" in await end_of(one)


async def test_a_service_whose_place_was_taken_ends_and_leaves_the_other_alone(store: Store) -> None:
    one, other = service(store), service(store)
    await one.enter()
    await other.enter()
    assert "dismissed" in await end_of(one)
    await one.leave()
    assert registered(store, ROOT, ENGINES) == [other.record]
    await other.change(url="http://127.0.0.1:3")  # its own change is no other
    assert await other.stands()


def test_a_start_never_meets_what_a_killed_one_left(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    killed, other = service(store).work_dir(), service(store, "node-1").work_dir()
    for folder in (killed, other):
        (folder / "weights" / "half").mkdir(parents=True)
        (folder / "node-0-0.log").write_text("why")
    fresh = service(store).work_dir()
    assert fresh != killed and not fresh.exists()
    assert not (killed / "weights").exists() and (killed / "node-0-0.log").exists()
    assert (other / "weights" / "half").exists()  # another service of this machine


async def test_a_service_without_work_ends(store: Store) -> None:
    one = service(store)
    await one.enter()
    assert "no work for 61 s" in await end_of(one, idle_s=61, timeout_s=60)


async def test_a_service_that_is_told_to_end_ends_at_once(store: Store) -> None:
    one, ended = service(store), asyncio.Event()
    await one.enter()
    ended.set()
    assert "told" in await one.until_over(lambda: idle_for(1e9), 0, ended)


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


async def test_a_service_takes_the_run_with_the_sections_it_was_given(store: Store) -> None:
    config = read_config("tiny", ["run=a", f"store={store.url}"], PRESETS)
    create_or_continue(config)
    told = await config_of(store, "a", trainer=config.trainer.model_copy(update={"ranks": 2}))
    assert told.trainer.ranks == 2 and told.rl == config.rl


async def test_without_prefect_no_deployment_starts() -> None:
    with pytest.raises(UserError, match=r"trainer\.place"):
        await nobody_starts(TRAINER, 0, False)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["trainer.nodes=2"], "trainer.place = 'deployment'"),
        (["engines.nodes=2"], "engines.place = 'deployment'"),
        (["engines.threads=3"], "choose one of (1, 2, 4, 8, 16)"),
        (["trainer.gpu_ids=[0,1]", "engines.gpu_ids=[1]"], "engines.gpu_ids=[1]: the trainer has some of them"),
    ],
)
def test_places_that_make_no_sense_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_config("tiny", sets, PRESETS)
    assert message in str(refused.value)


@given(nodes=st.integers(2, 9), ranks=st.integers(1, 8), data=st.data())
def test_the_nodes_of_a_gang_agree_on_where_they_meet(nodes: int, ranks: int, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    options = TrainerOptions(store="file:///s", host="127.0.0.1", port=1, work_dir="/tmp/w")
    argv = torchrun_argv(options, ranks, nodes=nodes, node=node, rendezvous="10.0.0.1:29500")
    told = dict(itertools.pairwise(argv))
    assert told["--nnodes"] == str(nodes) and told["--node-rank"] == str(node) and told["--nproc-per-node"] == str(ranks)
    assert (told["--master-addr"], told["--master-port"]) == ("10.0.0.1", "29500")


async def test_a_gang_that_did_not_come_up_can_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [sys.executable, "-c", "raise SystemExit('Address already in use')"]
    monkeypatch.setattr("rlpipe.trainer.process.torchrun_argv", lambda *_, **__: ends)
    gang = GangProcess(read_config("tiny", [], PRESETS), tmp_path, "key")
    for _attempt in range(2):
        with pytest.raises(TrainerError, match="Address already in use"):
            await gang.start()
