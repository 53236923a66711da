"""What is used before it is committed: in which order it is committed, and what
becomes of it when something fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.base.errors import EngineError, StoreError, UserError
from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.loop import behind as module
from rlpipe.loop import session
from rlpipe.loop.behind import Behind, CommittedLate, Published
from rlpipe.loop.session import open_session
from rlpipe.store import patience
from rlpipe.store.artifacts import commit, find
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import sealed
from rlpipe.store.holder import Holder
from rlpipe.store.lease import TakenOver, acquire
from rlpipe.store.nearby import NodeDisk
from rlpipe.store.run import Run, create_or_continue
from tests.deadlines import DEADLINE_S
from tests.test_store_run import record_of, tiny

MOMENT = "2026-03-04T05:06:07.000+00:00"
FOLDER = "runs/a/rl/00000/policy"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_or_continue(tiny(open_store(f"file://{tmp_path}")))


def manifest(stage: str = "policy", inputs: dict[str, str] | None = None, ended_at: str = MOMENT) -> Manifest:
    return Manifest("a", "rl", 0, stage, inputs or {}, "0", {}, [], {}, 1, "x", MOMENT, ended_at)


def record(run: Run) -> IterationRecord:
    return record_of(run, 0, {}, {})


def published(land: Callable[[], Awaitable[object]]) -> Published:
    return Published([NodeDisk("/nowhere", "")], {}, land)


async def landed() -> None: ...


async def test_what_is_pending_is_answered_and_is_committed_in_order_once_it_has_landed(run: Run) -> None:
    behind, gate, order = Behind(run), asyncio.Event(), []
    state = behind.publish("runs/a/rl/00000/state", manifest("state"), published(gate.wait))
    policy = behind.publish(FOLDER, manifest(), published(gate.wait))
    key = run.iteration_key(0)
    behind.record(key, record(run))

    async def last() -> None:
        order.append(
            [find(run.store, state.folder) is not None, find(run.store, FOLDER) is not None, run.store.exists(key)]
        )

    behind.then(last)
    await asyncio.sleep(0.05)
    assert run.policy(1) == (policy, manifest())
    assert run.iteration(0) == record(run)
    assert run.num_committed("rl", 5) == 0
    assert behind.is_under_way(policy)
    assert (near := behind.nearby(policy)) is not None and near.folder == FOLDER
    assert behind.nearby(state) is None
    assert find(run.store, state.folder) is None
    gate.set()
    await behind.landed()
    assert order == [[True, True, True]]
    assert find(run.store, FOLDER) == (policy, manifest())
    assert run.num_committed("rl", 5) == 1
    assert not run.pending.artifacts and not run.pending.records
    assert not behind.is_under_way(policy)


async def test_who_waits_for_one_artifact_waits_for_that_and_what_was_before_it(run: Run) -> None:
    behind, first, second = Behind(run), asyncio.Event(), asyncio.Event()
    state = behind.publish("runs/a/rl/00000/state", manifest("state"), published(first.wait))
    policy = behind.publish(FOLDER, manifest(), published(second.wait))
    waiting = asyncio.create_task(behind.committed([policy.sha256]))
    await behind.committed(["of what was committed long ago"])
    first.set()
    await behind.committed([state.sha256])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    second.set()
    await waiting


async def test_the_first_fault_ends_the_commits_and_is_raised_for_whoever_waits(run: Run) -> None:
    behind, order = Behind(run), []

    async def fails() -> None:
        raise OSError("the store is away")

    async def never() -> None:
        order.append("never")

    behind.check()
    policy = behind.publish(FOLDER, manifest(), published(fails))
    behind.record(run.iteration_key(0), record(run))
    behind.then(never)
    for wait in (behind.landed, lambda: behind.committed([policy.sha256]), behind.landed):
        with pytest.raises(OSError, match="the store is away"):
            await wait()
    with pytest.raises(OSError, match="the store is away"):
        behind.check()
    assert find(run.store, FOLDER) is None
    assert not run.store.exists(run.iteration_key(0))
    assert order == []
    await behind.close()


async def test_a_commit_of_somebody_else_is_a_fault(run: Run) -> None:
    behind = Behind(run)
    commit(run.store, FOLDER, manifest(ended_at="2026-01-01T00:00:00.000+00:00"))
    behind.publish(FOLDER, manifest(), published(landed))
    with pytest.raises(
        CommittedLate, match="committed late, by somebody else, while this run used its own, of the same bits"
    ):
        await behind.landed()
    behind = Behind(run)
    other_bits = replace(manifest(), files=[FileRecord("000001l0/model.safetensors", 1, "0" * 64)])
    behind.publish(FOLDER, other_bits, published(landed))
    with pytest.raises(StoreError, match=r"of other bits \(model\.safetensors\)") as said:
        await behind.landed()
    assert not isinstance(said.value, CommittedLate)
    behind = Behind(run)
    behind.publish(FOLDER, manifest(inputs={"batch": "another"}), published(landed))
    with pytest.raises(UserError, match="input batch"):
        await behind.landed()
    behind = Behind(run)
    other = record_of(run, 0, {}, {"policy": ArtifactRef(FOLDER, "0" * 64)})
    run.store.create(run.iteration_key(0), sealed(other))
    behind.record(run.iteration_key(0), record(run))
    with pytest.raises(StoreError, match=r"iteration\.json was committed by somebody else"):
        await behind.landed()


async def test_a_record_of_the_same_artifacts_that_came_late_is_as_good(run: Run) -> None:
    late = record_of(run, 0, {"time/iteration_s": 1.0}, {})
    run.store.create(run.iteration_key(0), sealed(late))
    behind = Behind(run)
    behind.record(run.iteration_key(0), record(run))
    await behind.landed()
    assert run.iteration(0) == late


async def test_who_stops_waiting_ends_nothing(run: Run) -> None:
    behind, gate = Behind(run), asyncio.Event()
    policy = behind.publish(FOLDER, manifest(), published(gate.wait))
    for wait in (behind.landed(), behind.committed([policy.sha256])):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait, 0.05)  # short: it is given up
    gate.set()
    await behind.landed()
    assert find(run.store, FOLDER) is not None


async def test_close_waits_for_what_is_under_way_but_not_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await Behind(run).close()
    behind, gate = Behind(run), asyncio.Event()
    behind.publish("runs/a/rl/00000/state", manifest("state"), published(gate.wait))
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await behind.close()
    assert find(run.store, "runs/a/rl/00000/state") is not None
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    behind = Behind(run)
    behind.publish(FOLDER, manifest(), published(asyncio.Event().wait))
    behind.record(run.iteration_key(0), record(run))
    await behind.close()
    with pytest.raises(asyncio.CancelledError):
        await behind.landed()
    assert find(run.store, FOLDER) is None
    assert not run.store.exists(run.iteration_key(0))


@pytest.mark.parametrize("under_way", [True, False])
async def test_a_run_that_was_taken_over_is_closed_at_once_and_nothing_is_said_of_what_is_made_again(
    run: Run, under_way: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 2 * DEADLINE_S)
    held = acquire(run.store, "runs/a")
    run.store.create("runs/a/lease/000001.json", sealed(Holder("far", 7, 1.0)))
    behind = Behind(replace(run, lease=held))
    behind.publish(FOLDER, manifest(), published(asyncio.Event().wait if under_way else landed))
    with pytest.raises(TakenOver):
        held.check() if under_way else await behind.landed()
    await asyncio.wait_for(behind.close(), DEADLINE_S)
    assert caplog.text == "" and find(run.store, FOLDER) is None
    held.release()


@pytest.mark.parametrize("at", ["begin", "work"])
@pytest.mark.parametrize("error", [EngineError("an engine is gone"), asyncio.CancelledError()])
async def test_whoever_ends_a_session_asks_the_store_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: str
) -> None:
    """The look at the lease, before anything else, waited for five minutes after a
    person's SIGTERM while S3 was away."""
    monkeypatch.chdir(tmp_path)
    bounds: list[float] = []

    def counted(name: str) -> Callable[..., object]:
        call = getattr(Store, name)

        def calls(*arguments: object) -> object:
            bounds.append(patience._bound_s())
            return call(*arguments)

        return calls

    def fail(*_: object) -> None:
        for name in ("exists", "read", "put"):
            monkeypatch.setattr(Store, name, counted(name))
        raise error

    async def work() -> None:
        async with open_session(tiny(open_store(f"file://{tmp_path}/store"))):
            fail()

    if at == "begin":
        monkeypatch.setattr(session, "_begin", fail)
    with pytest.raises(type(error)):
        await work()
    assert len(bounds) >= 2, "a look at the lease, and its release"
    assert set(bounds) == {patience.FIRST_S}


def test_another_process_sees_the_store_alone(run: Run) -> None:
    async def publish() -> None:
        Behind(run).publish(FOLDER, manifest(), published(asyncio.Event().wait))
        assert run.artifact("rl", 0, "policy") is not None

    asyncio.run(publish())
    assert create_or_continue(run.config).artifact("rl", 0, "policy") is None
