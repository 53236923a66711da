"""A policy as it is stored: the files that it has, and the policies that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.store import audit
from rlpipe.store.adapter_files import ADAPTER_WEIGHTS, BASE, AdapterBase
from rlpipe.store.artifacts import commit, write_bytes
from rlpipe.store.backend import open_store
from rlpipe.store.deltas import DELTA, FRAME_BYTES, Delta, DeltaFile
from rlpipe.store.documents import sealed
from rlpipe.store.opening import create_or_continue
from rlpipe.store.policy_files import base_of, dependencies, stored_policy
from rlpipe.store.run import Run
from tests.store.test_run import tiny

MOMENT = "2026-03-04T05:06:07.000+00:00"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_or_continue(tiny(open_store(f"file://{tmp_path}")))


def policy(run: Run, phase: str, iteration: int, files: dict[str, bytes]) -> ArtifactRef:
    folder = run.folder(phase, iteration, "policy")
    records = [write_bytes(run.store, folder, "a1", name, data) for name, data in files.items()]
    made = Manifest("a", phase, iteration, "policy", {}, "0", {}, records, {}, None, "x", MOMENT, MOMENT)
    return commit(run.store, folder, made)[0]


def adapter(run: Run, iteration: int, base: ArtifactRef) -> ArtifactRef:
    files = {ADAPTER_WEIGHTS: b"ab", "config.json": b"{1}", BASE: sealed(AdapterBase(base))}
    return policy(run, "rl", iteration, files)


def test_each_form_says_which_files_it_has_and_which_policies_it_needs(run: Run) -> None:
    whole = policy(run, "base", 0, {"model.safetensors": b"w", "config.json": b"{}", "tokenizer.json": b"t"})
    kept = [DeltaFile(name, 1, "0", "base") for name in ("model.safetensors", "tokenizer.json")]
    delta = policy(run, "rl", 0, {DELTA: sealed(Delta(whole, kept, FRAME_BYTES))})
    on_whole, on_delta = adapter(run, 1, whole), adapter(run, 2, delta)
    assert [dependencies(run.store, ref) for ref in (whole, delta, on_whole, on_delta)] == [
        [], [whole], [whole], [delta, whole],
    ]  # fmt: skip
    assert [base_of(run.store, ref) for ref in (whole, delta, on_whole, on_delta)] == [None, None, whole, delta]
    forms = [stored_policy(run.store, ref) for ref in (whole, delta, on_whole, on_delta)]
    assert [form.is_rebuilt for form in forms] == [False, True, False, False]
    assert {*forms[1].files} == {"model.safetensors", "tokenizer.json"}
    assert {*forms[2].files} == {ADAPTER_WEIGHTS, BASE, "config.json"}
    assert [form.read("tokenizer.json") for form in forms] == [b"t"] * 4
    assert forms[2].read("config.json") == b"{1}"
    with pytest.raises(StoreError, match=r"has no file other\.json"):
        forms[3].read("other.json")


def test_an_adapter_is_lost_with_its_base(run: Run) -> None:
    whole = policy(run, "base", 0, {"model.safetensors": b"w"})
    ref = adapter(run, 0, whole)
    assert audit.verify(run)[1] == []
    run.store.put(f"{whole.folder}/a1/model.safetensors", b"x")
    assert audit.verify(run)[1][1:] == [
        f"{ref.folder} is stored as an adapter and cannot be rebuilt: {whole.folder} is damaged"
    ]
