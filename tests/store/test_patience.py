"""Every call of a store on S3 x every fault that passes by itself: the same answer as without it,
or one line with the first cause."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.store import patience, s3
from rlpipe.store.backend import Store, check_access, check_readable, open_store
from rlpipe.store.outside import outside_files
from rlpipe.store.patience import Away, hurrying, working
from rlpipe.store.transfer import PART_BYTES
from tests import s3_world
from tests.deadlines import DEADLINE_S, SHORT_S, until
from tests.s3_world import S3Proxy, S3Request, S3Server

FAULTS = ["503", "429", "reset", "hang"]
STATUSES = ["408", "500", "502", "504", "522"]
LASTS_S = 0.3
NEVER_S = 3600.0
LARGE = bytes(range(256)) * (PART_BYTES // 256) + b"the rest of two parts"
QUICK = {"FIRST_S": 0.3, "PAUSE_FIRST_S": 0.05, "PAUSE_MAX_S": 0.2, "SAID_AFTER_S": 0.1, "LOOK_S": 0.02}
Call = Callable[[Store, Path], object]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes a fraction of its time, and obstore itself hardly tries again."""
    monkeypatch.setattr(s3, "SILENCE", timedelta(seconds=SHORT_S / 3))
    monkeypatch.setattr(s3, "PART", timedelta(seconds=SHORT_S))
    monkeypatch.setattr(s3_world, "HANG_S", SHORT_S)
    for retries in (s3.RETRY, s3.RETRY_PARTS):
        monkeypatch.setitem(retries, "max_retries", 1)
    for name, seconds in QUICK.items():
        monkeypatch.setattr(patience, name, seconds)


@pytest.fixture
def store(s3_proxy: S3Proxy, s3_server: S3Server) -> Store:
    store = open_store(s3_server.url())
    for key, data in {"small": b"small", "large": LARGE, "folder/below/x": b"x"}.items():
        store.put(key, data)
    return store


def fetched(store: Store, path: Path) -> tuple[object, bytes]:
    return store.get_file("large", path / "target"), (path / "target").read_bytes()


def sent(store: Store, path: Path) -> tuple[object, bytes]:
    (path / "source").write_bytes(LARGE)
    return store.put_file("sent", path / "source"), store.read("sent")


def written(store: Store, data: bytes) -> bytes:
    store.put("put", data)
    return store.read("put")


def created(store: Store) -> tuple[bool, bytes]:
    key = uuid.uuid4().hex
    return store.create(key, b"mine"), store.read(key)


def deleted(store: Store) -> bool:
    store.put("gone", b"x")
    store.delete("gone")
    return store.exists("gone")


def outside(store: Store) -> list[bytes]:
    return [file.open().read() for name in ("small", "folder/") for file in outside_files("x", f"{store.url}/{name}")]


CALLS: dict[str, Call] = {
    "exists": lambda store, _: (store.exists("small"), store.exists("nothing")),
    "size": lambda store, _: store.size("large"),
    "read": lambda store, _: (store.read("small"), store.read("large")),
    "read_range": lambda store, _: bytes(store.read_range("large", 5, PART_BYTES + 9)),
    "get_file": fetched,
    "put": lambda store, _: (written(store, b"put"), written(store, LARGE)),
    "put_file": sent,
    "create": lambda store, _: created(store),
    "create another's": lambda store, _: (store.create("small", b"mine"), store.read("small")),
    "list": lambda store, _: store.list("folder"),
    "folders": lambda store, _: store.folders("folder"),
    "delete": lambda store, _: deleted(store),
    "outside": lambda store, _: outside(store),
    "check": lambda store, _: (check_access(store), check_readable(store)),
}


