"""Imports go down only. The table is the design's; a violation fails with the offending line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RANK = {
    "base": 0,
    "records": 1, "config": 1,
    "algorithms": 2, "data": 2, "models": 2, "store": 2, "processes": 2,
    "rewards": 3, "environments": 3, "services": 3, "report": 3, "view": 3,
    "engines": 4, "trainer": 4,
    "agents": 5,
    "stages": 6,
}  # fmt: skip
ONLY_IN = {"obstore": "store", "botocore": "store", "mlflow": "report", "starlette": "view", "uvicorn": "view"}
NEVER_IN_RLPIPE = {"prefect", "tasks", "flows"}
TORCH_IN = {"trainer", "engines", "algorithms", "models"}
TORCH_PROCESS = "rewards/worker.py"  # a process of its own, imported by nothing


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
            if (
                top in ("torch", "transformers")
                and here not in TORCH_IN
                and not path.as_posix().endswith(TORCH_PROCESS)
            ):
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


BANNED = {"told", "asked", "found", "mine", "each"}
SOURCES = [path for folder in ("rlpipe", "flows", "tasks") for path in sorted((ROOT / folder).rglob("*.py"))]


def names_bound(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_names_say_what_they_hold() -> None:
    bound = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        for name, line in names_bound(path)
        if name in BANNED
    ]
    assert bound == [], "a noun for what it holds"


def test_no_class_name_stands_twice() -> None:
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert sorted(name for name in set(classes) if classes.count(name) > 1) == []


def test_docstrings_name_files_that_are_there() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("rlpipe", "flows", "tasks", "tests", "docs", "scripts", "infra")
        for path in (ROOT / folder).rglob("*")
    }
    for path in SOURCES:
        docstrings = [
            ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
        ]
        for name in re.findall(r"[\w/-]+\.(?:py|md)\b", "\n".join(docstrings)):
            assert any(file == name or file.endswith(f"/{name}") for file in files), (
                f"{path.relative_to(ROOT)} names {name}"
            )
