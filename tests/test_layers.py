"""Imports go down only. The table is the design's; a violation fails with the offending line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RANK = {
    "types": 0, "config_training": 0, "config_limits": 0, "config": 0, "config_source": 0, "secrecy": 0, "by_path": 1, "child": 1,
    "launch": 1, "gguf": 1, "store": 1, "data": 1, "rewards": 1, "environments": 1, "filters": 1, "advantages": 1, "logprobs": 1, "losses": 1,
    "passes": 1,
    "rollouts": 2, "weights": 2, "report": 2, "tracking": 2, "plan": 2, "services": 2, "show": 3,
    "engines": 3, "trainer": 3,
    "stages": 4,
}  # fmt: skip
ONLY_IN = {"fsspec": "store", "s3fs": "store", "mlflow": "tracking"}
NEVER_IN_RLPIPE = {"prefect", "tasks", "flows"}
TORCH_IN = {"trainer", "engines", "losses", "logprobs", "gguf"}
TORCH_PROCESS = "rewards/model_worker.py"  # a process of its own, imported by nothing


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else path.stem


def violations() -> Iterator[str]:
    for path in sorted((ROOT / "rlpipe").rglob("*.py")):
        here = layer_of(path)
        if here == "__init__":
            continue
        assert here in RANK, f"{path}: give the layer {here!r} a rank"
        for name, line in imports_of(path):
            top, *rest = name.split(".")
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if top in NEVER_IN_RLPIPE or ONLY_IN.get(top, here) != here:
                yield where
            if top in ("torch", "transformers") and here not in TORCH_IN and not path.as_posix().endswith(TORCH_PROCESS):
                yield where
            if top == "rlpipe" and rest and RANK[rest[0]] > RANK[here]:
                yield f"{where} (upward)"
            if {here, *rest[:1]} == {"engines", "trainer"}:
                yield f"{where} (engines and trainer never meet)"
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        for name, line in imports_of(path):
            if name.split(".")[0] == "flows":
                yield f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_imports_go_down_only() -> None:
    assert list(violations()) == []


@pytest.mark.parametrize("limit", [300])
def test_no_file_is_longer_than_an_afternoon_allows(limit: int) -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for d in ("rlpipe", "flows", "tasks")
             for path in (ROOT / d).rglob("*.py")}  # fmt: skip
    assert {name: size for name, size in sizes.items() if size > limit} == {}
