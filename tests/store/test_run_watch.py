"""When a service that nobody starts again ends: by its run's beats in the store,
on a clock that the test turns."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpipe.base.errors import UserError
from rlpipe.config.source import read_config
from rlpipe.services import registration, run_watch
from rlpipe.services.registration import config_of
from rlpipe.services.run_watch import RunWatch
from rlpipe.store import lease
from rlpipe.store.backend import Store, open_store
from rlpipe.store.lease import STALE_S, acquire, announce, pulse, withdraw
from rlpipe.store.opening import create_or_continue
from tests.deadlines import DEADLINE_S, until
from tests.paths import PRESETS

ROOT, IDLE_S, STEP_S = "runs/a", 900.0, 10
LEASE, ANNOUNCED, OTHER = "000000", "announced-01", "announced-02"


class World:
    """What a store says, and a clock that stands still: a test turns it."""

    def __init__(self, store: Store) -> None:
        self.store, self.now_s, self.looks, self.down = store, 1000.0, 0, False
        self.said: dict[str, float] = {}

    def beat(self, name: str) -> None:
        self.said[name] = self.now_s

    def look(self, store: Store, root: str) -> str:
        self.looks += 1
        if self.down:
            raise OSError("the store is down")
        return f"{self.said}"

    async def ended_after(self, watch: RunWatch, seconds: int, *beating: str, idle_s: float = 1e6) -> float:
        """After how many seconds a service without work for `idle_s` is to end, with those beating;
        infinity: it stays so long."""
        began_s = self.now_s
        while self.now_s < began_s + seconds:
            for name in beating:
                self.beat(name)
            if await watch.is_over(idle_s):
                return self.now_s - began_s
            self.now_s += STEP_S
        return float("inf")


@pytest.fixture
def turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(open_store(f"file://{tmp_path}/store"))
    monkeypatch.setattr(run_watch, "time", SimpleNamespace(monotonic=lambda: world.now_s))
    monkeypatch.setattr(run_watch, "pulse", world.look)
    return world


@pytest.mark.parametrize("idle_s", [5, 45, 300, IDLE_S, 7200])
@pytest.mark.parametrize("beating", [[LEASE], [ANNOUNCED], [LEASE, ANNOUNCED], [ANNOUNCED, OTHER]])
async def test_it_stays_while_somebody_works_on_the_run_or_prepares_it(
    turned: World, idle_s: float, beating: list[str]
) -> None:
    """An SFT of an hour, slow scoring, a model that is fetched: whatever the run
    does, and whatever it asks for."""
    watch = RunWatch(turned.store, "a", idle_s)
    assert await turned.ended_after(watch, 3600, *beating) == float("inf")
    assert turned.looks <= 1 + 3600 / min(50, max(10, idle_s / 2))
    gone_after = await turned.ended_after(watch, 20000)
    assert idle_s < gone_after <= idle_s + STALE_S + 2 * 50


async def test_another_start_of_the_run_within_the_idle_time_keeps_it(turned: World) -> None:
    watch = RunWatch(turned.store, "a", IDLE_S)
    for _start in range(3):
        assert await turned.ended_after(watch, 3600, LEASE) == float("inf")
        assert await turned.ended_after(watch, int(IDLE_S)) == float("inf")
    assert await turned.ended_after(watch, 600) < 600


async def test_nobody_at_all_is_waited_for_as_long_as_the_idle_time(turned: World) -> None:
    assert IDLE_S < await turned.ended_after(RunWatch(turned.store, "a", IDLE_S), 3600) < IDLE_S + 2 * 50
    turned.beat(LEASE)  # of a process that was killed
    turned.beat(OTHER)
    assert IDLE_S < await turned.ended_after(RunWatch(turned.store, "a", IDLE_S), 3600) < IDLE_S + 2 * 50
    assert await turned.ended_after(RunWatch(turned.store, "a", 0), 24 * 3600) == float("inf")  # never


async def test_who_is_asked_for_work_stays_whatever_the_store_says(turned: World) -> None:
    assert await turned.ended_after(RunWatch(turned.store, "a", IDLE_S), 3600, idle_s=1) == float("inf")


async def test_a_store_that_is_down_ends_no_service(turned: World) -> None:
    watch = RunWatch(turned.store, "a", IDLE_S)
    turned.down = True
    assert await turned.ended_after(watch, 7200) == float("inf")
    turned.down = False
    assert await turned.ended_after(watch, 3600) > IDLE_S


async def test_one_that_waits_says_what_for_a_line_a_minute(turned: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watch = RunWatch(turned.store, "a", IDLE_S)
    await turned.ended_after(watch, 600, LEASE)
    lines = [record.getMessage() for record in caplog.records]
    assert 9 <= len(lines) <= 10 and all("run a is worked on, or being prepared" in line for line in lines)
    caplog.clear()
    await turned.ended_after(watch, 3600)
    assert (
        "nobody has worked on run a for" in caplog.messages[-1] and "after 935 s of that it ends" in caplog.messages[-1]
    )
    caplog.clear()
    await turned.ended_after(watch, 600, LEASE, idle_s=59)  # it had work a moment ago
    assert caplog.messages == []


# the announcement itself


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def beats(store: Store) -> None:
    """Returns once the pulse has changed twice."""
    for _beat in range(2):
        before = pulse(store, ROOT)
        until(lambda before=before: pulse(store, ROOT) != before)


def test_an_announcement_beats_until_the_run_is_held_and_is_no_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    announce(store, ROOT)
    beats(store)
    (key,) = store.list(ROOT)
    assert "/lease/announced-" in key and not store.exists(f"{ROOT}/run.json")
    held = acquire(store, ROOT)
    assert store.list(ROOT) == [f"{ROOT}/lease/000000.json"]  # the lease says it from here on
    beats(store)
    held.release()
    assert pulse(store, ROOT) == pulse(store, ROOT)


def test_two_announcements_are_two_and_one_that_is_withdrawn_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    other = open_store(f"{store.url}/../store/")  # as another process has it
    assert other.url == store.url
    announce(store, ROOT)
    mine = lease._announcements.pop((store.url, ROOT))
    announce(other, ROOT)
    until(lambda: len(store.list(ROOT)) == 2)
    mine.vanish()
    beats(store)
    withdraw(store, ROOT)
    withdraw(store, ROOT)
    assert store.list(ROOT) == []


def test_a_process_that_was_forked_takes_no_announcement_along(store: Store) -> None:
    program = (
        "import os, sys; from rlpipe.store import lease; from rlpipe.store.backend import open_store; "
        "lease.HEARTBEAT_S = 0.05\n"
        f"store = open_store({store.url!r}); lease.announce(store, {ROOT!r})\n"
        f"while not any(key.endswith('.json') for key in store.list({ROOT!r})): pass\n"
        "if not os.fork(): sys.exit()\n"
        # not the file that the next heartbeat writes before it takes the place of the last
        f"os.wait(); assert len([key for key in store.list('{ROOT}/lease') if key.endswith('.json')]) == 1"
    )
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=True)
    assert store.list(f"{ROOT}/lease") == []


def test_a_config_that_is_refused_at_once_writes_nothing(store: Store, tmp_path: Path) -> None:
    announce(store, ROOT)
    withdraw(store, ROOT)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("ending", "left"), [("raise SystemExit(2)", 0), ("os.kill(os.getpid(), 9)", 1)])
def test_a_process_that_ends_takes_its_announcement_along_and_a_killed_one_beats_no_more(
    store: Store, ending: str, left: int
) -> None:
    program = (
        "import os, time; from rlpipe.store import lease; from rlpipe.store.backend import open_store; "
        "lease.HEARTBEAT_S = 0.05\n"
        f"store = open_store({store.url!r}); lease.announce(store, {ROOT!r})\n"
        f"while not any(key.endswith('.json') for key in store.list({ROOT!r})): time.sleep(0.01)\n{ending}"
    )
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=False)
    beats = [key for key in store.list(f"{ROOT}/lease") if key.endswith(".json")]  # a kill may leave a .tmp beside
    assert len(beats) == left and len(store.folders("runs")) == left, "with its folders"


# waiting for a run to begin


async def test_a_run_is_waited_for_until_it_begins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "RUN_POLL_S", 0.01)
    config = read_config("tiny", ["run=a", f"store={store.url}"], PRESETS)
    asking = asyncio.create_task(
        config_of(RunWatch(store, "a", 0), trainer=config.trainer.model_copy(update={"ranks": 2}))
    )
    await asyncio.sleep(0.1)
    assert not asking.done()
    create_or_continue(config)
    of_run = await asyncio.wait_for(asking, DEADLINE_S)
    assert of_run.trainer.ranks == 2 and of_run.rl == config.rl


async def test_a_run_that_nobody_begins_is_given_up_with_the_runs_that_there_are(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "RUN_POLL_S", 0.01)
    monkeypatch.setattr(run_watch, "STALE_S", 0.0)
    monkeypatch.setattr(run_watch, "HEARTBEAT_S", 0.01)
    caplog.set_level(logging.INFO)
    create_or_continue(read_config("tiny", ["run=first", f"store={store.url}"], PRESETS))
    with pytest.raises(UserError, match=r"no run 'a' in .* \(runs: first\)"):
        await asyncio.wait_for(config_of(RunWatch(store, "a", 0.05)), DEADLINE_S)
    assert "waiting for run a, which nobody has begun in" in caplog.text and "(runs: first)" in caplog.text


async def test_what_is_no_run_name_and_a_record_that_is_refused_are_said_at_once(store: Store) -> None:
    with pytest.raises(UserError, match="a run name is a folder name"):
        await config_of(RunWatch(store, "../a", 0))
    create_or_continue(read_config("tiny", ["run=a", f"store={store.url}"], PRESETS))
    record = store.read(f"{ROOT}/run.json").replace(b'"num_layers":4', b'"num_layers":-4')
    tree = {key: value for key, value in json.loads(record).items() if key != "seal"}
    store.put(f"{ROOT}/run.json", json.dumps(tree).encode())
    with pytest.raises(UserError, match="this version refuses"):
        await asyncio.wait_for(config_of(RunWatch(store, "a", 0)), DEADLINE_S)
