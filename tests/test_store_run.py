"""Runs in the store: identity, how far they are, forks, the lease, verify and gc."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.config import PipelineConfig
from rlpipe.config_source import override_config, read_config
from rlpipe.store import audit, lease
from rlpipe.store.artifacts import commit, write_bytes
from rlpipe.store.backend import Store, open_store
from rlpipe.store.run import SHARED_BY_REDO, Run, create_or_continue, fork, open_existing, run_names
from rlpipe.types import ArtifactRef, Manifest, UserError, canonical_json

PRESETS = Path(__file__).parent.parent / "flows" / "presets"


def tiny(store: Store, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store={store.url}", *sets], PRESETS)


def commit_stage(run: Run, iteration: int, stage: str, inputs: dict[str, str] | None = None) -> ArtifactRef:
    folder = run.folder("rl", iteration, stage)
    record = write_bytes(run.store, folder, "a1", "data.bin", f"{run.name} {iteration} {stage}".encode())
    manifest = Manifest(run.name, "rl", iteration, stage, inputs or {}, "0", {}, [record], {}, iteration + 1, "x", "t", "t")
    return commit(run.store, folder, manifest)[0]


def commit_iterations(run: Run, count: int, first: int = 0) -> None:
    for iteration in range(first, count):
        ref = commit_stage(run, iteration, "policy")
        record = {"artifacts": {"policy": ref.as_json()}, "state_iteration": -1, "metrics": {}}
        assert run.store.create(run.iteration_key(iteration), canonical_json(record))


def test_a_run_continues_with_the_same_identity_and_refuses_another(store: Store) -> None:
    run = create_or_continue(tiny(store))
    assert create_or_continue(tiny(store, "engines.count=2", "rl.num_iterations=99")).name == run.name
    with pytest.raises(UserError, match=r"rl\.clip_high: 0\.4 -> 0\.28|rl\.clip_high: 0\.28 -> 0\.4") as refused:
        create_or_continue(tiny(store, "rl.clip_high=0.4"))
    assert "rlpipe fork a" in str(refused.value)
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
    assert run.num_committed("rl", total) == count
    assert len(looked) <= max(1, total).bit_length() + 1


def test_a_fork_shares_its_prefix_and_owns_the_rest(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    commit_iterations(parent, 4)
    child = fork(parent, 2, override_config(parent.config, ["run=c", "rl.clip_high=0.4"]))
    assert child.num_committed("rl", 60) == 3
    assert child.folder("rl", 2, "policy") == "runs/a/rl/00002/policy"
    assert child.folder("rl", 3, "policy") == "runs/c/rl/00003/policy"
    assert child.folder("sft", 0, "policy") == "runs/a/sft/00000/policy"
    assert child.owner("rl", 2).config.rl.clip_high == 0.28
    commit_iterations(child, 5, first=3)
    again = open_existing(store, "c")
    assert again.num_committed("rl", 60) == 5
    assert audit.verify(again) == (6, [])
    grandchild = fork(again, 4, override_config(again.config, ["run=d"]))
    assert grandchild.folder("rl", 1, "policy") == "runs/a/rl/00001/policy"
    assert grandchild.folder("rl", 4, "policy") == "runs/c/rl/00004/policy"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chain=st.lists(st.tuples(st.sampled_from(["", "score", "filter", "train"]), st.integers(0, 3)), min_size=1, max_size=4),
    iteration=st.integers(0, 4),
    stage=st.sampled_from(["prompts/round-0", "rollouts/round-1/shard-002", "scores/round-0", "batch/round-0", "policy", ""]),
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


def test_a_redo_shares_what_comes_before_the_stage_and_survives_a_second_fork(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    commit_iterations(parent, 4)
    asked = override_config(parent.config, ["run=c", "rl.clip_high=0.4"])
    child = fork(parent, 2, asked, "filter")
    assert child.num_committed("rl", 60) == 2
    assert child.redoes(2)
    assert not child.redoes(3)
    assert child.folder("rl", 1, "policy") == "runs/a/rl/00001/policy"
    assert child.folder("rl", 2, "scores/round-0") == "runs/a/rl/00002/scores/round-0"
    assert child.folder("rl", 2, "batch/round-0") == "runs/c/rl/00002/batch/round-0"
    assert child.folder("rl", 3, "prompts/round-0") == "runs/c/rl/00003/prompts/round-0"
    commit_iterations(child, 4, first=2)
    assert audit.verify(open_existing(store, "c")) == (6, [])
    assert fork(parent, 2, asked, "filter").num_committed("rl", 60) == 4  # the same again continues it
    for other in ("", "score"):
        with pytest.raises(UserError, match="that run exists"):
            fork(parent, 2, asked, other)
    grandchild = fork(child, 2, override_config(child.config, ["run=d", "rl.clip_low=0.1"]), "train")
    assert grandchild.folder("rl", 2, "batch/round-0") == "runs/c/rl/00002/batch/round-0"
    assert grandchild.folder("rl", 2, "rollouts/round-0/shard-000") == "runs/a/rl/00002/rollouts/round-0/shard-000"
    assert grandchild.folder("rl", 2, "policy") == "runs/d/rl/00002/policy"


def test_a_fork_that_cannot_be_is_refused(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    commit_iterations(parent, 1)
    for at, way in (
        (7, "choose K from 0 to 0, or let `rlpipe run ... --run a` get there first"),
        (-1, "choose K from 0 to 0$"),
    ):
        with pytest.raises(UserError, match=rf"--at {at}: iteration {at} of run a is not committed .* 0 to 0\); {way}"):
            fork(parent, at, override_config(parent.config, ["run=c"]), "score")
    young = create_or_continue(tiny(store, "run=young"))
    with pytest.raises(UserError, match=r"is not committed \(committed: none\); let `rlpipe run ... --run young` get there"):
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
    assert audit.unreferenced(run) == [f"runs/a/rl/00001/policy/{lost.name}"]
    store.put("runs/a/rl/00000/policy/a1/data.bin", b"tampered")
    _, faults = audit.verify(run)
    assert len(faults) == 1
    assert "00000/policy/a1/data.bin" in faults[0]
    commit_stage(run, 1, "scores", {"rollouts": "f" * 64})
    assert any("no committed artifact" in fault for fault in audit.verify(run)[1])


def test_one_holder_at_a_time(store: Store) -> None:
    held = lease.acquire(store, "runs/a")
    with pytest.raises(UserError, match=r"held by pid \d+ on host"):
        lease.acquire(store, "runs/a")
    held.release()
    lease.acquire(store, "runs/a").release()


def test_a_dead_holder_is_taken_over(tmp_path: Path) -> None:
    program = (
        "from rlpipe.store import lease; from rlpipe.store.backend import open_store; import os, signal\n"
        f"lease.acquire(open_store('file://{tmp_path}'), 'runs/a'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -9
    lease.acquire(open_store(f"file://{tmp_path}"), "runs/a").release()


def test_a_silent_holder_on_another_host_is_taken_over_and_a_beating_one_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "STALE_S", 2.5)
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.2)
    held = lease.acquire(store, "runs/a")
    monkeypatch.setattr(lease.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(UserError, match="held by"):
        lease.acquire(store, "runs/a")
    held._stop.set()
    lease.acquire(store, "runs/a").release()
