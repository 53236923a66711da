"""The wall of the extras: a copy without `rlpipe/extras`, and without the packages that only extras
need, is the whole core.

SGLang is played by `tests/played/sglang`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S, PIPELINE_S
from tests.paths import ROOT
from tests.pipeline import MINI, Folder, Undisturbed

COPIED = ("rlpipe", "flows", "tasks", "tests", "docs", "README.md", "CHANGELOG.md", "pyproject.toml")
# packages of extras that nothing else brings: Prefect has starlette and uvicorn, MLflow has scipy
BLOCKED = ("duckdb", "plotly")
SITE = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}))\n"  # None: it is not found, and not imported
# the finder of an installation in place would find the extras of the other copy
BARE_SITE = (
    SITE
    + """
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""
)
IMPORTS = """
import importlib, pkgutil, sys
import flows, rlpipe, tasks
def fail(name):
    raise
names = [
    module.name
    for package in (rlpipe, tasks)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", fail)
]
for name in [*names, "flows.cli", "flows.post_train", "flows.serve"]:
    importlib.import_module(name)
assert rlpipe.__file__.startswith(sys.argv[1]), rlpipe.__file__
print(len(names))
"""
# of every package of the core, and quick; `make test` runs the others where the extras are
CORE = (
    "algorithms/test_advantages", "algorithms/test_answers", "algorithms/test_filters",
    "algorithms/test_losses", "config/test_config", "config/test_golden", "data/test_cursor",
    "data/test_sources", "engines/test_pool", "loop/test_trainer_requests", "processes/test_worker",
    "records/test_rollouts", "report/test_show", "rewards/test_pool", "rewards/test_registry",
    "stages/test_curriculum", "stages/test_stages", "store/test_deltas", "store/test_facts",
    "store/test_policy_files", "store/test_retention", "store/test_run", "store/test_store",
    "trainer/test_packing", "trainer/test_schedule",
)  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy; packages of extras are not found by an interpreter that has it on its path."""
    folder = tmp_path_factory.mktemp("bare")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "extras"))
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "sitecustomize.py").write_text(BARE_SITE)
    return folder


def environment_of(bare: Path, *more: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (bare, *more)))}


def said_by(bare: Path, *arguments: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=bare,
        env=environment_of(bare),
        capture_output=True,
        text=True,
        timeout=PIPELINE_S,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_the_core_is_imported_without_extras(bare: Path) -> None:
    code, text = said_by(bare, "-c", IMPORTS, str(bare))
    assert code == 0, text
    assert int(text.split()[-1]) > 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["view"], "rlpipe: view: this installation of rlpipe has no rlpipe.extras; install the whole package"),
        (
            ["sql", "select 1"],
            "rlpipe: sql: this installation of rlpipe has no rlpipe.extras; install the whole package",
        ),
        (["serve", "a"], "rlpipe: serve: this installation of rlpipe has no rlpipe.extras; install the whole package"),
        (["plan", "tiny"], "rlpipe: plan: this installation of rlpipe has no rlpipe.extras; install the whole package"),
    ],
)
def test_a_command_of_an_extra_says_what_is_missing(bare: Path, arguments: list[str], message: str) -> None:
    code, text = said_by(bare, "-m", "flows.cli", *arguments)
    assert message in text, text
    assert code == 2


@pytest.mark.parametrize(("extra", "command"), [("view", ["view"]), ("queries", ["sql", "select 1"])])
def test_a_package_of_an_extra_is_named(extra: str, command: list[str], bare: Path, tmp_path: Path) -> None:
    """The whole of rlpipe, as `pip install .` leaves it: the extra
    is there, its packages are not."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", *command], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))},
    )  # fmt: skip
    assert ended.returncode == 2 and f"pip install -c constraints.txt -e '.[{extra}]'" in ended.stderr, ended.stderr


@pytest.mark.slow
def test_tests_of_the_core_pass_without_extras(bare: Path) -> None:
    files = [f"tests/{name}.py" for name in CORE]
    marks = "not e2e and not contract and not learning and not nightly"
    code, text = said_by(bare, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks, *files)
    assert code == 0, text[-4000:]


@pytest.mark.e2e
def test_a_policy_is_exported_without_its_card(bare: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    arguments = ["export", "a", "--to", str(tmp_path / "policy"), "--store", undisturbed.folder.store]
    code, text = said_by(bare, "-m", "flows.cli", *arguments)
    assert code == 0 and "without a model card: " in text, text
    assert (tmp_path / "policy" / "config.json").is_file() and not (tmp_path / "policy" / "README.md").exists()


@pytest.mark.e2e
def test_a_run_on_sglang_needs_no_extra(bare: Path, tmp_path: Path) -> None:
    """SFT, two iterations of RL, reloads that are proved; the second start finds it done."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={bare}/tests/played exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = Folder(tmp_path, f"file://{tmp_path}/store", {"PYTHONPATH": str(bare)})
    few = ["rl.num_iterations=2", "rl.num_prompts=4", "evaluation.every=0", "evaluation.prompts_max=4"]
    sets = [*MINI, *few, "engines.kind=sglang", f"engines.python={python}"]
    folder.complete("played", *sets)
    first = folder.final_sha256("played", 2)
    folder.complete("played", *sets)
    assert folder.final_sha256("played", 2) == first
