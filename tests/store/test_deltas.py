"""Policies that are stored as differences: rebuilt to the bit, on both kinds of store, whatever is
damaged, missing or killed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.source import override_config
from rlpipe.stages.model_source import model_folder
from rlpipe.stages.policy import stored_as
from rlpipe.stages.training import StoredAs
from rlpipe.store import audit, deltas
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.backend import Store, open_store
from rlpipe.store.deltas import DELTA, Delta, DeltaFile, rebuild, write_difference
from rlpipe.store.documents import sealed
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.policy_files import dependencies, stored_policy
from rlpipe.store.run import Run
from rlpipe.trainer.ranks import Ranks
from tests import trainer_world
from tests.deltas_world import Files, changed, read_folder, save, write
from tests.store.test_run import record_of, tiny

A, B, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
START: Files = {
    A: bytes(range(256)) * 9,
    B: b"\1\2" * 700,
    INDEX: b"{}",
    "config.json": b'{"x": 1}',
    "tokenizer.json": b"t",
}


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "FRAME_BYTES", 256)
    monkeypatch.setattr("rlpipe.trainer.saving.FRAME_BYTES", 256)


@pytest.fixture
def run(store: Store) -> Run:
    return create_or_continue(tiny(store))


@pytest.fixture
def ranks(store: Store, tmp_path: Path) -> Ranks:
    return replace(trainer_world.one_rank(tmp_path), store=store)


def versions(count: int) -> list[Files]:
    """Policies of which each differs from the one before in a few
    numbers, and one also in its config."""
    made = [START]
    for number in range(1, count):
        before = made[-1]
        made.append({**before, A: changed(before[A], 7 * number, 1000 + number), B: changed(before[B], number)})
    made[2]["config.json"] = b'{"x": 2}'
    return made


def save_all(ranks: Ranks, run: Run, policies: list[Files], full_every: int) -> list[ArtifactRef]:
    refs: list[ArtifactRef] = []
    for number, files in enumerate(policies):
        base = refs[-1] if number % full_every else None
        refs.append(save(ranks, run, number + 1, files, base))
    return refs


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.binary(max_size=900),
    positions=st.lists(st.integers(0, 899), max_size=30),
    other=st.booleans(),
    width=st.sampled_from([1, 2, 4, 8]),
)
def test_any_file_comes_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, before: bytes, positions: list[int], other: bool, width: int
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    after = bytes(reversed(before)) if other else changed(before, *(at for at in positions if at < len(before)))
    (folder / "base").mkdir()
    (folder / "base/w").write_bytes(before)
    (folder / "w").write_bytes(after)
    record, base_sha256 = write_difference(folder / "base/w", folder / "w", folder / "w.xor.zst", width)
    assert base_sha256 == hashlib.sha256(before).hexdigest() and record.sha256 == hashlib.sha256(after).hexdigest()
    numbers = [
        (data + bytes(width))[at : at + width] for data in (before, after) for at in range(0, len(before), width)
    ]
    half = len(numbers) // 2
    expected = sum(old != new for old, new in zip(numbers[:half], numbers[half:], strict=True))
    assert sum(frame.changed for frame in record.frames) == expected
    delta = Delta(ArtifactRef("p", "0" * 64), [record], 256)
    assert read_folder(rebuild("p", delta, folder, folder / "base", folder / "whole")) == {"w": after}


def test_a_policy_is_the_same_however_it_is_stored(ranks: Ranks, run: Run, tmp_path: Path) -> None:
    policies = versions(7)
    policies[2] |= {A: policies[2][A][:-9], "chat_template.jinja": b"new"}  # another size: this file is whole
    policies[3] |= {A: changed(policies[2][A], 3), "chat_template.jinja": b"new"}
    refs = save_all(ranks, run, policies, 4)
    assert [len(dependencies(run.store, ref)) for ref in refs] == [0, 1, 2, 3, 0, 1, 2]
    assert dependencies(run.store, refs[3]) == [refs[2], refs[1], refs[0]]
    assert [stored_policy(run.store, ref).is_rebuilt for ref in refs] == [number % 4 != 0 for number in range(7)]
    for ref, files in zip(refs, policies, strict=True):
        expected = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        whole = stored_policy(run.store, ref).files
        assert {name: (record.bytes, record.sha256) for name, record in whole.items()} == expected
        assert stored_policy(run.store, ref).read("tokenizer.json") == b"t"
        assert stored_policy(run.store, ref).read("config.json") == files["config.json"]
        assert read_folder(materialise(run.store, ref, tmp_path / f"alone-{ref.sha256}")) == files
        assert read_folder(materialise(run.store, ref, tmp_path / "together")) == files
    assert sorted(path.name for path in (tmp_path / "together").iterdir()) == sorted(
        f"{ref.folder.replace('/', '-')}-{ref.sha256[:12]}" for ref in refs
    )
    metrics = [read_manifest(run.store, ref.folder).metrics for ref in refs]
    assert metrics[0].keys() == {"checkpoint/policy_bytes", "checkpoint/stored_bytes"}
    assert metrics[1]["checkpoint/changed_fraction"] == pytest.approx(3 / ((256 * 9 + 1400) / 2))
    assert (
        metrics[0]["checkpoint/policy_bytes"] == metrics[0]["checkpoint/stored_bytes"] == sum(map(len, START.values()))
    )
    assert audit.verify(run)[1] == []


def test_a_policy_that_shares_no_file_of_weights_is_bound_to_no_other(ranks: Ranks, run: Run) -> None:
    first = save(ranks, run, 1, START, None)
    second = save(ranks, run, 2, START | {A: START[A] + b"x", B: START[B] + b"x"}, first)
    assert not stored_policy(run.store, second).is_rebuilt
    frozen = save(ranks, run, 3, START, first)  # no number changed
    same = stored_policy(run.store, frozen)
    assert same.is_rebuilt and same.files.keys() == START.keys()


def names_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read from a store from now on; of manifests nothing."""
    names: list[str] = []

    def noted(read: Callable[..., object]) -> Callable[..., object]:
        def call(store: Store, key: str, *rest: Path) -> object:
            names.extend({key.rpartition("/")[2]} - {"manifest.json"})
            return read(store, key, *rest)

        return call

    for method in ("read", "get_file"):
        monkeypatch.setattr(Store, method, noted(getattr(Store, method)))
    return names


