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
from rlpipe.loop import session
from rlpipe.loop.session import open_session
from rlpipe.store import commits as module
from rlpipe.store import patience
from rlpipe.store.artifacts import commit, find
from rlpipe.store.backend import Store, open_store
from rlpipe.store.commits import Commits, CommittedLate, Published
from rlpipe.store.documents import sealed
from rlpipe.store.holder import Holder
from rlpipe.store.lease import TakenOver, acquire
from rlpipe.store.nearby import NodeDisk
from rlpipe.store.opening import create_or_continue
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from tests.deadlines import DEADLINE_S
from tests.store.test_run import record_of, tiny

MOMENT = "2026-03-04T05:06:07.000+00:00"
FOLDER = "runs/a/rl/00000/policy"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_or_continue(tiny(open_store(f"file://{tmp_path}")))


def manifest(stage: str = "policy", inputs: dict[str, str] | None = None, ended_at: str = MOMENT) -> Manifest:
    return Manifest("a", "rl", 0, stage, inputs or {}, "0", {}, [], {}, 1, "x", MOMENT, ended_at)


def record(run: Run) -> IterationRecord:
    return record_of(run, 0, {}, {})


def published(upload: Callable[[], Awaitable[object]]) -> Published:
    return Published([NodeDisk("/nowhere", "")], {}, {}, upload)


async def uploaded() -> None: ...


def commits_of(run: Run) -> Commits:
    return Commits(run.store, run.uncommitted, run.lease)


async def test_what_is_published_is_answered_and_is_committed_in_order_once_it_is_uploaded(run: Run) -> None:
    commits, gate, order = commits_of(run), asyncio.Event(), []
    state = commits.publish("runs/a/rl/00000/state", manifest("state"), published(gate.wait))
    policy = commits.publish(FOLDER, manifest(), published(gate.wait))
    key = run.iteration_key(0)
    commits.record(key, record(run))

    async def last() -> None:
        order.append(
            [find(run.store, state.folder) is not None, find(run.store, FOLDER) is not None, run.store.exists(key)]
        )

    commits.then(last)
    await asyncio.sleep(0.05)
    assert run.policy(1) == (policy, manifest())
    assert run.iteration(0) == record(run)
    assert Progress(run).num_committed("rl", 5) == 0
    assert commits.is_uncommitted(policy)
    assert (near := commits.nearby(policy)) is not None and near.folder == FOLDER
    assert commits.nearby(state) is None
    assert find(run.store, state.folder) is None
    gate.set()
    await commits.all_committed()
    assert order == [[True, True, True]]
    assert find(run.store, FOLDER) == (policy, manifest())
    assert Progress(run).num_committed("rl", 5) == 1
    assert not run.uncommitted.artifacts and not run.uncommitted.records
    assert not commits.is_uncommitted(policy)


async def test_who_waits_for_one_artifact_waits_for_that_and_what_was_before_it(run: Run) -> None:
    commits, first, second = commits_of(run), asyncio.Event(), asyncio.Event()
    state = commits.publish("runs/a/rl/00000/state", manifest("state"), published(first.wait))
    policy = commits.publish(FOLDER, manifest(), published(second.wait))
    waiting = asyncio.create_task(commits.committed([policy.sha256]))
    await commits.committed(["of what was committed long ago"])
    first.set()
    await commits.committed([state.sha256])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    second.set()
    await waiting


async def test_the_first_fault_ends_the_commits_and_is_raised_for_whoever_waits(run: Run) -> None:
    commits, order = commits_of(run), []

    async def fails() -> None:
        raise OSError("the store is away")

    async def never() -> None:
        order.append("never")

    commits.check()
    policy = commits.publish(FOLDER, manifest(), published(fails))
    commits.record(run.iteration_key(0), record(run))
    commits.then(never)
    for wait in (commits.all_committed, lambda: commits.committed([policy.sha256]), commits.all_committed):
        with pytest.raises(OSError, match="the store is away"):
            await wait()
    with pytest.raises(OSError, match="the store is away"):
        commits.check()
    assert find(run.store, FOLDER) is None
    assert not run.store.exists(run.iteration_key(0))
    assert order == []
    await commits.close()


