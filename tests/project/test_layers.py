"""Imports go down only. The table is the design's; a violation fails with the offending line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.config import extras
from tests.paths import ROOT

RANK = {
    "base": 0,
    "records": 1, "config": 1,
    "algorithms": 2, "data": 2, "models": 2, "store": 2, "processes": 2,
    "rewards": 3, "services": 3, "report": 3,
    "engines": 4, "trainer": 4,
    "loop": 5, "chat_api": 5,
    "stages": 6,
    "stored": 7,
    "checks": 8,
    "extras": 9,
}  # fmt: skip
ONLY_IN = {
    "obstore": "store", "botocore": "store", "mlflow": "report extras/gate", "starlette": "extras/view",
    "uvicorn": "extras/view", "plotly": "extras/view", "duckdb": "extras/queries", "scipy": "extras/why extras/gate",
}  # fmt: skip
NEVER_IN_RLPIPE = {"prefect", "tasks", "flows"}
TORCH_IN = {"trainer", "engines", "algorithms", "models", "extras/local_engine"}
ENGINES_TOO = {"extras/local_engine", "extras/vllm"}  # they run without a trainer
DOORS = "rlpipe/config/extras.py"  # the one file of the core that names extras
# of their own, not of a flow
TORCH_PROCESSES = ("rewards/worker.py", "checks/trial.py", "plan/trial.py")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def layer_of(path: Path) -> str:
    """The package of a module; of an extra, extras/<its name>."""
    parts = path.relative_to(ROOT).parts
    if parts[1] == "extras" and len(parts) > 3:
        return f"extras/{parts[2]}"
    return parts[1] if len(parts) > 2 else path.stem


def violations() -> Iterator[str]:
    for path in sorted((ROOT / "rlpipe").rglob("*.py")):
        here = layer_of(path)
        package, _, extra = here.partition("/")
        if here == "__init__":
            continue
        assert package in RANK, f"{path}: give the layer {here!r} a rank"
        for name, line in imports_of(path):
            top, *rest = name.split(".")
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if top in NEVER_IN_RLPIPE or here not in ONLY_IN.get(top, here).split():
                yield where
            if (
                top in ("torch", "transformers")
                and here not in TORCH_IN
                and not path.as_posix().endswith(TORCH_PROCESSES)
            ):
                yield where
            if top == "rlpipe" and rest and RANK[rest[0]] > RANK[package]:
                yield f"{where} (upward)"
            if extra and rest[:1] == ["extras"] and rest[1] != extra:
                yield f"{where} (an extra imports the core, and no other extra)"
            side = "engines" if here in ENGINES_TOO else here
            if {side, *rest[:1]} == {"engines", "trainer"}:
                yield f"{where} (engines and trainer never meet)"
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        for name, line in imports_of(path):
            if name.split(".")[0] == "flows":
                yield f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_imports_go_down_only() -> None:
    assert list(violations()) == []


def test_the_core_reaches_extras_through_one_table() -> None:
    core = [path for path in SOURCES if "rlpipe/extras/" not in path.as_posix()]
    naming = [path.relative_to(ROOT).as_posix() for path in core if "rlpipe.extras" in path.read_text()]
    assert naming == [DOORS]
    for extra in vars(extras).values():
        for door in extra.values() if isinstance(extra, dict) else ():
            if isinstance(door, extras.Extra):
                assert extras.opened(door, "this test") is not None


def test_an_extra_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^rlpipe view: this installation of rlpipe has no rlpipe\.extras\.nothing"):
        extras.opened(extras.Extra("rlpipe.extras.nothing.server:serve"), "rlpipe view")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "rlpipe.extras.queries.command", raising=False)
    monkeypatch.delitem(sys.modules, "rlpipe.extras.queries.queries", raising=False)
    with pytest.raises(
        UserError, match=r"^rlpipe sql: needs the package duckdb, .* pip install -c constraints.txt -e '\.\[queries\]'$"
    ):
        extras.opened(extras.COMMANDS["sql"], "rlpipe sql")


BANNED = {"told", "asked", "found", "mine", "each"}
BANNED_WORDS = {"gang", "gangs", "team", "teams"}  # also as a part of a name
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
        if name in BANNED or BANNED_WORDS & set(name.lower().split("_"))
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