def for_a_while(fault: str, lasts_s: float = LASTS_S, of: str = "") -> Callable[[str, str], str]:
    """A fault of what is asked for `of`, that lasts so long from the first time on."""
    ends: list[float] = []

    def faults(method: str, target: str) -> str:
        if of not in target:
            return ""
        ends.append(time.monotonic() + lasts_s)
        return fault if len(ends) == 1 or time.monotonic() < ends[0] else ""

    return faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"), [*itertools.product(CALLS, FAULTS), *(("create", status) for status in STATUSES)]
)
def test_a_fault_that_passes_changes_no_answer(
    name: str, fault: str, store: Store, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    undisturbed = CALLS[name](store, tmp_path)
    with working():
        s3_proxy.faults = for_a_while(fault)
        assert CALLS[name](store, tmp_path) == undisturbed
    assert s3_proxy.num_faults


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_what_is_given_up_names_the_first_cause(
    name: str, store: Store, s3_proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "WORK_S", SHORT_S / 2)
    # obstore tries once itself, and of a large file two parts are asked for at once
    faults = iter(["503"] * 4)
    s3_proxy.faults = lambda method, target: next(faults, "reset")
    with working(), pytest.raises((Away, UserError), match=r"503 .*the first fault of \d+ s of tries") as given_up:
        CALLS[name](store, tmp_path)
    assert "\n" not in str(given_up.value) and "SlowDown" in str(given_up.value) + "SlowDown" * (
        name in ("exists", "size", "get_file", "outside")
    )


@pytest.mark.parametrize("status", ["400", "403", "404"])
@pytest.mark.parametrize("name", ["size", "read", "put", "create", "list", "folders", "delete"])
def test_what_another_try_answers_alike_is_asked_once(
    name: str, status: str, store: Store, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    s3_proxy.faults = lambda method, target: status
    with working(), pytest.raises((OSError, RuntimeError)):
        CALLS[name](store, tmp_path)
    assert s3_proxy.num_faults == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "reset", "hang"])
def test_where_a_person_waits_a_server_that_fails_is_named(
    fault: str, store: Store, s3_proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "WORK_S", NEVER_S)
    s3_proxy.faults = lambda method, target: fault
    for check in (check_access, check_readable):
        with pytest.raises(UserError, match=r"cannot be .*AWS_ENDPOINT_URL"):
            check(store)
    with working(), hurrying(), pytest.raises(Away):  # and where a heartbeat would come too late
        store.put("small", b"x")


def test_who_waits_ends_with_the_work(store: Store, s3_proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WORK_S", NEVER_S)
    s3_proxy.faults = lambda method, target: "503"
    with working() as work, ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(store.read, "small") for _ in range(4)]
        until(lambda: s3_proxy.num_faults >= 12)
        assert not any(each.done() for each in waiting)
        work.end()
        for each in waiting:
            with pytest.raises(Away, match="503"):
                each.result(timeout=DEADLINE_S)


async def test_who_waits_in_a_task_that_is_cancelled_ends(
    store: Store, s3_proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops the loop meanwhile, so nobody else could end it."""
    monkeypatch.setattr(patience, "WORK_S", NEVER_S)
    s3_proxy.faults = lambda method, target: "503"
    task = asyncio.current_task()
    assert task is not None
    threading.Timer(0.5, task.cancel).start()
    with working(), pytest.raises(Away, match="503"):
        store.read("small")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(5)
    task.uncancel()


def test_one_line_says_that_it_waits_and_one_that_it_is_over(
    store: Store, s3_proxy: S3Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    s3_proxy.faults = for_a_while("503", 2.0)
    with working(), ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(store.exists, ["nothing"] * 8))  # that it is not there is an answer
    said = [record.getMessage() for record in caplog.records if record.name == patience.log.name]
    assert len(said) == 2, said
    assert "503" in said[0] and said[0].endswith("it is tried again, for 300 s at most")
    assert "answered, after" in said[1]


def test_of_many_creators_one_wins_whatever_is_lost(store: Store, s3_proxy: S3Proxy) -> None:
    """Every third request is refused, and every third answer is lost, so the winner
    mostly does not know that it won."""
    count = iter(range(1_000_000))
    s3_proxy.faults = lambda method, target: ["503", "", ""][next(count) % 3]
    losses = iter(range(1_000_000))

    def loses(request: S3Request) -> bool:
        return request.method == "PUT" and next(losses) % 3 < 2

    s3_proxy.loses = loses
    with working(), ThreadPoolExecutor(8) as threads:
        for round_index in range(2):
            creates = [
                threads.submit(store.create, f"race-{round_index}", f"creator {index}".encode()) for index in range(8)
            ]
            won = [index for index, each in enumerate(creates) if each.result()]
            assert [f"creator {index}".encode() for index in won] == [store.read(f"race-{round_index}")]


def test_an_upload_whose_part_fails_for_long_is_sent_again(store: Store, s3_proxy: S3Proxy, tmp_path: Path) -> None:
    s3_proxy.faults = for_a_while("503", of="partNumber=2")
    with working():
        assert sent(store, tmp_path)[1] == LARGE
    starts = [
        request for request in s3_proxy.requests if request.query.startswith("uploads") and request.method == "POST"
    ]
    assert len(starts) > 1