def test_only_the_difference_is_fetched_where_the_base_is(
    ranks: Ranks, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = save_all(ranks, run, versions(4), 10)
    fetched = names_read(monkeypatch)
    materialise(run.store, refs[0], tmp_path)
    fetched.clear()
    materialise(run.store, refs[1], tmp_path)
    assert {*fetched} == {f"{A}.xor.zst", f"{B}.xor.zst", DELTA}


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_base_that_was_damaged_on_this_disk_is_read_again(
    ranks: Ranks, run: Run, tmp_path: Path, damage: str
) -> None:
    policies = versions(4)
    refs = save_all(ranks, run, policies, 10)
    path = materialise(run.store, refs[2], tmp_path / "local") / A
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(changed(data, 5) if damage == "changed" else data[:-100])
    assert read_folder(materialise(run.store, refs[3], tmp_path / "local")) == policies[3]
    (kept,) = ranks.scratch("kept").iterdir()  # the same where the trainer has it
    (kept / A).write_bytes(changed(policies[3][A], 5) if damage == "changed" else b"")
    after = policies[3] | {A: changed(policies[3][A], 44)}
    assert read_folder(materialise(run.store, save(ranks, run, 5, after, refs[3]), tmp_path / "other")) == after


def test_the_trainer_keeps_one_policy_at_most_and_reads_none_from_the_store(
    ranks: Ranks, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = versions(5)
    refs = [save(ranks, run, 1, policies[0], None)]
    fetched = names_read(monkeypatch)
    for number in (1, 2):
        refs.append(save(ranks, run, number + 1, policies[number], refs[-1]))
        (kept,) = ranks.scratch("kept").iterdir()
        assert read_folder(kept) == {name: policies[number][name] for name in (A, B)} and {*fetched} <= {DELTA}
    shutil.rmtree(ranks.scratch("kept"))  # a trainer that was started again
    refs.append(save(ranks, run, 4, policies[3], refs[-1], is_base=False))
    assert (
        f"{A}.xor.zst" in fetched
        and list(ranks.scratch("kept").iterdir()) == list(ranks.scratch("saving").iterdir()) == []
    )
    assert audit.verify(run)[1] == []


class Killed(BaseException):
    """What no code expects."""


def dies_at(method: Callable[..., object], number: int) -> Callable[..., object]:
    """The method of the store, until its call of that number: before it, or right after."""
    calls: list[int] = []

    def call(*arguments: object) -> object:
        calls.append(0)
        if len(calls) == number // 2 + 1 and not number % 2:
            raise Killed
        answer = method(*arguments)
        if len(calls) == number // 2 + 1:
            raise Killed
        return answer

    return call


@pytest.mark.parametrize("name", ["put_file", "read"])
def test_killed_at_any_write_or_read_nothing_is_lost(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}/store")
    ranks, run = replace(trainer_world.one_rank(tmp_path), store=store), create_or_continue(tiny(store))
    policies, deaths = versions(3), 0
    refs = save_all(ranks, run, policies[:2], 10)
    folder = f"{run.root}/rl/00002/policy"
    for number in range(12):
        with monkeypatch.context() as patched:
            patched.setattr(Store, name, dies_at(getattr(Store, name), number))
            try:
                write(ranks, folder, policies[2], refs[1])
                materialise(store, refs[1], tmp_path / f"local-{number}")
            except Killed:
                deaths += 1
        assert not store.exists(f"{folder}/manifest.json") and audit.verify(run)[1] == []
        if number % 3 == 0:
            shutil.rmtree(ranks.scratch("kept"))
        assert read_folder(materialise(store, refs[1], tmp_path / f"local-{number}")) == policies[1]
        assert len(list((tmp_path / f"local-{number}").iterdir())) == 1
    assert deaths >= 4
    ref = save(ranks, run, 3, policies[2], refs[1])
    assert read_folder(materialise(store, ref, tmp_path / "local")) == policies[2]
    assert all(key.startswith(f"{folder}/") for key in audit.sweep(run))  # what dead attempts left, and nothing else
    assert read_folder(materialise(store, ref, tmp_path / "again")) == policies[2]


def test_a_damaged_difference_is_named_and_so_is_what_it_takes_along(ranks: Ranks, run: Run, tmp_path: Path) -> None:
    refs = save_all(ranks, run, versions(8), 4)
    stored = read_manifest(run.store, refs[2].folder).file(f"{A}.xor.zst")
    key = f"{refs[2].folder}/{stored.name}"
    whole = run.store.read(key)
    run.store.put(key, changed(whole, len(whole) // 2))
    with pytest.raises(StoreError, match=rf"{A}\.xor\.zst has .* and sha256"):
        materialise(run.store, refs[3], tmp_path)
    assert list(tmp_path.glob("runs-*")) == []
    first, *lost = audit.verify(run)[1]
    assert key in first and "sha256" in first
    assert lost == [f"{refs[3].folder} is stored as a difference and cannot be rebuilt: {refs[2].folder} is damaged"]
    run.store.put(key, whole)
    run.store.delete(f"{refs[4].folder}/{read_manifest(run.store, refs[4].folder).file(B).name}")
    with pytest.raises(StoreError, match=rf"{B} is missing"):
        materialise(run.store, refs[7], tmp_path)
    assert [fault.split(" ")[0].rpartition("runs/")[2][:12] for fault in audit.verify(run)[1][1:]] == [
        f"a/rl/0000{number}/p"[:12] for number in (5, 6, 7)
    ]
    with pytest.raises(StoreError, match="nothing was deleted"):
        audit.sweep(run)


def test_a_fork_goes_on_from_a_difference_of_its_parent(ranks: Ranks, run: Run, tmp_path: Path) -> None:
    policies = versions(4)
    refs = save_all(ranks, run, policies[:3], 10)
    for iteration, ref in enumerate(refs):
        assert run.store.create(run.iteration_key(iteration), sealed(record_of(run, iteration, {}, {"policy": ref})))
    child = fork(run, 2, override_config(run.config, ["run=c", "checkpoint.full_every=5"]))
    ref = save(ranks, child, 4, policies[3], refs[2])
    assert [base.folder.split("/")[1] for base in dependencies(run.store, ref)] == ["a", "a", "a"]
    assert read_folder(materialise(run.store, ref, tmp_path)) == policies[3]
    assert audit.verify(child)[1] == []
    key = f"{refs[1].folder}/{read_manifest(run.store, refs[1].folder).files[0].name}"
    run.store.put(key, b"damaged")
    assert (
        f"{ref.folder} is stored as a difference and cannot be rebuilt: {refs[1].folder} is damaged"
        in audit.verify(child)[1]
    )


def test_how_a_policy_is_stored_follows_from_its_version(tmp_path: Path) -> None:
    config = tiny(open_store(f"file://{tmp_path}"), "rl.num_iterations=8")
    before = ArtifactRef("runs/a/rl/00000/policy", "0" * 64)
    assert {stored_as(config, version, before) for version in range(1, 12)} == {StoredAs(None, is_base=False)}
    config = override_config(config, ["checkpoint.full_every=3"])
    stored = [stored_as(config, version, before) for version in range(1, 9)]
    assert [entry.base is not None for entry in stored] == [True, True, False, True, True, False, True, False]
    assert [entry.is_base for entry in stored] == [True, False, True, True, False, True, False, False]
    with pytest.raises(UserError, match=r"checkpoint\.full_every"):
        override_config(config, ["checkpoint.full_every=0"])


def test_a_document_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    for number, name in enumerate(("../evil", "a/b", "..", "")):
        file = DeltaFile(name, 4, hashlib.sha256(b"evil").hexdigest(), "base")
        data = sealed(Delta(ArtifactRef("base", "0" * 64), [file], 256))
        record = trainer_world.artifact(store, f"p{number}", {DELTA: data})
        with pytest.raises(StoreError, match="leads elsewhere"):
            materialise(store, record, tmp_path / "local")
    other = json.loads(sealed(Delta(ArtifactRef("base", "0" * 64), [], 256))) | {"schema_version": 2}
    ref = trainer_world.artifact(store, "later", {DELTA: json.dumps(other).encode()})
    with pytest.raises(StoreError, match=r"delta\.json is damaged, or of another version"):
        materialise(store, ref, tmp_path / "local")


def test_a_folder_of_differences_is_no_model_and_the_way_is_named(ranks: Ranks, run: Run) -> None:
    if run.store.local is None:
        return
    refs = save_all(ranks, run, versions(3), 10)
    folder = (
        Path(run.store.address(refs[1].folder)) / read_manifest(run.store, refs[1].folder).files[0].name.split("/")[0]
    )
    model = run.config.model.model_copy(update={"path": str(folder)})
    with pytest.raises(UserError, match=r"model\.path=.*stored as a difference to another policy: `rlpipe export`"):
        model_folder(model)


def test_the_manifest_that_stands_decides_what_the_next_one_differs_from(
    ranks: Ranks, run: Run, tmp_path: Path
) -> None:
    """Two attempts at a version: the one that lost has kept its own files, and
    they are not what was committed."""
    policies = versions(3)
    first = save(ranks, run, 1, policies[0], None)
    committed = save(ranks, run, 2, policies[1], first)
    write(ranks, committed.folder, policies[1] | {A: changed(policies[1][A], 99)}, first)
    third = save(ranks, run, 3, policies[2], committed)
    assert read_folder(materialise(run.store, third, tmp_path)) == policies[2]
