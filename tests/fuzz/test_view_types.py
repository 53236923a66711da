"""Every page of the view over files with right hashes and wrong columns, and over documents with
wrong values: a page, or one line that names the file."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from rlpipe.base.hashing import canonical_json, sha256_of
from rlpipe.extras.view.server import view_app
from rlpipe.store.backend import open_store
from rlpipe.store.documents import SEAL
from tests.extras.view.test_view import whole_store

WRONG: dict[str, Any] = {
    "text": lambda n: pa.array(["x"] * n),
    "a whole number": lambda n: pa.array([7] * n, pa.int64()),
    "a huge number": lambda n: pa.array([2**62] * n, pa.int64()),
    "a number": lambda n: pa.array([0.5] * n),
    "nulls": lambda n: pa.nulls(n),
    "nothing": None,  # the column is away
    "bytes": lambda n: pa.array([b"\xff"] * n),
    "a list of text": lambda n: pa.array([["x"]] * n),
    "a list of numbers": lambda n: pa.array([[1]] * n, pa.list_(pa.int32())),
    "an empty list": lambda n: pa.array([[]] * n, pa.list_(pa.int32())),
    "a struct": lambda n: pa.array([{"version": 1, "num_tokens": "x"}] * n),
    "a moment": lambda n: pa.array([0] * n, pa.timestamp("us")),
    "JSON": lambda n: pa.array(['[{"a": [1]}]'] * n),
    "JSON of a list": lambda n: pa.array(["[1]"] * n),
    "JSON of a number": lambda n: pa.array(["7"] * n),
    "an object": lambda n: pa.array(['{"a": "x", "messages": 5, "reward": "x"}'] * n),
    "half of JSON": lambda n: pa.array(["{"] * n),
    "many brackets": lambda n: pa.array(["[" * 100_000] * n),
}
FILES = ("scores.parquet", "batch.parquet", "prompts.parquet", "gap.parquet", "evaluation.parquet", "carried.parquet")


def with_column(data: bytes, name: str, wrong: Any, only_null: bool = False) -> bytes:
    """A Parquet file with another column `name`; with a null at its end where `only_null`."""
    table = pq.read_table(io.BytesIO(data))
    index = table.column_names.index(name)
    if wrong is None:
        table = table.remove_column(index)
    elif only_null:
        column = pa.array([*table.column(index).to_pylist()[:-1], None], table.schema.field(index).type)
        table = table.set_column(index, name, column)
    else:
        table = table.set_column(index, name, wrong(table.num_rows))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def replace_file(root: Path, path: Path, data: bytes) -> None:
    """Puts a data file in the place of another, with the right hashes in its manifest,
    and of that wherever it is named."""
    path.write_bytes(data)
    manifest = path.parent.parent / "manifest.json"
    tree = json.loads(manifest.read_bytes())
    name = f"{path.parent.name}/{path.name}"
    record = next(record for record in tree["files"] if record["name"] == name)
    record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(root, manifest, tree)


def reseal(root: Path, path: Path, tree: Any) -> None:
    """Writes a document with its seal; who names it by its hash does so again."""
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    tree.pop(SEAL, None)
    path.write_bytes(canonical_json(tree | {SEAL: sha256_of(tree)}))
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    for other in sorted(root.rglob("*.json")):
        if other != path and before in (text := other.read_text()):
            reseal(root, other, json.loads(text.replace(before, after)))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    whole_store(open_store(f"file://{folder}/store"), tmp_path_factory.mktemp("tokenizer"))
    return folder / "store"


@pytest.fixture(scope="module")
def paths(intact: Path) -> list[str]:
    """One page of each kind and run, which the links of the others lead to."""
    pages, waiting, seen = (
        TestClient(view_app(open_store(f"file://{intact}")), base_url="http://127.0.0.1"),
        ["/", "/compare?run=a&run=b&run=s", "/search?text=1"],
        dict[str, str](),
    )
    while waiting:
        path = waiting.pop()
        kind = re.sub(r"\d+", "N", path.split("?")[0])
        if kind not in seen:
            seen[kind] = path
            waiting += sorted(
                {link.replace("&amp;", "&") for link in re.findall(r'href="(/[^"]*)"', pages.get(path).text)}
                - {*seen.values()}
            )
    return [path for kind, path in seen.items() if not kind.startswith("/static")]


def faults_of(root: Path, paths: list[str], label: str, named: str) -> Iterator[str]:
    """What pages do that is neither a page nor one line about the damaged file."""
    pages = TestClient(
        view_app(open_store(f"file://{root}")), base_url="http://127.0.0.1", raise_server_exceptions=True
    )
    for path in paths:
        try:
            answer = pages.get(path)
        except Exception as error:
            yield f"{label}: {path}: {type(error).__name__}: {str(error)[:100]}"
            continue
        if answer.status_code not in (200, 404, 500, 501):
            yield f"{label}: {path}: {answer.status_code}"
        if answer.status_code in (500, 501) and named not in answer.text:
            yield f"{label}: {path}: does not name {named}: {answer.text[-300:]}"
        if path == "/" and answer.status_code != 200:
            yield f"{label}: the page of all runs: {answer.status_code}"


def damaged_columns(intact: Path, folder: Path, every: int = 1) -> Iterator[tuple[Path, str, str]]:
    """Stores with one wrong column each: the store, what is wrong, the file."""
    number = 0
    for path in sorted(path for path in intact.rglob("*.parquet") if path.name in FILES and "died" not in path.parts):
        for column in pq.read_schema(path).names:
            for name, wrong in [*WRONG.items(), ("a null", ...)]:
                number += 1
                if number % every:
                    continue
                root = folder / str(number)
                shutil.copytree(intact, root)
                place = root / path.relative_to(intact)
                replace_file(root, place, with_column(place.read_bytes(), column, wrong, wrong is ...))
                yield root, f"{path.relative_to(intact)}: {column} is {name}", path.name


@pytest.mark.slow
@pytest.mark.parametrize("every", [127, pytest.param(7, marks=pytest.mark.nightly)])
def test_a_file_with_a_wrong_column_is_named_by_every_page_that_reads_it(
    intact: Path, paths: list[str], tmp_path: Path, every: int
) -> None:
    stores = damaged_columns(intact, tmp_path, every)
    assert [fault for root, label, named in stores for fault in faults_of(root, paths, label, named)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), [("base/evaluation", "h_greedy"), ("rl/00001/batch/round-0", "dropped")])
@pytest.mark.parametrize("value", ["x", [], [[1]], 10**400, {"x": 1}, {"1": 1}, None])
def test_a_metric_that_is_none_is_named_by_its_manifest(
    intact: Path, paths: list[str], tmp_path: Path, place: str, name: str, value: Any
) -> None:
    root = tmp_path / "store"
    shutil.copytree(intact, root)
    manifest = root / "runs/a" / place / "manifest.json"
    tree = json.loads(manifest.read_bytes())
    tree["metrics"][name] = value
    reseal(root, manifest, tree)
    assert [*faults_of(root, [path for path in paths if "/c/" not in path], str(value), "manifest.json")] == []
    assert (
        "manifest.json"
        in TestClient(view_app(open_store(f"file://{root}")), base_url="http://127.0.0.1")
        .get("/runs/a/evaluations" if name == "h_greedy" else "/runs/a/iterations/1")
        .text
    )
