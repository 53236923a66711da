"""Runs in the store: identity, how far they are, forks, the lease, verify and gc."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import BestReward, IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config, read_config
from rlpipe.stages.training import rl_job
from rlpipe.store import audit, holder, lease
from rlpipe.store.artifacts import MANIFEST, commit, write_bytes
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import sealed
from rlpipe.store.forks import differences, fixed_differences, forked_from
from rlpipe.store.opening import create_or_continue, fork, open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import AT_SFT, Run
from rlpipe.store.run_record import SHARED_BY_REDO, run_names
from tests.deadlines import DEADLINE_S, SHORT_S
from tests.paths import PRESETS


def tiny(store: Store, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store={store.url}", *sets], PRESETS)


def commit_stage(run: Run, iteration: int, stage: str, inputs: dict[str, str] | None = None) -> ArtifactRef:
    folder = run.folder("rl", iteration, stage)
    record = write_bytes(run.store, folder, "a1", "data.bin", f"{run.name} {iteration} {stage}".encode())
    manifest = Manifest(
        run.name, "rl", iteration, stage, inputs or {}, "0", {}, [record], {}, iteration + 1, "x", "t", "t"
    )
    return commit(run.store, folder, manifest)[0]


def record_of(
    run: Run, iteration: int, metrics: dict[str, float], artifacts: dict[str, ArtifactRef]
) -> IterationRecord:
    best = BestReward(iteration, metrics.get("rollout/reward_mean", 0.0))
    return IterationRecord(
        run.name, iteration, iteration + 1, artifacts, -1, metrics, [], best, "2026-03-04T05:06:07.000+00:00"
    )


def commit_iterations(run: Run, count: int, first: int = 0) -> None:
    for iteration in range(first, count):
        ref = commit_stage(run, iteration, "policy")
        record = record_of(run, iteration, {}, {"policy": ref})
        assert run.store.create(run.iteration_key(iteration), sealed(record))


ODD = [b"", b"{", b"[]", b"null", b'"text"', b'{"config": {}}', b"\xff", b"[" * 100_000, b'{"schema_version": NaN}']


@pytest.mark.parametrize("record", ODD, ids=range(len(ODD)))
def test_a_damaged_document_is_named_wherever_it_is_read(tmp_path: Path, record: bytes) -> None:
    store = open_store(f"file://{tmp_path}")
    run = create_or_continue(tiny(store))
    commit_sft(run)
    commit_iterations(run, 2)
    reads: dict[str, Callable[[], object]] = {
        "rl/00001/policy/manifest.json": lambda: run.policy(2),
        "rl/00000/iteration.json": lambda: run.iteration(0),
        "lease/000000.json": lambda: lease.check_free(store, run.root),
        "run.json": lambda: open_existing(store, "a"),
    }
    for key, read in reads.items():
        path = tmp_path / run.root / key
        path.parent.mkdir(exist_ok=True)
        whole = path.read_bytes() if path.exists() else None
        path.write_bytes(record)
        with pytest.raises(StoreError, match=rf"{path} is damaged, or of another version: .*restore it from a copy"):
            read()
        if key != "run.json":
            assert any(str(path) in fault for fault in audit.verify(run)[1])
        if whole is not None:
            path.write_bytes(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), new=st.integers(0, 255))
def test_no_byte_of_a_document_changes_unseen(
    tmp_path_factory: pytest.TempPathFactory, position: int, new: int
) -> None:
    store = open_store(f"file://{tmp_path_factory.mktemp('s')}")
    run = create_or_continue(tiny(store))
    commit_iterations(run, 1)
    for key in ("rl/00000/policy/manifest.json", "rl/00000/iteration.json"):
        data = store.read(f"{run.root}/{key}")
        at = position % len(data)
        store.put(f"{run.root}/{key}", data[:at] + bytes([new]) + data[at + 1 :])
        _, faults = audit.verify(run)
        # white space is no content
        assert faults or json.loads(store.read(f"{run.root}/{key}")) == json.loads(data)
        store.put(f"{run.root}/{key}", data)
        assert audit.verify(run)[1] == []


def test_a_copy_of_a_run_under_another_name_is_refused(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    commit_iterations(create_or_continue(tiny(store)), 1)
    shutil.copytree(tmp_path / "runs/a", tmp_path / "runs/b")
    for name in ("b", "../runs/a", "a/", "a/rl", ""):
        with pytest.raises(
            (StoreError, UserError), match=r"is the record of run 'a', so this folder is a copy|a run name is a folder"
        ):
            open_existing(store, name)
    with pytest.raises(StoreError, match="a copy"):
        create_or_continue(tiny(store, "run=b"))


def test_a_run_continues_with_the_same_identity_and_refuses_another(store: Store) -> None:
    run = create_or_continue(tiny(store))
    assert create_or_continue(tiny(store, "engines.count=2", "rl.num_iterations=99")).name == run.name
    with pytest.raises(UserError, match=r"rl\.clip_high: 0\.28 -> 0\.4.*another name.*nothing to fork from"):
        create_or_continue(tiny(store, "rl.clip_high=0.4"))
    assert run_names(store) == ["a"]
    recorded = json.loads(store.read("runs/a/run.json"))
    assert recorded["config"]["rl"]["clip_high"] == 0.28


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 60), beyond=st.integers(0, 40))
def test_the_newest_commit_is_found_with_a_logarithm_of_look_ups(
    tmp_path_factory: pytest.TempPathFactory, count: int, beyond: int
) -> None:
    run = create_or_continue(tiny(open_store(f"file://{tmp_path_factory.mktemp('s')}")))
    for iteration in range(count):
        run.store.put(run.iteration_key(iteration), b"{}")
    looked: list[str] = []
    exists = run.store.exists
    run.store.exists = lambda key: looked.append(key) or exists(key)  # type: ignore[method-assign,func-returns-value]
    total = count + beyond
    assert Progress(run).num_committed("rl", total) == count
    assert len(looked) <= max(1, total).bit_length() + 1


def test_a_fork_shares_its_prefix_and_owns_the_rest(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    commit_iterations(parent, 4)
    child = fork(parent, 2, override_config(parent.config, ["run=c", "rl.clip_high=0.4"]))
    assert Progress(child).num_committed("rl", 60) == 3
    assert child.folder("rl", 2, "policy") == "runs/a/rl/00002/policy"
    assert child.folder("rl", 3, "policy") == "runs/c/rl/00003/policy"
    assert child.folder("sft", 0, "policy") == "runs/a/sft/00000/policy"
    assert child.owner("rl", 2).config.rl.clip_high == 0.28
    commit_iterations(child, 5, first=3)
    again = open_existing(store, "c")
    assert Progress(again).num_committed("rl", 60) == 5
    assert audit.verify(again) == (6, [])
    grandchild = fork(again, 4, override_config(again.config, ["run=d"]))
    assert grandchild.folder("rl", 1, "policy") == "runs/a/rl/00001/policy"
    assert grandchild.folder("rl", 4, "policy") == "runs/c/rl/00004/policy"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chain=st.lists(
        st.tuples(st.sampled_from(["", "score", "filter", "train"]), st.integers(0, 3)), min_size=1, max_size=4
    ),
    iteration=st.integers(0, 4),
    stage=st.sampled_from(
        ["prompts/round-0", "rollouts/round-1/shard-002", "scores/round-0", "batch/round-0", "policy", ""]
    ),
)
def test_of_forks_of_forks_the_owner_is_the_youngest_that_did_not_share_the_stage(
    chain: list[tuple[str, int]], iteration: int, stage: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = open_store(f"file://{tmp_path_factory.getbasetemp()}/none")
    run = Run(store, tiny(store, "run=r0"))
    for number, (redo, at) in enumerate(chain, start=1):
        run = Run(store, tiny(store, f"run=r{number}"), run, at - 1 if redo else at, redo)
    owner = 0  # the model: walk from the youngest, as long as the stage is shared
    for number, (redo, at) in reversed([*enumerate(chain, start=1)]):
        shared = SHARED_BY_REDO[redo] if redo and iteration == at else ()
        if not (iteration < at or (iteration == at and not redo) or stage.split("/")[0] in shared):
            owner = number
            break
    assert run.owner("rl", iteration, stage).name == f"r{owner}"
    assert run.folder("rl", iteration, stage or "policy").startswith("runs/r")
    assert run.owner("sft", iteration, "policy").name == "r0"


def commit_sft(run: Run) -> None:
    """All segments with their states, and the evaluation of the last one."""
    segments = range(run.config.sft.num_segments)
    places = [
        ("base", 0, "policy"),
        *(("sft", segment, stage) for segment in segments for stage in ("state", "policy")),
    ]
    commit_places(run, [*places, ("sft", segments[-1], "evaluation")])


def commit_places(run: Run, places: list[tuple[str, int, str]]) -> None:
    for phase, iteration, stage in places:
        folder = run.folder(phase, iteration, stage)
        record = write_bytes(run.store, folder, "a1", "data.bin", b"weights")
        commit(
            run.store, folder, Manifest(run.name, phase, iteration, stage, {}, "0", {}, [record], {}, 0, "x", "t", "t")
        )


def test_a_fork_at_sft_shares_no_iteration_and_evaluates_the_start_itself(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    other = override_config(parent.config, ["run=c", "rl.rewards={exact = 1.0}", "data.words.part=all"])
    with pytest.raises(UserError, match=r"--at sft: the SFT of run a is not complete"):
        fork(parent, AT_SFT, other)
    commit_sft(parent)
    with pytest.raises(
        UserError, match=r"iteration 0 of run a is not committed \(committed: none\); share its SFT only: --at sft"
    ):
        fork(parent, 0, other)
    child = fork(parent, AT_SFT, other)
    assert Progress(child).sft_complete and Progress(child).num_committed("rl", 60) == 0
    assert child.policy(0)[0].folder == "runs/a/sft/00002/policy"
    assert child.folder("sft", 2, "evaluation") == "runs/c/sft/00002/evaluation"
    commit_iterations(child, 2)
    again = open_existing(store, "c")
    assert [fault.partition("runs/")[2] for fault in audit.verify(again)[1]] == [
        "c/sft/00002/evaluation/manifest.json is missing"
    ]
    commit_places(child, [("sft", 2, "evaluation")])
    assert Progress(again).num_committed("rl", 60) == 2
    grandchild = fork(again, 1, override_config(again.config, ["run=d"]))
    assert grandchild.folder("sft", 2, "evaluation") == "runs/c/sft/00002/evaluation"
    assert grandchild.folder("sft", 2, "policy") == "runs/a/sft/00002/policy"
    assert audit.verify(grandchild) == (11, [])
    assert forked_from(again) == "a at sft" and forked_from(grandchild) == "c at 1"


@pytest.mark.parametrize(
    ("override", "at_sft", "at_0"),
    [
        ("rl.rewards={exact = 1.0}", True, True),
        ("evaluation.prompts_max=3", True, True),
        ("data.words.part=all", True, False),  # sets of use rl and evaluation
        ("data.short_words.part=all", False, False),  # of use sft
        ("sft.num_steps=5", False, False),
        ("model.num_layers=2", False, False),
        ("seed=1", False, False),
    ],
)
def test_what_a_fork_may_change_and_what_a_run_of_other_settings_is_told(
    tmp_path: Path, override: str, at_sft: bool, at_0: bool
) -> None:
    store = open_store(f"file://{tmp_path}")
    run = create_or_continue(tiny(store))
    commit_sft(run)
    config = override_config(run.config, [override])

    def told() -> str:
        with pytest.raises(UserError) as refused:
            create_or_continue(config)
        return str(refused.value)

    way = "--at sft --run NEW" if at_sft else "start a run of another name (--run): no fork can change them"
    assert way in told()
    assert (fixed_differences(config, run.config, AT_SFT) == []) == at_sft
    commit_iterations(run, 1)
    assert ("--at 0 --run NEW" if at_0 else way) in told()
    assert (fixed_differences(config, run.config, 0) == []) == at_0


def test_differences_in_data_are_named_field_by_field() -> None:
    old = read_config("tiny", [], PRESETS)
    assert differences(override_config(old, ["data.words.source=x.jsonl"]), old) == [
        "data.words (rl).source: 'reasoning_gym:spell_backward' -> 'x.jsonl'",
        "data.words (evaluation).source: 'reasoning_gym:spell_backward' -> 'x.jsonl'",
    ]
    fewer = old.model_copy(update={"data": old.data[:2]})
    assert differences(fewer, old) == [
        "data: short_words (sft), all_words (sft), words (rl), words (evaluation) -> short_words (sft), all_words (sft)"
    ]


def test_a_redo_shares_what_comes_before_the_stage_and_survives_a_second_fork(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    commit_iterations(parent, 4)
    asked = override_config(parent.config, ["run=c", "rl.clip_high=0.4"])
    child = fork(parent, 2, asked, "filter")
    assert Progress(child).num_committed("rl", 60) == 2
    assert child.redoes(2)
    assert not child.redoes(3)
    assert child.folder("rl", 1, "policy") == "runs/a/rl/00001/policy"
    assert child.folder("rl", 2, "scores/round-0") == "runs/a/rl/00002/scores/round-0"
    assert child.folder("rl", 2, "batch/round-0") == "runs/c/rl/00002/batch/round-0"
    assert child.folder("rl", 3, "prompts/round-0") == "runs/c/rl/00003/prompts/round-0"
    commit_iterations(child, 4, first=2)
    assert audit.verify(open_existing(store, "c")) == (6, [])
    assert Progress(fork(parent, 2, asked, "filter")).num_committed("rl", 60) == 4  # the same again continues it
    for other in ("", "score"):
        with pytest.raises(UserError, match="that run exists"):
            fork(parent, 2, asked, other)
    grandchild = fork(child, 2, override_config(child.config, ["run=d", "rl.clip_low=0.1"]), "train")
    assert grandchild.folder("rl", 2, "batch/round-0") == "runs/c/rl/00002/batch/round-0"
    assert grandchild.folder("rl", 2, "rollouts/round-0/shard-000") == "runs/a/rl/00002/rollouts/round-0/shard-000"
    assert grandchild.folder("rl", 2, "policy") == "runs/d/rl/00002/policy"


def test_the_learning_rate_of_a_fork_goes_on_where_its_parents_was(tmp_path: Path) -> None:
    parent = create_or_continue(tiny(open_store(f"file://{tmp_path}")))
    commit_sft(parent)
    commit_iterations(parent, 4)
    batch = ArtifactRef("runs/a/rl/00000/batch", "0" * 64)
    assert [rl_job(parent, iteration, batch).first_step for iteration in range(4)] == [0, 4, 8, 12]
    child = fork(parent, 2, override_config(parent.config, ["run=c", "rl.num_steps=10"]))
    assert [rl_job(child, iteration, batch).first_step for iteration in range(6)] == [0, 4, 8, 12, 22, 32]
    commit_iterations(child, 5, first=3)
    grandchild = fork(child, 4, override_config(child.config, ["run=d", "rl.num_steps=1"]))
    assert [rl_job(grandchild, iteration, batch).first_step for iteration in range(8)] == [0, 4, 8, 12, 22, 32, 33, 34]


def test_a_fork_that_cannot_be_is_refused(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    commit_iterations(parent, 1)
    way = "choose K from 0 to 0, or let `rlpipe run ... --run a` get there first"
    with pytest.raises(UserError, match=rf"--at 7: iteration 7 of run a is not committed .* 0 to 0\); {way}"):
        fork(parent, 7, override_config(parent.config, ["run=c"]), "score")
    with pytest.raises(UserError, match="--at sft --redo score: what is redone is an iteration"):
        fork(parent, AT_SFT, override_config(parent.config, ["run=c"]), "score")
    young = create_or_continue(tiny(store, "run=young"))
    with pytest.raises(
        UserError, match=r"is not committed \(committed: none\); let `rlpipe run ... --run young` get there"
    ):
        fork(young, 0, override_config(young.config, ["run=c"]))
    with pytest.raises(UserError, match="that run exists"):
        fork(parent, 0, parent.config)
    with pytest.raises(UserError, match=r"sft\.num_steps"):
        fork(parent, 0, override_config(parent.config, ["run=c", "sft.num_steps=5"]))
    with pytest.raises(UserError, match="no run 'zzz'"):
        open_existing(store, "zzz")


def test_verify_names_every_fault_and_gc_only_what_no_manifest_names(store: Store) -> None:
    run = create_or_continue(tiny(store))
    commit_iterations(run, 2)
    lost = write_bytes(store, run.folder("rl", 1, "policy"), "lost", "data.bin", b"an attempt that died")
    assert audit.verify(run) == (2, [])
    for name in ("services/trainer/node-0.json", "approval/rl.json"):
        store.put(f"runs/a/{name}", b"{}")
    lease.acquire(store, run.root).release()
    assert audit.unreferenced(run) == [f"runs/a/rl/00001/policy/{lost.name}"]
    store.put("runs/a/rl/00000/policy/a1/data.bin", b"tampered")
    _, faults = audit.verify(run)
    assert len(faults) == 1
    assert "00000/policy/a1/data.bin" in faults[0]
    commit_stage(run, 1, "scores", {"rollouts": "f" * 64})
    assert any("no committed artifact" in fault for fault in audit.verify(run)[1])


def test_verify_names_what_nothing_else_names(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    run = create_or_continue(tiny(store))
    commit_sft(run)
    commit_iterations(run, 2)
    assert audit.verify(run)[1] == []
    expected = []
    for key in ("sft/00001/state", "sft/00002/evaluation"):
        (tmp_path / run.root / key / MANIFEST).rename(tmp_path / f"kept-{key.replace('/', '-')}")
        expected.append(f"{tmp_path}/runs/a/{key}/{MANIFEST} is missing")
        assert sorted(audit.verify(run)[1]) == sorted(expected)
    shutil.copytree(tmp_path / run.root / "rl/00000/policy", tmp_path / run.root / "rl/00007/policy")
    (tmp_path / run.root / "sft/odd/place").mkdir(parents=True)
    shutil.copy(tmp_path / run.root / "rl/00000/policy" / MANIFEST, tmp_path / run.root / "sft/odd/place" / MANIFEST)
    faults = "\n".join(audit.verify(run)[1])
    assert "rl/00007/policy: its manifest is that of policy of rl 0 of run a" in faults
    assert "sft/odd/place: no stage of a run has this folder" in faults


def test_nothing_is_deleted_while_there_is_a_fault(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    run = create_or_continue(tiny(store))
    commit_sft(run)
    commit_iterations(run, 2)
    write_bytes(store, run.folder("rl", 1, "policy"), "lost", "data.bin", b"an attempt that died")
    manifest = tmp_path / run.root / "rl/00001/policy" / MANIFEST
    whole = manifest.read_bytes()
    for damage in (b"{}", b"", None):
        manifest.unlink() if damage is None else manifest.write_bytes(damage)
        with pytest.raises(
            StoreError, match=r"nothing was deleted: run a has \d faults?, see `rlpipe verify a`; first .*00001"
        ):
            audit.sweep(run)
    manifest.write_bytes(whole)
    assert audit.sweep(run) == ["runs/a/rl/00001/policy/lost/data.bin"] and audit.sweep(run) == []


def test_one_holder_at_a_time(store: Store) -> None:
    held = lease.acquire(store, "runs/a")
    with pytest.raises(UserError, match=r"held by pid \d+ on host"):
        lease.acquire(store, "runs/a")
    held.release()
    lease.acquire(store, "runs/a").release()


def test_a_folder_in_the_place_of_a_lease_is_named_and_is_a_fault(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    run = create_or_continue(tiny(store))
    (tmp_path / "runs" / "a" / "lease" / "000000.json").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"lease/000000.json is a folder"):
        lease.acquire(store, run.root)
    assert [fault for fault in audit.verify(run)[1] if "lease/000000.json is a folder" in fault]


def test_a_dead_holder_is_taken_over(tmp_path: Path) -> None:
    program = (
        "from rlpipe.store import lease; from rlpipe.store.backend import open_store; import os, signal\n"
        f"lease.acquire(open_store('file://{tmp_path}'), 'runs/a'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S).returncode == -9
    lease.acquire(open_store(f"file://{tmp_path}"), "runs/a").release()


@pytest.mark.slow
def test_a_silent_holder_on_another_host_is_taken_over_and_a_beating_one_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the heartbeat is a process, which has to start
    monkeypatch.setattr(lease, "STALE_S", DEADLINE_S)
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.2)
    held = lease.acquire(store, "runs/a")
    monkeypatch.setattr(holder.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(UserError, match="held by"):
        lease.acquire(store, "runs/a")
    held._heartbeat.end()  # a beat that is under way would land later
    monkeypatch.setattr(lease, "STALE_S", SHORT_S)
    lease.acquire(store, "runs/a").release()
