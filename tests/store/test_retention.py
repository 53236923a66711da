"""What a run keeps, what it prunes, and that neither a kill nor a fork at any
moment loses a file that must stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flows.cli import app
from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import BestReward, IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.config.sections import CheckpointConfig
from rlpipe.config.source import override_config, read_config
from rlpipe.report.show import iterations_report
from rlpipe.stages.model_source import model_folder
from rlpipe.store import audit, lease
from rlpipe.store.artifacts import PRUNED, commit, is_pruned, write_bytes
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import sealed
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import create_or_continue, fork, open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.pruned import read_pruned, wait_until_pruned
from rlpipe.store.retention import Forks, Pins, Retention, kept_states, kept_versions
from rlpipe.store.run import Run
from rlpipe.store.run_record import SHARED_BY_REDO
from rlpipe.stored.remaking import committed_version, export_policy, pruned_versions
from tests.store.test_run import PRESETS, tiny

KEPT = ["checkpoint.keep_policies_last=2", "checkpoint.keep_policies_every=5", "checkpoint.keep_states=1"]
STATE_EVERY = 3
MOMENT = "2026-03-04T05:06:07.000+00:00"


class Killed(BaseException):
    """The process dies here."""


def run_of(store: Store, *sets: str) -> Run:
    return create_or_continue(tiny(store, "sft.num_steps=0", "rl.num_iterations=40", *sets))


def commit_files(run: Run, iteration: int, stage: str) -> ArtifactRef:
    folder = run.folder("rl", iteration, stage)
    files = [
        write_bytes(run.store, folder, "a1", name, f"{name} {iteration}".encode()) for name in ("one.bin", "two.bin")
    ]
    version = iteration + 1 if stage == "policy" else None
    return commit(
        run.store,
        folder,
        Manifest(run.name, "rl", iteration, stage, {}, "0", {}, files, {}, version, "x", MOMENT, MOMENT),
    )[0]


def commit_iterations(run: Run, count: int, first: int = 0, best: int = 0) -> list[IterationRecord]:
    """Iterations with a policy, and a state every STATE_EVERY."""
    records, state = [], run.record(first - 1).state_iteration if first else -1
    for iteration in range(first, count):
        artifacts = {"policy": commit_files(run, iteration, "policy")}
        if (iteration + 1) % STATE_EVERY == 0:
            artifacts["state"], state = commit_files(run, iteration, "state"), iteration
        record = IterationRecord(
            run.name, iteration, iteration + 1, artifacts, state, {}, [], BestReward(min(best, iteration), 0.5), MOMENT
        )
        assert run.store.create(run.iteration_key(iteration), sealed(record))
        records.append(record)
    return records


def prune(run: Run) -> None:
    """What a session does at its start and end."""
    retention = Retention(run)
    retention.begin()
    retention.prune()
    retention.close()


def there(run: Run, stage: str = "policy") -> list[int]:
    """The iterations of a run whose artifacts of a stage have all their files; those
    without have none, and say so."""
    listed = set(run.store.list(run.root))
    whole = []
    for iteration in Progress(run).own_iterations():
        folder = f"{run.root}/rl/{iteration:05d}/{stage}"
        if f"{folder}/manifest.json" not in listed:
            continue
        files = {f"{folder}/a1/{name}" for name in ("one.bin", "two.bin")}
        if f"{folder}/{PRUNED}" in listed:
            record = read_pruned(run.store, folder)
            assert record is not None and record.finished and not files & listed, folder
        else:
            assert files <= listed, folder
            whole.append(iteration)
    return whole


@given(
    last=st.integers(0, 9),
    every=st.integers(0, 9),
    newest=st.integers(0, 60),
    pinned=st.sets(st.integers(-2, 70), max_size=6),
)
def test_the_newest_stay_those_at_equal_distances_and_what_is_pinned_and_no_more(
    last: int, every: int, newest: int, pinned: set[int]
) -> None:
    kept = kept_versions(CheckpointConfig(keep_policies_last=last, keep_policies_every=every), newest, pinned)
    assert kept == {
        version
        for version in range(1, newest + 1)
        if not last or version > newest - last or (every and version % every == 0) or version in pinned
    }
    if newest:
        assert newest in kept
    if last:
        assert len(kept) <= last + (newest // every if every else 0) + len(pinned)


@given(states=st.sets(st.integers(0, 40)), keep=st.integers(0, 5), pinned=st.sets(st.integers(0, 40), max_size=4))
def test_the_newest_states_stay_and_those_that_forks_go_on_from(states: set[int], keep: int, pinned: set[int]) -> None:
    kept = kept_states(CheckpointConfig(keep_states=keep), states, pinned)
    assert kept <= states and pinned & states <= kept
    assert kept == states if not keep else set(sorted(states)[-keep:]) <= kept
    assert not keep or len(kept) <= keep + len(pinned)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chain=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", *SHARED_BY_REDO]), st.integers(0, 4)), max_size=5)
)
def test_what_forks_of_forks_begin_from_is_pinned_in_the_run_that_has_it(
    tmp_path_factory: pytest.TempPathFactory, chain: list[tuple[int, str, int]]
) -> None:
    store = open_store(f"file://{tmp_path_factory.mktemp('s')}")
    runs = [run_of(store)]
    commit_iterations(runs[0], 5)
    for number, (parent, redo, at) in enumerate(chain):
        origin = runs[min(parent, len(runs) - 1)]
        child = fork(origin, at, override_config(origin.config, [f"run=f{number}"]), redo)
        commit_iterations(child, 5, first=child.fork_at + 1)
        runs.append(child)
    for run in runs:
        expected = Pins(set(), set())
        for child in runs[1:]:
            for iteration in (child.fork_at, child.fork_at - 1):
                if iteration >= 0 and child.owner("rl", iteration).name == run.name:
                    expected.policies.add(iteration)
            state = child.record(child.fork_at).state_iteration if child.fork_at >= 0 else -1
            if state >= 0 and child.owner("rl", state).name == run.name:
                expected.states.add(state)
        assert Forks(store).pins(run.name) == expected, run.name


def test_what_a_run_keeps_while_it_goes_on(store: Store) -> None:
    run = run_of(store, *KEPT)
    retention = Retention(run)
    retention.begin()
    for count in range(1, 13):
        for record in commit_iterations(run, count, first=count - 1, best=3):
            retention.committed(record)
    retention.close()
    # versions 5, 10, 11, 12, and 3, which sampled the best iteration
    assert there(run) == [2, 4, 9, 10, 11]
    assert there(run, "state") == [11]
    assert audit.verify(run) == (16, [])
    assert audit.unreferenced(run) == []
    gone = read_pruned(store, run.folder("rl", 5, "policy"))
    assert gone is not None and (gone.iteration, gone.state_iteration, gone.bytes) == (5, 5, 18)
    assert gone.command == "rlpipe fork a --at 5 --run NEW"


def test_everything_stays_where_nobody_asked_for_less_and_other_numbers_hold_from_the_next_start_on(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}")
    run = run_of(store)
    commit_iterations(run, 9)
    prune(run)
    assert there(run) == [*range(9)] and there(run, "state") == [2, 5, 8]
    prune(run_of(store, "checkpoint.keep_states=2"))
    assert there(run) == [*range(9)] and there(run, "state") == [5, 8]
    prune(run_of(store, "checkpoint.keep_policies_last=4"))
    assert there(run) == [5, 6, 7, 8]


def killed_at(store: Store, nth: int) -> Store:
    """The store for a process that dies before its nth write."""
    dying, count = open_store(store.url), iter(range(1_000_000))

    def deadly(write: Callable[..., object]) -> Callable[..., object]:
        def write_or_die(*arguments: object) -> object:
            if next(count) >= nth:
                raise Killed
            return write(*arguments)

        return write_or_die

    for name in ("create", "put", "delete"):
        setattr(dying, name, deadly(getattr(dying, name)))
    return dying


def prune_until_killed(run: Run, nth: int) -> bool:
    """Whether it was killed before it was done."""
    try:
        prune(Run(killed_at(run.store, nth), run.config, run.parent, run.fork_at, run.redo))
    except Killed:
        return True
    return False


@pytest.fixture(params=[*range(20), "every"])
def kills(request: pytest.FixtureRequest) -> Iterator[int]:
    """Before which of its writes a process dies, one process after the other: at random, and each
    at its first, second, ... write."""
    return iter(range(1000)) if request.param == "every" else iter(Random(request.param).choices(range(12), k=1000))


@pytest.mark.slow
def test_killed_in_the_middle_of_pruning_again_and_again_it_ends_with_what_it_should(
    tmp_path: Path, kills: Iterator[int]
) -> None:
    run = run_of(open_store(f"file://{tmp_path}"), *KEPT)
    commit_iterations(run, 12)
    fork(run, 6, override_config(run.config, ["run=c"]))
    num_killed = 0
    while prune_until_killed(run, next(kills)):
        num_killed += 1
        assert audit.verify(run)[1] == [] and audit.unreferenced(run) == []
    assert num_killed
    # 5 and 6: the fork's, which may be one step off policy
    assert there(run) == [4, 5, 6, 9, 10, 11]
    assert there(run, "state") == [5, 11]
    before = run.store.list(run.root)
    prune(run)
    assert run.store.list(run.root) == before


def test_who_only_reads_a_run_finishes_what_was_begun_and_prunes_nothing_else(tmp_path: Path) -> None:
    run = run_of(open_store(f"file://{tmp_path}"), *KEPT)
    commit_iterations(run, 12)
    assert prune_until_killed(run, 6), "in the middle of the second policy"
    retention = Retention(run)
    retention.begin()
    retention.close()
    assert there(run) == [*range(2, 12)] and there(run, "state") == [2, 5, 8, 11]


def test_what_is_missing_without_being_pruned_is_a_fault_and_so_is_what_is_wrong(store: Store) -> None:
    run = run_of(store, *KEPT)
    commit_iterations(run, 12)
    prune(run)
    assert audit.verify(run) == (16, [])
    (kept, pruned) = (run.folder("rl", iteration, "policy") for iteration in (11, 1))
    store.delete(f"{kept}/a1/one.bin")
    store.put(f"{pruned}/a1/two.bin", b"another")
    document = store.read(f"{pruned}/{PRUNED}")
    store.put(f"{run.folder('rl', 2, 'policy')}/{PRUNED}", document)
    faults = sorted(fault.partition("runs/a/rl/")[2] for fault in audit.verify(run)[1])
    assert [fault.split()[0] for fault in faults] == [
        "00001/policy/a1/two.bin",
        "00002/policy:",
        "00011/policy/a1/one.bin",
    ]
    assert "has 7 bytes; its manifest says 9" in faults[0] and "is that of policy of iteration 1 of run a" in faults[1]
    assert "is missing from the store" in faults[2]
    store.put(f"{run.folder('rl', 2, 'policy')}/{PRUNED}", document.replace(b"policy", b"strange"))
    assert any("00002/policy/pruned.json is damaged" in fault for fault in audit.verify(run)[1])


def test_gc_leaves_what_is_known_of_pruned_artifacts_and_who_works_for_the_run(store: Store) -> None:
    run = run_of(store, *KEPT)
    commit_iterations(run, 12)
    prune(run)
    held = lease.acquire(store, run.root)
    others = [
        f"{run.root}/{name}"
        for name in ("services/engines/host-1.json", "services/trainer/node-0.json", "approval/rl.json")
    ]
    for key in others:
        store.put(key, b"{}")
    before = set(store.list(run.root))
    write_bytes(store, run.folder("rl", 1, "policy"), "lost", "data.bin", b"an attempt that died")
    assert audit.sweep(run) == ["runs/a/rl/00001/policy/lost/data.bin"]
    assert set(store.list(run.root)) == before >= {*others, f"{run.root}/lease/000000.json"}
    held.release()
    assert is_pruned(store, run.folder("rl", 1, "policy")) and audit.verify(run)[1] == []


def test_what_is_shown_listed_read_and_trained_from_says_that_it_was_pruned(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = run_of(store, *KEPT)
    commit_iterations(run, 12)
    prune(run)
    marked = [line.split()[-2] for line in iterations_report(run).lines() if line.endswith("  pruned")]
    assert marked == [str(version) for version in (1, 2, 3, 4, 6, 7, 8, 9)]
    child = fork(run, 10, override_config(run.config, ["run=c"]))
    assert sum(line.endswith("  pruned") for line in iterations_report(child).lines()) == 8
    files = audit.files(run, "policy")
    assert [int(key.split("/")[3]) for key in files] == [4, 4, 9, 9, 10, 10, 11, 11] and all(map(store.exists, files))
    way = (
        "was pruned; `rlpipe export a --version 2 --to DIR` makes it again in a folder, `rlpipe fork a --at 1 "
        "--run NEW` in the store"
    )
    with pytest.raises(StoreError, match=way):
        materialise(store, run.policy(2)[0], tmp_path / "local")
    with pytest.raises(UserError, match=r"model\.path='.*' was pruned: make it again with `rlpipe export"):
        model_folder(run.config.model.model_copy(update={"path": store.address(f"{run.folder('rl', 1, 'policy')}/a1")}))


def interrupt(retention: Retention, at: str, act: Callable[[], object]) -> None:
    """Does `act` once, just before this kind of write of a retention."""
    store = retention._run.store
    write, acted = getattr(store, at), threading.Event()

    def act_and_write(*arguments: object) -> object:
        if not acted.is_set():
            acted.set()
            act()
        return write(*arguments)

    setattr(store, at, act_and_write)


def test_a_fork_that_begins_before_its_parent_looks_again_keeps_the_policy(store: Store) -> None:
    run = run_of(store, "checkpoint.keep_policies_last=3", "checkpoint.keep_states=1")
    commit_iterations(run, 8)
    other = open_store(store.url)
    retention = Retention(run)
    interrupt(retention, "create", lambda: fork(open_existing(other, "a"), 0, override_config(run.config, ["run=c"])))
    retention.begin()
    retention.prune()
    retention.close()
    assert there(run) == [0, 5, 6, 7] and audit.verify(run)[1] == []
    assert not wait_until_pruned(other, run.folder("rl", 0, "policy"))
    assert pruned_versions(open_existing(other, "c"), 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("parent", ["goes on", "is killed"])
def test_a_fork_that_begins_while_files_are_deleted_waits_for_the_end(store: Store, parent: str) -> None:
    run = run_of(store, "checkpoint.keep_policies_last=3")
    commit_iterations(run, 8)
    held = lease.acquire(store, run.root)
    other, folder = open_store(store.url), run.folder("rl", 0, "policy")
    seen: list[bool] = []
    with ThreadPoolExecutor(1) as fork_process:

        def begin_fork() -> None:
            fork(open_existing(other, "a"), 0, override_config(run.config, ["run=c"]))
            assert pruned_versions(open_existing(other, "c"), 1) == [1]
            waiting = fork_process.submit(wait_until_pruned, other, folder)
            waiting.add_done_callback(lambda ended: seen.append(ended.result()))
            if parent == "is killed":
                raise Killed

        retention = Retention(run)
        interrupt(retention, "delete", begin_fork)
        retention.begin()
        retention.prune()
        if parent == "is killed":
            with pytest.raises(Killed):
                retention.close()
            record = read_pruned(store, folder)
            assert record is not None and not record.finished and not seen
        else:
            retention.close()
        held.release()  # of who was killed: nobody holds the run
    assert seen == [True]
    assert there(run) == ([5, 6, 7] if parent == "goes on" else [1, 2, 3, 4, 5, 6, 7])
    prune(open_existing(other, "a"))
    assert audit.verify(run)[1] == []


def test_what_fails_in_the_middle_is_finished_by_the_next_pass_though_a_fork_begins_from_it_by_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = open_store(f"file://{tmp_path}")
    run = run_of(other, "checkpoint.keep_policies_last=3")
    commit_iterations(run, 8)
    retention, folders = Retention(run), run.store.folders
    retention.begin()

    def fork_and_fail(prefix: str) -> list[str]:
        if not other.exists(f"{run.folder('rl', 0, 'policy')}/{PRUNED}"):
            return folders(prefix)
        run.store.folders = folders  # type: ignore[method-assign]
        fork(open_existing(other, "a"), 0, override_config(run.config, ["run=c"]))
        raise OSError("the network is gone")

    run.store.folders = fork_and_fail  # type: ignore[method-assign]
    retention.prune()
    retention.prune()
    retention.close()
    assert wait_until_pruned(other, run.folder("rl", 0, "policy"))
    assert "the network is gone" in caplog.text and there(run) == [5, 6, 7]


def test_nothing_is_pruned_while_a_run_of_the_store_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(f"file://{tmp_path}")
    run = run_of(store, *KEPT)
    commit_iterations(run, 12)
    store.put("runs/strange/run.json", b"{}")
    prune(run)
    assert there(run) == [*range(12)] and "runs/strange/run.json is damaged" in caplog.text
    store.delete("runs/strange/run.json")
    prune(run)
    assert there(run) == [4, 9, 10, 11]


def test_a_wait_for_a_holder_that_does_not_go_on_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}")
    run = run_of(store, "checkpoint.keep_policies_last=3")
    commit_iterations(run, 8)
    held = lease.acquire(store, run.root)
    assert prune_until_killed(run, 2)
    monkeypatch.setattr("rlpipe.store.pruned.WAIT_S", 0.2)
    monkeypatch.setattr("rlpipe.store.pruned.POLL_S", 0.1)
    with pytest.raises(
        StoreError, match=r"00000/policy is being pruned by pid \d+ on host .*, and was not done after 0\.2 s"
    ):
        wait_until_pruned(store, run.folder("rl", 0, "policy"))
    held.release()
    assert wait_until_pruned(store, run.folder("rl", 0, "policy"))


def test_what_is_kept_may_change_between_two_starts_and_has_rules(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    run_of(store)
    assert run_of(store, *KEPT).config.checkpoint.keep_states == 1
    overlap = ["rl.overlap=iteration", "rl.importance=token_truncate"]
    with pytest.raises(
        UserError,
        match=r"^checkpoint\.keep_policies_last=1: with rl\.overlap='iteration' engines sample with the version before",
    ):
        read_config("tiny", [*overlap, "checkpoint.keep_policies_last=1"], PRESETS)
    for number in (0, 2):
        read_config("tiny", [*overlap, f"checkpoint.keep_policies_last={number}"], PRESETS)
    with pytest.raises(
        UserError, match=r"^checkpoint\.keep_policies_every=5: has no effect, because checkpoint\.keep_policies_last=0"
    ):
        read_config("tiny", ["checkpoint.keep_policies_every=5"], PRESETS)


def exported(run: Run, *arguments: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["export", run.name, "--store", run.store.url, *map(str, arguments)])
    return ended.exit_code, ended.output


def test_an_export_is_whole_or_not_there_and_takes_nobody_s_folder(store: Store, tmp_path: Path) -> None:
    run = run_of(store, *KEPT)
    target = tmp_path / "new" / "folder"
    assert exported(run, "--to", target)[0] == 2 and not target.exists()
    folder = run.folder("base", 0, "policy")
    files = [write_bytes(store, folder, "a1", "config.json", b"{}")]
    commit(store, folder, Manifest("a", "base", 0, "policy", {}, "0", {}, files, {}, 0, "x", MOMENT, MOMENT))
    commit_iterations(run, 12)
    prune(run)
    assert committed_version(run, None) == 12
    code, output = exported(run, "--to", target)
    assert code == 0 and output.endswith(f"version 12 of run a is in {target}\n")
    assert {path.name: path.read_bytes() for path in target.glob("*.bin")} == {
        "one.bin": b"one.bin 11",
        "two.bin": b"two.bin 11",
    }
    assert [path.name for path in target.parent.iterdir()] == ["folder"]
    code, output = exported(run, "--to", target, "--version", "5")
    assert code == 2 and f"--to {target}: something is there already" in output.replace("\n", "")
    code, output = exported(run, "--to", tmp_path / "other", "--version", "13")
    assert code == 2 and "version 13 of run a is not committed: there are 0 to 12" in output
    empty = tmp_path / "empty"
    empty.mkdir()
    assert exported(run, "--to", empty, "--version", "5")[0] == 0 and len([*empty.glob("*.bin")]) == 2
    store.put(f"{run.folder('rl', 9, 'policy')}/a1/one.bin", b"damaged")
    code, output = exported(run, "--to", tmp_path / "other", "--version", "10")
    assert code == 1 and "its manifest says" in output and not (tmp_path / "other").exists()
    code, output = exported(run, "--to", tmp_path / "other", "--set", "rl.clip_high=0.5")
    assert code == 2 and "--set rl.clip_high=0.5" in output


async def test_a_pruned_version_is_not_exported_from_a_run_that_is_worked_on_or_without_a_trainer(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = run_of(store, *KEPT)
    folder = run.folder("base", 0, "policy")
    commit(store, folder, Manifest("a", "base", 0, "policy", {}, "0", {}, [], {}, 0, "x", MOMENT, MOMENT))
    commit_iterations(run, 12)
    prune(run)
    elsewhere = override_config(run.config, ["trainer.place=deployment"])
    with pytest.raises(UserError, match=r"trainer\.place='deployment'.*rlpipe fork a --at 1 --run NEW"):
        await export_policy(elsewhere, 2, tmp_path / "policy")
    held = lease.acquire(store, run.root)
    with pytest.raises(
        UserError, match=r"version 2 was pruned, and run a is held by pid .*rlpipe fork a --at 1 --run NEW"
    ):
        await export_policy(run.config, 2, tmp_path / "policy")
    held.release()
    assert not (tmp_path / "policy").exists()