async def test_a_commit_of_somebody_else_is_a_fault(run: Run) -> None:
    commits = commits_of(run)
    commit(run.store, FOLDER, manifest(ended_at="2026-01-01T00:00:00.000+00:00"))
    commits.publish(FOLDER, manifest(), published(uploaded))
    with pytest.raises(
        CommittedLate, match="committed late, by somebody else, while this run used its own, of the same bits"
    ):
        await commits.all_committed()
    commits = commits_of(run)
    other_bits = replace(manifest(), files=[FileRecord("000001l0/model.safetensors", 1, "0" * 64)])
    commits.publish(FOLDER, other_bits, published(uploaded))
    with pytest.raises(StoreError, match=r"of other bits \(model\.safetensors\)") as said:
        await commits.all_committed()
    assert not isinstance(said.value, CommittedLate)
    commits = commits_of(run)
    commits.publish(FOLDER, manifest(inputs={"batch": "another"}), published(uploaded))
    with pytest.raises(UserError, match="input batch"):
        await commits.all_committed()
    commits = commits_of(run)
    other = record_of(run, 0, {}, {"policy": ArtifactRef(FOLDER, "0" * 64)})
    run.store.create(run.iteration_key(0), sealed(other))
    commits.record(run.iteration_key(0), record(run))
    with pytest.raises(StoreError, match=r"iteration\.json was committed by somebody else"):
        await commits.all_committed()


async def test_a_record_of_the_same_artifacts_that_came_late_is_as_good(run: Run) -> None:
    late = record_of(run, 0, {"time/iteration_s": 1.0}, {})
    run.store.create(run.iteration_key(0), sealed(late))
    commits = commits_of(run)
    commits.record(run.iteration_key(0), record(run))
    await commits.all_committed()
    assert run.iteration(0) == late


async def test_who_stops_waiting_ends_nothing(run: Run) -> None:
    commits, gate = commits_of(run), asyncio.Event()
    policy = commits.publish(FOLDER, manifest(), published(gate.wait))
    for wait in (commits.all_committed(), commits.committed([policy.sha256])):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait, 0.05)  # short: it is given up
    gate.set()
    await commits.all_committed()
    assert find(run.store, FOLDER) is not None


async def test_close_waits_for_commits_in_progress_but_not_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await commits_of(run).close()
    commits, gate = commits_of(run), asyncio.Event()
    commits.publish("runs/a/rl/00000/state", manifest("state"), published(gate.wait))
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await commits.close()
    assert find(run.store, "runs/a/rl/00000/state") is not None
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    commits = commits_of(run)
    commits.publish(FOLDER, manifest(), published(asyncio.Event().wait))
    commits.record(run.iteration_key(0), record(run))
    await commits.close()
    with pytest.raises(asyncio.CancelledError):
        await commits.all_committed()
    assert find(run.store, FOLDER) is None
    assert not run.store.exists(run.iteration_key(0))


@pytest.mark.parametrize("is_uploading", [True, False])
async def test_a_run_that_was_taken_over_is_closed_at_once_and_nothing_is_said_of_what_is_made_again(
    run: Run, is_uploading: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 2 * DEADLINE_S)
    held = acquire(run.store, "runs/a")
    run.store.create("runs/a/lease/000001.json", sealed(Holder("far", 7, 1.0)))
    commits = commits_of(replace(run, lease=held))
    commits.publish(FOLDER, manifest(), published(asyncio.Event().wait if is_uploading else uploaded))
    with pytest.raises(TakenOver):
        held.check() if is_uploading else await commits.all_committed()
    await asyncio.wait_for(commits.close(), DEADLINE_S)
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
        commits_of(run).publish(FOLDER, manifest(), published(asyncio.Event().wait))
        assert run.artifact("rl", 0, "policy") is not None

    asyncio.run(publish())
    assert create_or_continue(run.config).artifact("rl", 0, "policy") is None
