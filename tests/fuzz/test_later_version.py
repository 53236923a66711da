"""Documents that a later version of rlpipe wrote into a store: each command and page works, or says
in one line which file needs a newer one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from flows import cli
from rlpipe.base.errors import StoreError
from rlpipe.base.hashing import canonical_json, sha256_of
from rlpipe.base.values import JsonDict
from rlpipe.extras.view.server import view_app
from rlpipe.store import lease
from rlpipe.store.backend import open_store
from rlpipe.store.documents import SEAL, LaterVersion, parse_document
from rlpipe.store.opening import open_existing
from rlpipe.store.run_record import ForkRecord, StartRecord, record_start
from tests.extras.view.test_view import whole_store
from tests.fuzz.test_view_types import reseal

NEEDS = "newer rlpipe"
LATER: dict[str, Callable[[JsonDict], Any]] = {
    "another field": lambda tree: tree | {"brand_new": {"x": [1]}},
    "another shape": lambda tree: {"schema_version": 2, "body": tree},
    "fields of other types": lambda tree: {name: [value] for name, value in tree.items()},
    "a list": lambda tree: [tree],
    "an unknown setting": lambda tree: tree | {"config": {**tree["config"], "brand_new": {"a": 1}}},
    "a config of another shape": lambda tree: tree | {"config": {"layers": [tree["config"]]}},
}
OF_A_CONFIG = [name for name in LATER if "config" in name or "setting" in name]
DOCUMENTS = ("start.json", "lease/000000.json", "rl/00001/iteration.json", "rl/00001/batch/round-0/manifest.json",
             "rl/00001/policy/manifest.json", "rl/00000/policy/pruned.json",
             "base/evaluation/manifest.json")  # fmt: skip
COMMANDS = (["runs"], ["show", "a"], ["verify", "a"], ["gc", "a", "--delete"],
            ["sql", "select * from artifacts"], ["compare", "a", "s"],
            ["files", "a", "policy"])  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    store = open_store(f"file://{folder}/store")
    whole_store(store, tmp_path_factory.mktemp("tokenizer"))
    run = open_existing(store, "a")
    record_start(store, run.config)
    lease.acquire(store, run.root).release()
    pruned = {"run": "a", "iteration": 0, "stage": "policy", "bytes": 1, "state_iteration": -1,
              "command": "", "host": "h", "pid": 1,
              "began_at": "", "finished": True}  # fmt: skip
    store.put("runs/a/rl/00000/policy/pruned.json", canonical_json(pruned | {SEAL: sha256_of(pruned)}))
    return folder / "store"


def with_document(root: Path, key: str, tree: Any) -> None:
    path = root / "runs/a" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(tree, dict) and path.exists():
        reseal(root, path, tree)
    else:
        sealed = tree | {SEAL: sha256_of(tree)} if isinstance(tree, dict) else tree
        path.write_bytes(canonical_json(sealed))


def faults_of(root: Path, key: str) -> Iterator[str]:
    """What a page or a command does that is neither right nor one line
    with the file and what it needs."""
    pages = TestClient(
        view_app(open_store(f"file://{root}")), base_url="http://127.0.0.1", raise_server_exceptions=True
    )
    for path in ("/", "/runs/s", "/runs/a", "/runs/a/iterations/1", "/runs/a/evaluations"):
        answer = pages.get(path)
        text = " ".join(re.sub(r"<[^>]*>", " ", answer.text).split())
        if answer.status_code != 200 and (path in ("/", "/runs/s") or key not in text or NEEDS not in text):
            yield f"{path}: {answer.status_code}: {text[:300]}"
        if answer.status_code == 500 and "a list" not in str(root):  # a list has no seal: it may be damaged as well
            yield f"{path}: {answer.status_code}"
    for command in COMMANDS:
        ended = CliRunner().invoke(cli.app, [*command, "--store", f"file://{root}"])
        said = [line for line in ended.output.splitlines() if key in line]
        if not isinstance(ended.exception, SystemExit | None) or "Traceback" in ended.output:
            yield f"{command}: {ended.exception!r}"
        elif (ended.exit_code and not said) or any(
            NEEDS not in line for line in said if " " in line and "sha256" not in line
        ):
            yield f"{command}: {ended.exit_code}: {ended.output[-400:]}"
        if len(said) != len(set(said)):
            yield f"{command} says it twice: {said}"


@pytest.mark.parametrize("key", ["run.json", *(pytest.param(key, marks=pytest.mark.slow) for key in DOCUMENTS)])
def test_a_document_of_a_later_version_is_named_and_hides_no_other_run(whole: Path, tmp_path: Path, key: str) -> None:
    faults = []
    for name, later in LATER.items():
        if name in OF_A_CONFIG and key not in ("run.json", "start.json"):
            continue
        root = tmp_path / name
        shutil.copytree(whole, root)
        tree = json.loads((root / "runs/a" / key).read_bytes())
        tree.pop(SEAL)
        with_document(root, key, later(tree))
        faults += [f"{name}: {fault}" for fault in faults_of(root, f"runs/a/{key}")]
        assert (root / "runs/a/rl/00001/scores/round-0/died/scores.parquet").exists() or "pruned" in key, (
            f"{name}: gc deleted"
        )
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize("key",
                         ["summary.json", "votes/00000.json", "rl/00001/notes.json", "rl/00001/policy/signature.json",
                                 "rl/00001/rollouts/round-0/index.json"])  # fmt: skip
def test_gc_deletes_nothing_beside_a_document_that_it_does_not_know(whole: Path, tmp_path: Path, key: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(whole, root)
    with_document(root, key, {"run": "a", "schema_version": 7})
    before = sorted(root.rglob("*"))
    assert key not in CliRunner().invoke(cli.app, ["gc", "a", "--store", f"file://{root}"]).output
    ended = CliRunner().invoke(cli.app, ["gc", "a", "--delete", "--store", f"file://{root}"])
    assert ended.exit_code == 1 and key in ended.output and NEEDS in ended.output
    assert {path for path in before if "lease" not in path.parts} <= {*root.rglob("*")}
    verified = CliRunner().invoke(cli.app, ["verify", "a", "--store", f"file://{root}"])
    assert verified.exit_code == 1 and verified.output.count("FAULT") == 1 and key in verified.output


def test_what_is_damaged_is_told_from_what_is_of_a_later_version() -> None:
    tree = {"config": {"run": "a"}, "code_version": "x", "libraries": {}, "brand_new": 1}
    with pytest.raises(
        LaterVersion, match=r"start\.json was written by a later .*brand_new: this version has no such field"
    ):
        parse_document("start.json", canonical_json(tree | {SEAL: sha256_of(tree)}), StartRecord)
    for data in (canonical_json(tree), canonical_json(tree | {SEAL: "0" * 64}), b"{", b"\x92\x01"):
        with pytest.raises(StoreError, match="is damaged, or of another version") as said:
            parse_document("start.json", data, StartRecord)
        assert not isinstance(said.value, LaterVersion)


@pytest.mark.parametrize("fork", [{"at": -2}, {"redo": "sample"}, {"redo": "score\n"}, {"with": "b"}])
def test_a_fork_of_a_kind_that_is_not_known_is_of_a_later_version(fork: JsonDict) -> None:
    tree = {"run": "a", "at": 1, "redo": "score"} | fork
    with pytest.raises(LaterVersion):
        parse_document("run.json", canonical_json(tree | {SEAL: sha256_of(tree)}), ForkRecord)
