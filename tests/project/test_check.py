"""scripts/check.sh, with tools that are played: which parts run, on which files, and
what it says of them in the end."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

TEST = ["ruff check .", "ruff format --check .", "pyright", "unit tests", "pipelines tests/test_first.py"]
REST = ["slow unit tests tests/test_slow.py", "end-to-end tests tests/test_first.py"]
# what a tool that is played writes down: its command line, or the name of the part and
# the files that pytest is given
TOOL = """#!/bin/bash
part="${0##*/}${*:+ $*}"
files=${part##*nightly}
case $part in
"python -c"*) echo 1; exit ;;
"python -m compileall"*) exit ;;
*"-m not slow and"*) part="unit tests" ;;
*"-m first and"*) part=pipelines ;;
*"-m slow and"*) part="slow unit tests" ;;
*"-m "*"and not first and"*) part="end-to-end tests" ;;
*"-m spare"*) files=${part##*-m spare}; part="spare pipelines" ;;
*) files= ;;
esac
echo "$part$files" >> began
! grep -qxF "$part" failing
"""


@pytest.mark.parametrize(
    ("arguments", "failing", "parts", "last"),
    [
        ([], [], TEST, "passed: lint, types, unit tests, pipelines"),
        ([], ["unit tests"], TEST, "failed: unit tests"),
        ([], ["pipelines"], TEST, "failed: pipelines"),
        ([], ["unit tests", "pipelines"], TEST, "failed: unit tests, pipelines"),
        ([], ["ruff format --check ."], TEST[:2], "failed: lint"),
        ([], ["pyright", "unit tests"], TEST[:3], "failed: types"),
        (["spare"], [], ["spare pipelines tests/test_spare.py"], "passed: spare pipelines"),
        (["rest"], [], REST, "passed: slow unit tests, end-to-end tests"),
        (["rest"], ["slow unit tests", "end-to-end tests"], REST, "failed: slow unit tests, end-to-end tests"),
    ],
)
def test_all_parts_of_the_tests_run_and_the_last_line_says_which_failed(
    tmp_path: Path, arguments: list[str], failing: list[str], parts: list[str], last: str
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "check.sh", tmp_path / "scripts")
    (tmp_path / "tests").mkdir()
    marks = {"first": "pytestmark = pytest.mark.e2e\n@pytest.mark.first\n", "slow": "@pytest.mark.slow\n", "none": ""}
    marks["spare"] = "@pytest.mark.spare\n"
    for name, text in marks.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tmp_path / "failing").write_text("".join(f"{part}\n" for part in failing))
    for name in ("ruff", "pyright", "python"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    ended = subprocess.run(
        [tmp_path / "scripts" / "check.sh", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (tmp_path / "began").read_text().splitlines() == parts
    assert (ended.stdout + ended.stderr).splitlines()[-1] == last
    first, *_, took = [line for line in ended.stdout.splitlines() if not line.startswith("passed")]
    assert re.search(r"about \d+ minutes on two quiet cores$", first)
    assert re.fullmatch(r"took \d+:\d\d: ([a-z -]+ \d+:\d\d(, )?)+", took)
    assert ended.returncode == (1 if failing else 0)


def test_a_mark_stands_in_the_file_of_its_tests() -> None:
    """check.sh gives pytest only the files in which a mark is written."""
    helpers = [path for path in ROOT.glob("tests/**/*.py") if not path.name.startswith("test_")]
    assert [path.name for path in helpers if re.search(r"mark\.(e2e|contract|first|slow)\b", path.read_text())] == []
